"""Heads that were read before are read the same again; what is not plain is never taken from memory."""

from __future__ import annotations

import pytest

from gateway.response_head import Head, HeadReader

WHOLE = b"HTTP/1.1 200 OK\r\ndate: Sun\r\nConnection: keep-alive\r\nContent-Length: %d\r\nx-request-id: r\r\n\r\n"


def test_a_known_head_differs_in_its_length_only() -> None:
    reader = HeadReader()
    first, again = reader.read(WHOLE % 5), reader.read(WHOLE % 1234)
    assert first is not None
    assert again is not None
    assert (first[0].length, again[0].length) == (5, 1234)
    assert (first[0].status, first[1]) == (again[0].status, again[1]) == (200, True)
    assert (
        first[0].lines == again[0].lines == b"date: Sun\r\n"
    )  # hop-by-hop, length and id are not the replica's to set


def test_a_head_like_the_last_differs_in_its_length_only_and_another_is_read_as_itself() -> None:
    reader = HeadReader()
    for _ in range(3):  # parsed, known, and the last
        reader.read(WHOLE % 5)
    read = [reader.read(raw) for raw in (WHOLE % 71, WHOLE.replace(b"Sun", b"Mon") % 8, WHOLE % 9)]
    assert [None if one is None else (one[0].length, one[0].lines) for one in read] == [
        (71, b"date: Sun\r\n"),
        (8, b"date: Mon\r\n"),
        (9, b"date: Sun\r\n"),
    ]
    assert reader.read(WHOLE.replace(b"%d", b"7 ")) == reader.read(WHOLE.replace(b"%d", b"7 "))
    before, after = WHOLE.split(b"%d")
    assert reader.read(before[:-2] + after) is None  # shorter than both together


def test_a_stream_head_is_known_whole() -> None:
    reader = HeadReader()
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    for _ in range(2):
        read = reader.read(raw)
        assert read is not None
        assert (read[0].chunked, read[0].length, read[1]) == (True, None, True)


@pytest.mark.parametrize(
    "raw",
    [
        WHOLE.replace(b"%d", b"5, 5"),
        WHOLE.replace(b"%d", b"-5"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx : y\r\n\r\n",
        b"HTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_an_invalid_head_is_invalid_the_second_time_too(raw: bytes) -> None:
    reader = HeadReader()
    assert reader.read(WHOLE % 5) is not None
    assert [reader.read(raw), reader.read(raw)] == [None, None]


def test_two_equal_lengths_are_not_remembered() -> None:
    """The second would stay in the key, and the first could then say anything."""
    reader = HeadReader()
    twice = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Length: 5\r\n\r\n"
    reader.read(twice % 5)
    assert reader.read(twice % 6) is None


def test_a_connection_that_closes_says_so_again() -> None:
    reader = HeadReader()
    raw = b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    for _ in range(2):
        assert reader.read(raw) == (
            Head(503, [(b"connection", b"close"), (b"content-length", b"0")], 0, False, b""),
            False,
        )


@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: chunked, chunked",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked",
    ],
)
def test_a_coding_that_the_client_could_not_undo_is_no_answer(lines: bytes) -> None:
    assert HeadReader().read(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % lines) is None


def test_chunked_is_known_in_any_spelling() -> None:
    read = HeadReader().read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding:  Chunked \r\n\r\n")
    assert read is not None
    assert read[0].chunked
