"""A stand-in for a tokenizer and a model: equal text gives equal tokens, answers are made from the prompt.

One token is four bytes, as English averages; a token's id is those bytes read as a little-endian integer, so text
and token-id prompts meet in the same blocks. A chat is rendered as template text with every message padded to a
whole token; answers are words of four ASCII bytes. An answer sent back as the next turn's history therefore gives
the same tokens, and the prefix cache hits it, as with a real model whose tokenizer returns what it produced.
Block ids are chained 64-bit hashes of a block's bytes; a cache salt enters at the first block and spreads by the
chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
_SYLLABLES = b"ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu al en ir on um ar".split()
WORDS = [b" " + a + bytes([c]) for a in _SYLLABLES for c in b"dklmnrst"]  # 208 words of four bytes
_WORD_COUNT = len(WORDS)


def render_chat(messages: Iterable[Mapping[str, Any]], tools: object = None) -> bytes:
    """The chat as a template would give it: tools, then role and content of each message, then the answer's head."""
    parts = []
    if tools:
        parts.append(_pad(b"<|tools|>" + orjson.dumps(tools)))
    for message in messages:
        head = b"<|" + str(message.get("role", "user")).encode() + b"|>"
        body = text_of(message.get("content"))
        if calls := message.get("tool_calls"):
            body += orjson.dumps(calls)
        # head and body are padded apart: the answer starts at a whole token when it is made and when it comes back
        parts.append(_pad(head) + _pad(body))
    parts.append(_pad(b"<|assistant|>"))
    return b"".join(parts)


def text_of(content: object) -> bytes:
    """Content as string, or the parts of a list: text as it is, anything else as its JSON."""
    if content is None:
        return b""
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            parts.append(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else orjson.dumps(part))
        return b"".join(parts)
    return orjson.dumps(content)


def _pad(data: bytes) -> bytes:
    return data + b"\n" * (-len(data) % TOKEN_BYTES)


def from_text(text: str) -> bytes:
    return _pad(text.encode("utf-8", "surrogatepass"))


def from_ids(ids: Sequence[int]) -> bytes:
    """Packs token ids. Raises ValueError for one that is not in the vocabulary (32-bit unsigned)."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError):
        bad = next(i for i in ids if not isinstance(i, int) or not 0 <= i < 1 << 32)
        raise ValueError(f"Token id {bad} is out of vocabulary") from None
    return packed.tobytes()


def ids_of(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


def count(packed: bytes) -> int:
    return len(packed) // TOKEN_BYTES


def chain(packed: bytes, block_tokens: int, salt: str | None = None) -> list[int]:
    """One id per block, the last block may be partial."""
    step, seed = block_tokens * TOKEN_BYTES, 0
    if salt:
        seed = xxh3_64_intdigest(salt.encode())
    ids = []
    for at in range(0, len(packed), step):
        seed = xxh3_64_intdigest(packed[at : at + step], seed)
        ids.append(seed)
    return ids


def seed_of(packed: bytes, sample: int = 0) -> int:
    """What an answer depends on: the prompt and which of `n` samples it is."""
    return xxh3_64_intdigest(packed, sample)


def word(seed: int, index: int) -> bytes:
    """Token `index` of the answer: four bytes of ASCII that JSON need not escape."""
    x = (seed ^ (index * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    return WORDS[((x >> 29) * 0xBF58476D1CE4E5B9 >> 23) % _WORD_COUNT]


def answer(seed: int, tokens: int) -> bytes:
    return b"".join([word(seed, i) for i in range(tokens)])


def natural_length(seed: int) -> int:
    """Where the stand-in model would stop by itself: 32 to 368 tokens, mean 200."""
    return 32 + (seed >> 7) % 337
