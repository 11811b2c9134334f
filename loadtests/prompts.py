"""Prompt text made from block ids: equal ids give equal bytes and equal tokens, in every process and on every machine.

A block is so many words drawn by a generator seeded with its id (never Python's salted hash). Every word is a space and
one short common English word, which the public BPE vocabularies (GPT-2, Llama, Qwen) hold as one token, so a block of n
tokens is n words and keeps its token boundaries behind any other block: words join at a space and nowhere else.
Trade-off: the text is word salad; a byte-level or character tokenizer makes more tokens of it, so the live driver
checks prompt tokens against the row. Where an API takes token ids, `token_ids` gives them directly.
"""

from __future__ import annotations

from functools import lru_cache

from loadtests.schedule import Row
from loadtests.seeds import Stream

# each a single token with its leading space in the vocabularies named above
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also did many off before must well back through years much where your way down
should because long each just state those people too little good world make very year still see own work men day
get here old life both between being under three never know same last another while us might great go come since
against right came take used himself few house use place during high without again home around small however
found part school every left going number course war until always away something fact water less public put
think almost hand enough far head yet better set told nothing night end why called find look later point knew
system next city give group days young let room word second face light order name side power large given
business early family money open line felt best big local human want real past field half turn test image plan
door done keep move
"""
WORDS = tuple(_TEXT.split())


@lru_cache(maxsize=16_384)
def block_text(block: int, tokens: int) -> str:
    """The text of the first `tokens` tokens of a block."""
    stream = Stream(block, "prompt")
    count = len(WORDS)
    return "".join(" " + WORDS[stream.below(count)] for _ in range(tokens))


def text(row: Row, block_tokens: int) -> str:
    """The prompt of a row: its blocks one behind the other, `row.prompt_tokens` words in all."""
    left, parts = row.prompt_tokens, []
    for block in row.blocks:
        take = min(left, block_tokens)
        parts.append(block_text(block, take))
        left -= take
    return "".join(parts)


def token_ids(row: Row, block_tokens: int, vocabulary: int, first: int = 1000) -> list[int]:
    """The prompt as token ids in [first, vocabulary), for APIs that take them."""
    if vocabulary <= first:
        raise ValueError(f"vocabulary is {vocabulary}; more than {first} would be right")
    left = row.prompt_tokens
    out: list[int] = []
    for block in row.blocks:
        take = min(left, block_tokens)
        stream = Stream(block, "token ids")
        out.extend(first + stream.below(vocabulary - first) for _ in range(take))
        left -= take
    return out
