"""Retries as openai-python and anthropic-sdk-python do them."""

from __future__ import annotations

import random

import pytest

from loadtests.retry import NONE, OFFICIAL


def wait(done: int, status: int | None, **headers: str) -> float | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return OFFICIAL.wait_s(done, status, named, random.Random(1))


@pytest.mark.parametrize("status", [None, 408, 409, 429, 500, 502, 503])
def test_these_are_retried(status: int | None) -> None:
    assert wait(0, status) is not None


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 422])
def test_these_are_not(status: int) -> None:
    assert wait(0, status) is None


def test_at_most_two_retries() -> None:
    assert (wait(1, 500) is not None, wait(2, 500)) == (True, None)


def test_waits_double_from_half_a_second_less_up_to_a_quarter() -> None:
    first, second = wait(0, 500), wait(1, 500)
    assert first is not None
    assert second is not None
    assert 0.375 <= first <= 0.5
    assert 0.75 <= second <= 1.0


def test_the_server_says_how_long() -> None:
    assert wait(0, 429, retry_after="3") == 3.0
    assert wait(0, 429, retry_after_ms="250", retry_after="3") == 0.25


def test_a_wait_over_a_minute_is_not_obeyed() -> None:
    asked = wait(0, 429, retry_after="120")
    assert asked is not None
    assert asked <= 0.5


def test_should_retry_decides() -> None:
    assert wait(0, 429, x_should_retry="false") is None
    assert wait(0, 400, x_should_retry="true") is not None


def test_no_retries_without_the_profile() -> None:
    assert NONE.wait_s(0, 500, {}, random.Random(1)) is None
