"""Objectives that a run judges by and a gateway works for: where they differ, it is said."""

from __future__ import annotations

from loadtests import gateway_classes
from loadtests.schedule import Row, Schedule
from policies.model import ServiceClass
from tests.loadtests.scripted import Call, scripted

CLASSES = {
    "interactive": ServiceClass("interactive", ttft_s=30.0, ttft_s_per_token=0.0, tpot_s=3.0),
    "standard": ServiceClass("standard"),
    "batch": ServiceClass("batch", ttft_s=None),
}
INTERACTIVE = {"ttft_s": 2.0, "ttft_s_per_token": 0.0, "tpot_s": None, "itl_s": None, "e2e_s": None}


def schedule(*classes: str) -> Schedule:
    rows = tuple(Row(i, float(i), 10, 3, (i,), service_class=name) for i, name in enumerate(classes))
    return Schedule(rows, 8.0, 2.0, 512, CLASSES)


def test_what_is_tighter_is_named_for_the_classes_that_are_used() -> None:
    (line,) = gateway_classes.differences(schedule("interactive"), {"interactive": INTERACTIVE})
    assert line == (
        "class interactive: judged by ttft_s 30, but the gateway works for the tighter ttft_s 2; "
        "loosen its class, or judge by its own with --config FILE"
    )
    looser = INTERACTIVE | {"ttft_s": 90.0, "tpot_s": 3.0}  # the headers of the requests tighten it
    assert gateway_classes.differences(schedule("interactive"), {"interactive": looser}) == []


def test_a_class_that_the_gateway_has_not_is_named_and_silence_is_no_difference() -> None:
    (line,) = gateway_classes.differences(schedule("batch"), {"interactive": INTERACTIVE})
    assert line == "class batch: the gateway has none of that name and refuses its requests"
    assert gateway_classes.differences(schedule("batch"), None) == []


async def test_classes_are_asked_for_with_the_admin_token() -> None:
    async def admin(call: Call) -> None:
        if call.headers.get("authorization") == "Bearer s3cret":
            await call.plain(200, {"interactive": INTERACTIVE})
        else:
            await call.plain(401, {"errors": ["no"]})

    async with scripted(admin) as server:
        assert await gateway_classes.of(server.url, "s3cret") == {"interactive": INTERACTIVE}
        assert await gateway_classes.of(server.url, None) is None
        assert [call.path for call in server.calls] == ["/admin/config/classes"] * 2
