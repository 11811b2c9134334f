"""Chunked coding: strict, cut anywhere, and with the framing kept while it is whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chunks import WHOLE_CHUNK_BYTES, ChunkDecoder, ChunkError

END = b"0\r\n\r\n"


def frame(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in payloads)


def run(pieces: list[bytes]) -> tuple[bytes, bytes, bool, bytes]:
    decoder = ChunkDecoder()
    payload = framed = b""
    ended = False
    for piece in pieces:
        assert not ended
        got, frame_, ended = decoder.feed(piece)
        payload += got
        framed += frame_ or b""
    return payload, framed, ended, decoder.rest


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_any_cut_gives_the_same_payload_and_framing(payloads: list[bytes], data: st.DataObject) -> None:
    whole = frame(*payloads) + END
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert run(pieces) == (b"".join(payloads), frame(*payloads), True, b"")


def test_extensions_and_trailers_are_read_and_what_follows_is_kept() -> None:
    data = b"3;name=value\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\nHTTP/1.1"
    payload, _, ended, rest = run([data])
    assert (payload, ended, rest) == (b"abc", True, b"HTTP/1.1")
    for cut in range(1, data.index(b"HTTP")):
        payload, _, ended, rest = run([data[:cut], data[cut:]])
        assert (payload, ended) == (b"abc", True)


def test_a_large_chunk_is_handed_on_in_pieces_without_framing() -> None:
    big = b"x" * (WHOLE_CHUNK_BYTES + 1)
    decoder = ChunkDecoder()
    wire = frame(big, b"after") + END
    first, framed, ended = decoder.feed(wire[:1000])
    assert (len(first), framed, ended) == (1000 - 7, None, False)
    for at in range(1000, len(wire) - 1):
        if at < len(big):
            continue
        piece, framed, ended = decoder.feed(wire[at : at + 1] if at > len(big) else wire[1000 : at + 1])
        first += piece
    piece, framed, ended = decoder.feed(wire[-1:])
    assert (first, ended) == (big + b"after", True)


@pytest.mark.parametrize(
    "wrong",
    [b"zz\r\n", b"-1\r\n", b"0x3\r\nabc\r\n", b"3\nabc\n", b"3\r\nabcd\r\n", b"\r\n", b"+3\r\nabc\r\n", b"1" * 5000],
)
def test_anything_else_is_an_error(wrong: bytes) -> None:
    with pytest.raises(ChunkError):
        run([wrong])


def test_a_large_chunk_must_end_as_well() -> None:
    big = b"x" * (WHOLE_CHUNK_BYTES + 1)
    with pytest.raises(ChunkError):
        run([b"%x\r\n%b" % (len(big), big), b"no"])
