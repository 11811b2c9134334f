"""Conversations that are in stay in; new ones begin while the caches have room for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.model import Request, Usage
from policies.working_set import NOBODY, WorkingSet

CAPACITY = 100_000.0


def fits(ws: WorkingSet, tokens: float, capacity: float, now: float) -> bool:
    ws.expire(now)
    return tokens <= ws.headroom(capacity)


def turn(session: str | None, tokens: int, chain: tuple[int, ...] = ()) -> Request:
    return Request(f"{session}-{tokens}", session=session, prompt_tokens=tokens, chain=chain)


def converse(ws: WorkingSet, session: str, turns: int, at: float, think_s: float = 5.0, tokens: int = 10_000) -> float:
    for n in range(turns):
        request = turn(session, tokens + n)
        ws.began(request, at)
        ws.ended(request, Usage(tokens + n, 100, 0), at + 1.0)
        at += 1.0 + think_s
    return at


def returning(conversations: int = 4, turns: int = 12) -> tuple[WorkingSet, float]:
    ws, at = WorkingSet(0.7), 0.0
    for n in range(conversations):
        at = converse(ws, f"old{n}", turns, at)
    return ws, at + 300.0  # long enough to give the old ones up


def test_nobody_is_kept_out_before_conversations_are_seen_to_return() -> None:
    ws = WorkingSet(0.7)
    converse(ws, "one", 3, 0.0)
    assert not ws.enforced
    assert fits(ws, 10 * CAPACITY, CAPACITY, 20.0)


def test_a_new_conversation_waits_while_those_that_are_alive_fill_the_caches() -> None:
    ws, at = returning()
    assert ws.enforced
    for n in range(6):  # 6 open turns of 10,000 tokens
        ws.began(turn(f"live{n}", 10_000), at)
    assert fits(ws, 5_000, CAPACITY, at)
    assert not fits(ws, 20_000, CAPACITY, at)
    assert fits(ws, 20_000, 0.0, at)  # unknown capacity


def test_a_conversation_that_does_not_come_back_makes_room() -> None:
    ws, at = returning()
    for n in range(6):
        converse(ws, f"live{n}", 2, at)
    assert not fits(ws, 60_000, CAPACITY, at + 12.0)
    assert fits(ws, 60_000, CAPACITY, at + 600.0)


def test_where_most_conversations_have_one_turn_nobody_is_kept_out() -> None:
    ws, at = WorkingSet(0.7), 0.0
    for n in range(200):
        at = converse(ws, f"single{n}", 1, at)
        fits(ws, 0.0, CAPACITY, at)
    assert not ws.enforced


def test_without_a_session_the_growing_prompt_tells_a_conversation() -> None:
    ws = WorkingSet(0.7)
    first = turn(None, 600, chain=(1, 2, 3))
    ws.began(first, 0.0)
    ws.ended(first, None, 1.0)
    assert ws.known(turn(None, 1200, chain=(1, 2, 3, 4, 5))) is not None
    assert ws.known(turn(None, 1200, chain=(1, 2, 9, 9, 9))) is None


def test_the_share_shrinks_when_turns_find_their_context_gone() -> None:
    ws = WorkingSet(0.7)
    for _ in range(20):
        ws.reported(10_000, 2_000)
    assert 0.62 < ws.share < 0.64
    for _ in range(20):
        ws.reported(10_000, 9_900)
    assert 0.63 < ws.share < 0.65


@given(steps=st.lists(st.tuples(st.sampled_from(["began", "ended", "expire"]), st.integers(0, 5)), max_size=60))
def test_conversations_stand_in_the_order_in_which_they_were_seen(steps: list[tuple[str, int]]) -> None:
    working_set, now = WorkingSet(1.0), 0.0
    expected: dict[str | int, int] = {}  # turns in progress, longest unseen first
    for what, who in steps:
        now += 10.0
        asked = Request(f"r{now:g}", session=str(who), prompt_tokens=100)
        if what == "began":
            working_set.began(asked, now)
            expected[str(who)] = expected.pop(str(who), 0) + 1
        elif what == "ended":
            working_set.ended(asked, None, now)
            if str(who) in expected:
                expected[str(who)] = max(0, expected.pop(str(who)) - 1)
        else:
            working_set.expire(now + 1e6)  # everybody is silent for too long, those with an open turn excepted
            expected = {key: turns for key, turns in expected.items() if turns}
        seen, at = [], working_set._oldest
        while at != NOBODY:
            seen.append(working_set._places[at].key)
            at = working_set._places[at].newer
        assert len(working_set._places) == len(seen) + len(working_set._free) <= 6, "places are used again"
        if what == "expire":  # those with an open turn come up again later, which one first matters to nobody
            assert set(seen) == set(expected)
            expected = {key: expected[key] for key in seen}
        assert seen == list(expected)
