"""A chain is the identity of a prompt's beginning; equal beginnings give equal keys, whatever the pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from policies.prefix import MAX_CHUNKS, chain


def test_one_key_per_full_chunk_of_256_bytes_each_seeded_with_the_one_before() -> None:
    stream = b"a" * 256 + b"b" * 256 + b"c" * 255
    first = xxh3_64_intdigest(b"a" * 256, 0)
    assert chain([stream]) == (first, xxh3_64_intdigest(b"b" * 256, first))


def test_a_stream_shorter_than_a_chunk_has_no_identity() -> None:
    assert chain([b"x" * 255]) == ()
    assert chain([]) == ()


def test_only_the_first_128_kilobytes_are_hashed() -> None:
    assert len(chain([b"y" * (MAX_CHUNKS * 256 + 4096)])) == 512


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_a_longer_stream_extends_the_chain_of_its_beginning(start: bytes, more: bytes) -> None:
    assert chain([start, more])[: len(chain([start]))] == chain([start])


@given(st.binary(min_size=600, max_size=2000), st.integers(0, 599))
def test_where_two_streams_differ_all_later_keys_differ(stream: bytes, at: int) -> None:
    other = bytearray(stream)
    other[at] ^= 1
    ours, theirs = chain([stream]), chain([bytes(other)])
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    assert same == [i < at // 256 for i in range(len(ours))]
