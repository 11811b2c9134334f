"""Keys, classes and limits, as a client meets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Config, ConfigError, parse
from gateway.errors import GatewayError
from gateway.tenants import Bucket, Tenants, digest, same_secret

ALICE, BOB = "sk-alice-5f1d", "sk-bob-77aa"
FILE = f"""
model_classes = {{"llama-batch" = "batch"}}
[tenants.alice]
keys_sha256 = ["{digest(ALICE).hex()}"]
classes = ["interactive", "batch"]
default_class = "interactive"
requests_per_s = 2.0
request_burst = 2
tokens_per_s = 100.0
token_burst = 1000
concurrency = 3
[tenants.bob]
keys_env = ["BOB_KEY"]
"""


def tenants(text: str = FILE) -> Tenants:
    return Tenants.of(parse(text), {"BOB_KEY": BOB})


def refusal(call: object, *args: object) -> tuple[int, str, float | None]:
    with pytest.raises(GatewayError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value.status, caught.value.code, caught.value.retry_after_s


# -- who ---------------------------------------------------------------------------------------------------------


def test_without_tenants_nobody_needs_a_key() -> None:
    open_house = Tenants.of(Config())
    assert not open_house.configured
    assert open_house.authenticate(None) is None
    assert open_house.authenticate("Bearer whatever") is None
    assert open_house.admit(None, 5, 0.0) is None


def test_a_key_from_the_file_or_the_environment_names_its_tenant() -> None:
    who = tenants()
    assert who.configured
    alice, bob = who.authenticate(f"Bearer {ALICE}"), who.authenticate(f"bearer  {BOB}")
    assert alice is not None
    assert bob is not None
    assert (alice.name, bob.name) == ("alice", "bob")


def test_anthropic_s_clients_send_the_key_in_a_header_of_its_own() -> None:
    found = tenants().authenticate(None, BOB)
    assert found is not None
    assert found.name == "bob"


@pytest.mark.parametrize("header", [None, "", "Bearer ", "Basic YTpi"])
def test_no_key_is_401(header: str | None) -> None:
    assert refusal(tenants().authenticate, header) == (401, "no_key", None)


def test_a_wrong_key_is_401_and_not_repeated() -> None:
    with pytest.raises(GatewayError) as caught:
        tenants().authenticate("Bearer sk-wrong")
    assert (caught.value.status, caught.value.code) == (401, "bad_key")
    assert "sk-wrong" not in str(caught.value)


def test_a_key_variable_that_is_not_set_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError) as caught:
        Tenants.of(parse(FILE), {})
    assert caught.value.lines == ['tenants.bob.keys_env[0] = "BOB_KEY": this environment variable is not set']


def test_one_key_cannot_belong_to_two_tenants() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.bob: shares a key with tenant alice"):
        Tenants.of(parse(FILE), {"BOB_KEY": ALICE})


def test_keys_are_not_shown() -> None:
    assert ALICE not in repr(tenants())


def test_a_secret_is_compared_whatever_its_length() -> None:
    assert same_secret("abc", "abc")
    assert not same_secret("ab", "abc")
    assert not same_secret("", "abc")


# -- what --------------------------------------------------------------------------------------------------------


def test_the_class_comes_from_the_header_else_the_model_else_the_tenant_else_the_default() -> None:
    who = tenants()
    alice, bob = who.by_name["alice"], who.by_name["bob"]
    assert who.service_class(alice, "batch", "llama") == "batch"
    assert who.service_class(alice, None, "llama-batch") == "batch"
    assert who.service_class(alice, "interactive", "llama-batch") == "interactive"
    assert who.service_class(alice, None, "llama") == "interactive"
    assert who.service_class(bob, None, "llama") == "standard"
    assert who.service_class(None, None, "llama") == "standard"


def test_a_class_that_the_key_may_not_use_is_403_and_an_unknown_one_400() -> None:
    who = tenants()
    assert refusal(who.service_class, who.by_name["alice"], "standard", "m") == (403, "class_not_allowed", None)
    assert refusal(who.service_class, who.by_name["alice"], "gold", "m") == (400, "malformed", None)
    with pytest.raises(GatewayError, match="x-service-class: 'gold' must be one of batch, interactive, standard"):
        who.service_class(None, "gold", "m")


def test_a_tenant_without_the_default_class_gets_the_first_of_its_own() -> None:
    who = tenants(f'[tenants.c]\nkeys_sha256 = ["{"0" * 64}"]\nclasses = ["batch", "interactive"]')
    assert who.service_class(who.by_name["c"], None, "m") == "batch"


# -- how much ----------------------------------------------------------------------------------------------------


def test_requests_over_the_rate_are_429_with_the_time_until_they_would_pass() -> None:
    who = tenants()
    alice = who.by_name["alice"]
    leases = [who.admit(alice, 1, 0.0), who.admit(alice, 1, 0.0)]
    assert refusal(who.admit, alice, 1, 0.0) == (429, "over_quota", 0.5)
    assert refusal(who.admit, alice, 1, 0.4) == (429, "over_quota", pytest.approx(0.1))
    for lease in leases:
        assert lease is not None
        lease.settle(2, 0.5)
    assert who.admit(alice, 1, 0.5) is not None


def test_tokens_are_charged_by_estimate_and_settled_by_usage() -> None:
    who = tenants()
    alice = who.by_name["alice"]
    lease = who.admit(alice, 900, 0.0)
    assert lease is not None
    assert refusal(who.admit, alice, 200, 0.0) == (429, "over_quota", 1.0)
    lease.settle(100, 0.0)  # it used less: 800 come back
    again = who.admit(alice, 200, 0.0)
    assert again is not None
    again.settle(1700, 0.0)  # more than there was: in debt
    assert refusal(who.admit, alice, 100, 1.0) == (429, "over_quota", pytest.approx(8.0))


def test_a_refused_request_gets_its_tokens_back() -> None:
    who = tenants()
    alice = who.by_name["alice"]
    lease = who.admit(alice, 1000, 0.0)
    assert lease is not None
    lease.settle(0, 0.0)
    assert alice.tokens.level == 1000.0


def test_a_request_larger_than_the_burst_passes_when_the_bucket_is_full() -> None:
    who = tenants()
    alice = who.by_name["alice"]
    assert who.admit(alice, 5000, 0.0) is not None
    assert alice.tokens.level == -4000.0


def test_what_waited_and_is_asked_for_again_is_charged_once() -> None:
    known = tenants()
    alice = known.by_name["alice"]
    for _ in range(5):  # of two at once
        waited = known.admit(alice, 900, 0.0)
        assert waited is not None
        waited.give_back(0.0)
        waited.give_back(0.0)
    assert (alice.open, alice.requests.level, alice.tokens.level) == (0, 2.0, 1000.0)
    ran = known.admit(alice, 900, 0.0)
    assert ran is not None
    ran.settle(None, 0.0)
    ran.give_back(0.0)
    assert (alice.open, alice.requests.level, alice.tokens.level) == (0, 1.0, 100.0)


def test_concurrency_is_counted_until_each_lease_is_settled_once() -> None:
    who = tenants(FILE.replace("requests_per_s = 2.0", ""))
    alice = who.by_name["alice"]
    leases = [who.admit(alice, 1, 0.0) for _ in range(3)]
    assert refusal(who.admit, alice, 1, 0.0) == (429, "over_quota", 1.0)
    first = leases[0]
    assert first is not None
    first.settle(None, 0.0)
    first.settle(None, 0.0)
    assert alice.open == 2


def test_a_refusal_charges_nothing() -> None:
    who = tenants()
    alice = who.by_name["alice"]
    who.admit(alice, 1000, 0.0)
    requests = alice.requests.level
    refusal(who.admit, alice, 1000, 0.0)
    assert (alice.requests.level, alice.open) == (requests, 1)


def test_a_new_configuration_keeps_levels_and_open_requests() -> None:
    before = tenants()
    lease = before.admit(before.by_name["alice"], 400, 0.0)
    assert lease is not None
    after = tenants(
        FILE.replace("token_burst = 1000", "token_burst = 500").replace("concurrency = 3", "concurrency = 1")
    )
    after.adopt(before)
    found = after.authenticate(f"Bearer {ALICE}")
    assert found is after.by_name["alice"]
    assert (found.open, found.tokens.level, found.concurrency) == (1, 500.0, 1)
    lease.settle(None, 0.0)
    assert found.open == 0


@given(
    st.floats(0.1, 1000),
    st.floats(1, 1000),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 2000)), max_size=40),
)
def test_over_any_time_no_more_than_burst_plus_rate_times_time_passes(
    rate: float, burst: float, asks: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, burst)
    now, taken, last = 0.0, 0.0, 0.0
    for wait, units in asks:
        now += wait
        if bucket.wait_s(units, now) == 0.0:
            bucket.take(units, now)
            taken, last = taken + units, max(last, units)
    assert taken <= burst + rate * now + last + 1e-6  # the last one may leave a debt


@given(st.floats(0.1, 1000), st.floats(1, 1000), st.floats(0, 5000), st.floats(0, 100))
def test_the_time_told_is_the_time_until_it_passes(rate: float, burst: float, first: float, second: float) -> None:
    bucket = Bucket(rate, burst)
    bucket.wait_s(0, 0.0)
    bucket.take(first, 0.0)
    wait = bucket.wait_s(second, 0.0)
    assert bucket.wait_s(second, wait + 1e-6 * (1 + wait)) <= 1e-5
