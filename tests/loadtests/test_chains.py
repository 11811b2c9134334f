"""Prefix chains made from block ids: they share exactly what the prompts share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtests.chains import Chains
from loadtests.conversation import Segment, blocks_of
from loadtests.schedule import Row


def row(tokens: int, *blocks: int, adapter: str | None = None) -> Row:
    return Row(0, 0.0, tokens, 5, blocks, adapter=adapter)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_one_id_for_every_full_256_bytes() -> None:
    chains = Chains(512)  # 512 tokens are 2048 bytes: 8 chunks
    assert len(chains.of(row(512, 1))) == 8
    assert len(chains.of(row(600, 1, 2))) == 9  # 2400 bytes
    assert common(chains.of(row(1024, 1, 2)), chains.of(row(1024, 1, 3))) == 8


def test_small_blocks_are_joined_and_named_by_the_last_one() -> None:
    chains = Chains(16)  # four blocks a chunk
    one, other = chains.of(row(128, *range(8))), chains.of(row(128, *range(7), 99))
    assert len(one) == 2
    assert common(one, other) == 1


def test_no_more_than_128_kb_are_hashed() -> None:
    assert len(Chains(512).of(row(100_000, *range(196)))) == 512


def test_adapters_share_nothing() -> None:
    chains = Chains(512)
    assert common(chains.of(row(512, 1, adapter="a")), chains.of(row(512, 1, adapter="b"))) == 0


def test_the_text_that_baselines_read_is_equal_as_far_as_the_prompts_are() -> None:
    chains = Chains(512)
    one, other = chains.text(row(600, 1, 2)), chains.text(row(700, 1, 3))
    assert len(one) == 2400
    assert one[:2048] == other[:2048]
    assert one[2048:2080] != other[2048:2080]


def test_the_shared_index_tells_where_a_prefix_went_for_three_minutes() -> None:
    chains = Chains(64)
    chains.share(row(640, *range(10)), "r1", 100.0)
    longer = row(704, *range(11))
    assert chains.shared_depth(longer, 150.0) == {"r1": 10}
    assert chains.shared_depth(row(640, *range(10)), 150.0) == {"r1": 10}
    assert chains.shared_depth(longer, 300.0) == {}
    chains.share(row(640, *range(10)), "r1", 160.0, answer_tokens=150)
    assert chains.shared_depth(longer, 170.0) == {"r1": 12}, "its answer is cached behind it"


def test_of_prompts_that_part_inside_the_shared_index_knows_a_boundary() -> None:
    chains = Chains(64)
    chains.share(row(64 * 60, *range(60)), "r1", 100.0)
    parted = row(64 * 100, *range(31), *range(1000, 1069))
    assert chains.shared_depth(parted, 150.0) == {"r1": 28}  # four per doubling


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 200)), min_size=1, max_size=6), st.integers(1, 100))
def test_block_ids_are_equal_exactly_as_far_as_the_segments_are(parts: list[tuple[int, int]], extra: int) -> None:
    prompt = [Segment(c, t) for c, t in parts]
    tokens = sum(t for _, t in parts)
    blocks, longer = blocks_of(prompt, 64), blocks_of([*prompt, Segment(99, extra)], 64)
    assert len(blocks) == -(-tokens // 64)
    assert longer[: tokens // 64] == blocks[: tokens // 64]
    changed = blocks_of([Segment(77, prompt[0].tokens), *prompt[1:]], 64)
    assert all(a != b for a, b in zip(blocks, changed, strict=True))
