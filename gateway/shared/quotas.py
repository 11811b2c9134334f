"""Tenants' rates over all gateways: token buckets in Redis, taken from and given back to by script.

A script reads, fills, checks and takes in one step with the server's clock, so gateways cannot overdraw together and
their clocks do not matter. A bucket that was not used for as long as it takes to fill is forgotten: it is full then.
Concurrency is not counted there, where a gateway that dies would leave its count behind, but summed from the registers.
"""

from __future__ import annotations

from gateway.errors import GatewayError
from gateway.shared.store import Command, Store
from gateway.tenants import Tenant

# KEYS: the bucket. ARGV: requests/s, burst, tokens/s, burst (rate 0: no limit), tokens asked for, when to forget in ms.
# Answers the seconds to wait and what is short, as "1.5 tokens"; "0": taken.
TAKE = """
local rr, rb, tr, tb = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local asked = tonumber(ARGV[5])
local t = redis.call('TIME')
local now = t[1] + t[2] / 1000000
local b = redis.call('HMGET', KEYS[1], 'r', 't', 'at')
local gone = math.max(0, now - (tonumber(b[3]) or now))
local r = math.min(rb, (tonumber(b[1]) or rb) + rr * gone)
local k = math.min(tb, (tonumber(b[2]) or tb) + tr * gone)
local wait, what = 0, 'requests'
if rr > 0 then wait = math.max(wait, (math.min(1, rb) - r) / rr) end
if tr > 0 and (math.min(asked, tb) - k) / tr > wait then wait, what = (math.min(asked, tb) - k) / tr, 'tokens' end
if wait > 0 then return tostring(wait) .. ' ' .. what end
redis.call('HSET', KEYS[1], 'r', tostring(r - 1), 't', tostring(k - asked), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return '0'
"""
# KEYS: the bucket. ARGV: tokens.
GIVE_BACK = """
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBYFLOAT', KEYS[1], 't', ARGV[1]) end
return 0
"""
MOST_FORGET_S = 7 * 86_400.0


def limited(tenant: Tenant) -> bool:
    return tenant.requests.rate is not None or tenant.tokens.rate is not None


def take(store: Store, tenant: Tenant, tokens: int) -> Command:
    requests, bucket = tenant.requests, tenant.tokens
    fills_s = [b.burst / b.rate for b in (requests, bucket) if b.rate is not None]
    forget_s = min(MOST_FORGET_S, 2.0 * max(fills_s, default=0.0) + 60.0)
    rates = (requests.rate or 0, requests.burst, bucket.rate or 0, bucket.burst)
    return ("EVAL", TAKE, 1, store.key("quota", tenant.name), *rates, tokens, round(forget_s * 1000))


def refused(tenant: Tenant, answer: bytes) -> GatewayError | None:
    """What `take` was answered; None: taken."""
    wait_s, _, what = answer.decode().partition(" ")
    return tenant.over(what or "requests", float(wait_s)) if float(wait_s) > 0.0 else None


def give_back(store: Store, tenant: Tenant, tokens: int) -> Command:
    return ("EVAL", GIVE_BACK, 1, store.key("quota", tenant.name), tokens)
