"""Who is asking, what they may ask for, and how much: API keys, classes, rate limits, concurrency.

Keys are 256-bit random strings, so a plain SHA-256 is as good as a slow hash, and costs a microsecond; digests are
compared in constant time. Rates are token buckets. Tokens are charged by estimate on the way in and settled by usage
at the end; a request larger than the burst passes when the bucket is full and leaves it in debt. With no tenants
configured everyone is nobody in particular, and the Authorization header is the replica's business.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.config import Config, ConfigError
from gateway.errors import Code, GatewayError
from gateway.sections import Tenant as TenantTable


@dataclass(slots=True)
class Bucket:
    """`rate` units per second, at most `burst` saved up. Rate None: no limit."""

    rate: float | None
    burst: float
    level: float = 0.0
    at: float | None = None  # monotonic seconds of `level`; None: never used, so full

    def wait_s(self, units: float, now: float) -> float:
        """Seconds until `units` may be taken; 0 when they may be taken now."""
        if self.rate is None:
            return 0.0
        self._fill(self.rate, now)
        return max(0.0, (min(units, self.burst) - self.level) / self.rate)

    def take(self, units: float, now: float) -> None:
        """Takes what `wait_s` allowed; a negative number gives back."""
        if self.rate is not None:
            self._fill(self.rate, now)
            self.level = min(self.burst, self.level - units)

    def _fill(self, rate: float, now: float) -> None:
        if self.at is None:
            self.level = self.burst
        else:
            self.level = min(self.burst, self.level + rate * max(0.0, now - self.at))
        self.at = now


@dataclass(slots=True)
class Tenant:
    name: str
    classes: tuple[str, ...]  # empty: all
    default_class: str | None
    weight: float
    concurrency: int | None
    requests: Bucket
    tokens: Bucket
    open: int = 0

    def full(self) -> GatewayError:
        """The refusal of one more open request."""
        message = f"this key has as many open requests as it may, {self.concurrency}; wait until one ends"
        return GatewayError(Code.OVER_QUOTA, message, retry_after_s=1.0)

    def over(self, what: str, wait_s: float) -> GatewayError:
        """The refusal by a rate: of `requests` or of `tokens`."""
        limit = self.requests if what == "requests" else self.tokens
        message = (
            f"this key is over its rate of {what}: {limit.rate:g} {what} per second, "
            f"{limit.burst:g} at once; wait as long as Retry-After says"
        )
        return GatewayError(Code.OVER_QUOTA, message, retry_after_s=wait_s)

    def resume(self, estimated_tokens: int) -> Lease:
        """A request that was admitted before this process lived: it is open, and was charged already."""
        self.open += 1
        return Lease(self, estimated_tokens)


@dataclass(slots=True)
class Lease:
    """One admitted request of a tenant. `settle` it exactly once, whatever became of it; more is harmless."""

    tenant: Tenant
    estimated_tokens: int
    settled: bool = False

    def settle(self, used_tokens: int | None, now: float) -> None:
        """`used_tokens` is prompt plus output; None when unknown, then the estimate stands; 0 for a refusal."""
        if self.settled:
            return
        self.settled = True
        self.tenant.open -= 1
        if used_tokens is not None:
            self.tenant.tokens.take(used_tokens - self.estimated_tokens, now)

    def give_back(self, now: float) -> None:
        """It waited and never ran, and may be asked for again: as if it had not come."""
        if not self.settled:
            self.settle(0, now)
            self.tenant.requests.take(-1, now)


@dataclass(slots=True)
class Tenants:
    """Made anew from each configuration; `adopt` carries counters over."""

    default_class: str
    classes: frozenset[str]
    model_classes: Mapping[str, str]
    by_name: dict[str, Tenant] = field(default_factory=dict)
    _by_digest: dict[bytes, list[tuple[bytes, Tenant]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: Config, environ: Mapping[str, str] = os.environ) -> Tenants:
        """Raises ConfigError for a key variable that is not set or a key that two tenants share."""
        made = cls(config.default_class, frozenset(config.classes), config.model_classes)
        lines: list[str] = []
        owner: dict[bytes, str] = {}
        for name, table in config.tenants.items():
            tenant = made.by_name[name] = _tenant(name, table)
            digests = [bytes.fromhex(key) for key in table.keys_sha256]
            for i, variable in enumerate(table.keys_env):
                if key := environ.get(variable):
                    digests.append(digest(key))
                else:
                    lines.append(f'tenants.{name}.keys_env[{i}] = "{variable}": this environment variable is not set')
            for d in digests:
                if owner.setdefault(d, name) != name:
                    lines.append(f"tenants.{name}: shares a key with tenant {owner[d]}; a key has one tenant")
                made._by_digest.setdefault(d[:4], []).append((d, tenant))
        if lines:
            raise ConfigError(lines)
        return made

    @property
    def configured(self) -> bool:
        """Whether clients need a key, and the Authorization header is ours."""
        return bool(self.by_name)

    def adopt(self, before: Tenants) -> None:
        """Tenants that stay keep their levels and open requests; called when a configuration replaces another."""
        stay: dict[str, Tenant] = {}
        for name, new in self.by_name.items():
            old = before.by_name.get(name)
            if old is None:
                stay[name] = new
                continue
            stay[name] = old  # open leases refer to the old object, so it lives on with the new limits
            old.classes, old.default_class, old.weight = new.classes, new.default_class, new.weight
            old.concurrency = new.concurrency
            for bucket, limits in ((old.requests, new.requests), (old.tokens, new.tokens)):
                bucket.rate, bucket.burst = limits.rate, limits.burst
                bucket.level = min(bucket.level, bucket.burst)
        self.by_name = stay
        for rows in self._by_digest.values():
            rows[:] = [(known, stay[tenant.name]) for known, tenant in rows]

    def authenticate(self, authorization: str | None, x_api_key: str | None = None) -> Tenant | None:
        """The tenant of a key in `Authorization: Bearer` or `x-api-key` (Anthropic's clients). Raises 401.

        None when no tenants are configured.
        """
        if not self.by_name:
            return None
        key = x_api_key
        if authorization:
            scheme, _, rest = authorization.partition(" ")
            key = rest.strip() if scheme.lower() == "bearer" else key
        if not key:
            raise GatewayError(Code.NO_KEY, "an API key is needed: send Authorization: Bearer KEY, or x-api-key")
        wanted = digest(key)
        for known, tenant in self._by_digest.get(wanted[:4], ()):
            if hmac.compare_digest(known, wanted):
                return tenant
        raise GatewayError(Code.BAD_KEY, "this API key is not known here; check the key, or ask the operator for one")

    def service_class(self, tenant: Tenant | None, header: str | None, model: str) -> str:
        """Header, else the model's class, else the tenant's, else the gateway's. Raises 400 or 403."""
        if header is not None and header not in self.classes:
            names = ", ".join(sorted(self.classes))
            raise GatewayError(
                Code.MALFORMED, f"x-service-class: {header[:200]!r} must be one of {names}", param="x-service-class"
            )
        wanted = header or self.model_classes.get(model)
        if wanted is None:
            wanted = tenant.default_class if tenant and tenant.default_class else self.default_class
            if tenant and tenant.classes and wanted not in tenant.classes:
                wanted = tenant.classes[0]  # the gateway's default is not for this tenant
        if tenant and tenant.classes and wanted not in tenant.classes:
            names = ", ".join(tenant.classes)
            raise GatewayError(Code.CLASS_NOT_ALLOWED, f"this key may use the classes {names}, not {wanted}")
        return wanted

    def likely_class(self, name: str | None, header: bytes) -> str:
        """The class that a request refused at the door is counted under: the one asked for, where it is known."""
        asked = header.decode("latin-1")
        if asked in self.classes:
            return asked
        tenant = self.by_name.get(name or "")
        return tenant.default_class if tenant and tenant.default_class else self.default_class

    def admit(self, tenant: Tenant | None, estimated_tokens: int, now: float) -> Lease | None:
        """Charges the tenant's limits. Raises 429 over_quota, charging nothing, with the time until it would pass."""
        if tenant is None:
            return None
        if tenant.concurrency is not None and tenant.open >= tenant.concurrency:
            raise tenant.full()
        waits = ((tenant.requests.wait_s(1, now), "requests"), (tenant.tokens.wait_s(estimated_tokens, now), "tokens"))
        wait_s, what = max(waits)
        if wait_s > 0:
            raise tenant.over(what, wait_s)
        tenant.requests.take(1, now)
        tenant.tokens.take(estimated_tokens, now)
        tenant.open += 1
        return Lease(tenant, estimated_tokens)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def same_secret(given: str, wanted: str) -> bool:
    """Constant-time, whatever the lengths."""
    return hmac.compare_digest(digest(given), digest(wanted))


def _tenant(name: str, table: TenantTable) -> Tenant:
    return Tenant(
        name=name,
        classes=tuple(table.classes),
        default_class=table.default_class,
        weight=table.weight,
        concurrency=table.concurrency,
        requests=Bucket(table.requests_per_s, float(table.request_burst)),
        tokens=Bucket(table.tokens_per_s, float(table.token_burst)),
    )
