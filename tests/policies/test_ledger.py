"""The ledger as its replica lives through a day: first tokens are the clock, one release per charge."""

from __future__ import annotations

import pytest

from policies.ledger import Charge, WorkLedger

RATE = 1000.0  # tokens/s of these examples


def charge(tokens: float, at: float, *, clocked: bool = True, release_at: float = 0.0) -> Charge:
    return Charge(tokens, tokens / RATE, tokens + 100, at, clocked=clocked, release_at=release_at)


def three_in_line() -> tuple[WorkLedger, list[Charge]]:
    ledger, charges = WorkLedger(), [charge(1000, 0.0), charge(500, 0.0), charge(250, 0.0)]
    for name, c in zip("abc", charges, strict=True):
        ledger.charge(name, c)
    return ledger, charges


def test_work_is_charged_when_it_is_decided() -> None:
    ledger, _ = three_in_line()
    assert (ledger.backlog(0.0), ledger.in_flight, ledger.live_decodes) == (1750.0, 3, 0)
    assert ledger.kv_tokens == 2050.0


def test_only_the_head_drains_with_time_so_a_stuck_replica_keeps_its_backlog() -> None:
    ledger, _ = three_in_line()
    assert ledger.backlog(0.5) == 1250.0
    assert ledger.backlog(60.0) == 750.0


def test_a_first_token_proves_everything_before_it_is_prefilled() -> None:
    ledger, (a, b, c) = three_in_line()
    assert ledger.first_token("b", b, 1.4) == [a, b]
    assert ledger.backlog(1.4) == 250.0
    assert (ledger.live_decodes, a.prefilling, b.decoding, c.prefilling) == (1, False, True, True)
    assert ledger.first_token("a", a, 1.5) == []  # late news: a decodes, its prefill was already taken off
    assert ledger.live_decodes == 2


def test_a_release_gives_back_what_is_left_and_nothing_twice() -> None:
    ledger, (a, b, c) = three_in_line()
    ledger.first_token("a", a, 1.0)
    ledger.release("b", b, 1.0)  # cancelled before its first token
    assert (ledger.backlog(1.0), ledger.in_flight, ledger.live_decodes) == (250.0, 2, 1)
    ledger.release("a", a, 2.0)
    ledger.release("c", c, 2.0)
    assert (ledger.backlog(2.0), ledger.in_flight, ledger.live_decodes, ledger.kv_tokens) == (0.0, 0, 0, 0.0)


def test_what_shows_no_first_token_is_released_at_the_predicted_instant() -> None:
    ledger = WorkLedger()
    ledger.charge("embedding", charge(1000, 0.0, clocked=False, release_at=1.0))
    ledger.charge("chat", charge(400, 0.2))
    assert ledger.next_settle() == 1.0
    assert ledger.backlog(0.5) == 900.0
    assert ledger.backlog(1.0) == 400.0
    assert ledger.backlog(1.25) == 150.0
    assert ledger.next_settle() is None
    assert ledger.in_flight == 2


def test_a_restart_forgets_the_work_but_not_who_is_still_owed_an_answer() -> None:
    ledger, charges = three_in_line()
    ledger.first_token("a", charges[0], 1.0)
    ledger.restart()
    assert (ledger.backlog(1.0), ledger.in_flight, ledger.live_decodes, ledger.kv_tokens) == (0.0, 3, 0, 0.0)
    new = charge(100, 2.0)
    ledger.charge("d", new)
    assert ledger.first_token("b", charges[1], 2.1) == []  # an event of the former life
    for name, c in zip("abc", charges, strict=True):
        ledger.release(name, c, 2.2)
    assert (ledger.in_flight, ledger.kv_tokens, ledger.backlog(2.0)) == (1, 200.0, 100.0)


def test_an_idle_replica_holds_exactly_nothing_whatever_ends_last() -> None:
    """Sums of floats drift; the last to leave may be one from before a restart."""
    ledger, charges = three_in_line()
    ledger.restart()
    third = charge(100, 2.0)
    third.kv_tokens = 0.1
    tenth = charge(100, 2.0)
    tenth.kv_tokens = 0.2
    ledger.charge("d", third)
    ledger.charge("e", tenth)
    ledger.release("d", third, 3.0)
    ledger.release("e", tenth, 3.0)
    assert ledger.kv_tokens > 0.0  # a rounding error
    for name, c in zip("abc", charges, strict=True):
        ledger.release(name, c, 3.0)
    assert (ledger.in_flight, ledger.kv_tokens) == (0, 0.0)


def test_its_own_prefill_begins_after_what_others_had_there() -> None:
    """Two gateways count on one engine: if both heads drained at once, it would seem twice as fast as it is."""
    ledger = WorkLedger()
    first = Charge(1000, 1.0, 1100, 0.0, elsewhere_s=2.0)
    ledger.charge("first", first)
    assert ledger.both(1.5) == (1000.0, 1.0)
    assert ledger.both(2.5) == (500.0, 0.5)
    second = Charge(500, 0.5, 600, 2.5, elsewhere_s=0.3)
    ledger.charge("second", second)
    ledger.first_token("first", first, 3.0, elsewhere_s=0.2)
    assert ledger.backlog_s(3.2) == 0.5, "of the 0.3 s between them 0.2 are left"
    assert ledger.backlog_s(3.4) == pytest.approx(0.3)


def test_what_may_have_stood_behind_others_is_marked_and_what_was_sent_before_is_not() -> None:
    ledger = WorkLedger()
    charges = [charge(1000, 0.0), charge(1000, 0.9), Charge(1000, 1.0, 1100, 1.5, elsewhere_s=0.1)]
    for name, c in zip("abc", charges, strict=True):
        ledger.charge(name, c)
    ledger.crowd(since=0.8)
    assert [c.crowded for c in charges] == [False, True, True]
