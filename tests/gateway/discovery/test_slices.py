"""What EndpointSlices mean: pods, families, ports, readiness, and who is who."""

from __future__ import annotations

import pytest

from gateway.discovery.slices import Spoken, members
from tests.gateway.discovery.apiserver import endpoint, slice_of

HTTP = Spoken(port="http")


def test_a_pod_is_known_by_its_uid_and_called_by_its_name() -> None:
    (one,) = members([slice_of(endpoint("vllm-0", "10.244.1.5", "uid-1"))], HTTP)
    assert (one.table.name, one.table.url, one.identity, one.ready) == (
        "vllm-0",
        "http://10.244.1.5:8000",
        "uid-1",
        True,
    )


def test_a_pod_in_several_slices_and_both_families_is_one_replica() -> None:
    four, six = endpoint("vllm-0", "10.244.1.5", "uid-1"), endpoint("vllm-0", "fd00::5", "uid-1")
    slices = [slice_of(six, name="six", family="IPv6"), slice_of(four), slice_of(four, name="other-service")]
    assert [m.table.url for m in members(slices, HTTP)] == ["http://10.244.1.5:8000"]
    assert [m.table.url for m in members(slices[:1], HTTP)] == ["http://[fd00::5]:8000"]


def test_ready_in_one_slice_is_ready() -> None:
    """While a pod moves between slices it stands in both for a moment."""
    slices = [slice_of(endpoint("p", "10.0.0.1", "u", ready=False)), slice_of(endpoint("p", "10.0.0.1", "u"), name="b")]
    assert [m.ready for m in members(slices, HTTP)] == [True]


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        ({}, True),
        ({"ready": None}, True),  # unknown means ready
        ({"ready": False}, False),
        ({"ready": False, "terminating": True}, False),  # serving still: it drains
        ({"ready": True, "terminating": True}, False),  # publishNotReadyAddresses says ready all the time
    ],
)
def test_readiness(conditions: dict[str, bool | None], ready: bool) -> None:
    assert [m.ready for m in members([slice_of(endpoint("p", "10.0.0.1", "u", **conditions))], HTTP)] == [ready]


def test_an_address_that_went_to_another_pod_is_the_ready_one_s() -> None:
    old = endpoint("old", "10.0.0.1", "u-old", ready=False, terminating=True)
    slices = [slice_of(old), slice_of(endpoint("new", "10.0.0.1", "u-new"), name="b")]
    assert [m.table.name for m in members(slices, HTTP)] == ["new"]


def test_ports_by_name_by_number_and_the_first() -> None:
    slices = [slice_of(endpoint("p", "10.0.0.1", "u"))]

    def urls(port: str | None) -> list[str]:
        return [m.table.url for m in members(slices, Spoken(port=port))]

    assert urls("http") == ["http://10.0.0.1:8000"]
    assert urls("8001") == ["http://10.0.0.1:8001"]
    assert urls(None) == ["http://10.0.0.1:9100"]
    assert urls("gone") == []


def test_endpoints_without_a_pod_are_known_by_their_address() -> None:
    (one,) = members([slice_of(endpoint("", "10.0.0.9"))], Spoken("https", "http", key_env="K"))
    assert (one.who, one.table.url, one.table.key_env) == ("10.0.0.9:8000", "https://10.0.0.9:8000", "K")


def test_names_too_long_for_an_id_are_shortened_and_stay_apart() -> None:
    slices = [slice_of(*(endpoint("vllm-" + "x" * 80 + end, f"10.0.0.{i}", end) for i, end in enumerate("ab")))]
    names = [m.table.name for m in members(slices, HTTP)]
    assert len(set(names)) == 2
    assert {len(name) for name in names} == {64}


def test_what_cannot_be_understood_is_left_out() -> None:
    odd = [{"metadata": {"name": "x"}, "endpoints": None, "ports": None}, slice_of({"addresses": []})]
    good = slice_of(endpoint("p", "10.0.0.1", "u"), endpoint("q", "not an address", "v"))
    assert [m.table.name for m in members([*odd, good], HTTP)] == ["p"]
