"""What usage teaches the prefix index: how many bytes make a token, and how far to trust a predicted hit.

`BytesPerToken`: per model, an EWMA of canonical bytes over reported prompt tokens (about 4 until learnt).
`Precision`: per replica, decayed sums of reported over predicted cached tokens; predictions are scaled by it. When
it stays under 0.7 for 50 samples the index believes in more capacity than there is: shrink by 10 %; above 0.95 grow
by 2 % (additive increase would need a unit; a small factor does the same). Trade-off: one number per replica cannot
tell which prefixes were lost, only how many; the capacity then removes the oldest, which are the likeliest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CHUNK_BYTES: Final = 256


class BytesPerToken:
    """Learnt per model from usage; the ratio is clamped to what text can be."""

    def __init__(self, initial: float = 4.0, memory: float = 0.05) -> None:
        self._initial = initial
        self._memory = memory
        self._learnt: dict[str, float] = {}
        self.overall = initial  # over all models, for sizing what models share

    def observe(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """One usage report; ignored for prompts too small to say anything (under 32 tokens)."""
        if prompt_tokens < 32 or prompt_bytes <= 0:
            return
        ratio = min(32.0, max(0.25, prompt_bytes / prompt_tokens))
        self.overall += self._memory * (ratio - self.overall)
        known = self._learnt.get(model)
        self._learnt[model] = ratio if known is None else known + self._memory * (ratio - known)

    def learnt(self) -> dict[str, float]:
        """By model."""
        return dict(self._learnt)

    def recall(self, said: Mapping[str, float]) -> None:
        """What one before it had learnt, of models that have shown nothing here."""
        for model, ratio in said.items():
            self._learnt.setdefault(model, ratio)

    def ratio(self, model: str) -> float:
        return self._learnt.get(model, self._initial)

    def tokens(self, model: str, size_bytes: float) -> float:
        return size_bytes / self.ratio(model)

    def tokens_per_chunk(self, model: str) -> float:
        return CHUNK_BYTES / self.ratio(model)

    def chunks(self, model: str, tokens: float) -> int:
        """Whole chunks that this many tokens fill."""
        return int(tokens * self.ratio(model)) // CHUNK_BYTES


class Precision:
    """Share of predicted cached tokens that a replica reported as cached, in 0..1."""

    __slots__ = ("_memory", "_predicted", "_reported", "_run", "value")

    SHRINK_BELOW = 0.7
    GROW_ABOVE = 0.95
    SAMPLES = 50
    SHRINK = 0.9
    GROW = 1.02

    def __init__(self, initial: float = 0.9, memory: float = 0.02) -> None:
        self._memory = memory
        self._predicted = 2000.0  # tokens: the weight of the initial belief
        self._reported = initial * 2000.0
        self._run = 0
        self.value = initial

    def observe(self, predicted_tokens: float, reported_tokens: float) -> float:
        """One request's cached tokens; answers the factor by which the index's capacity should change (mostly 1.0)."""
        if predicted_tokens <= 0:
            return 1.0
        keep = 1.0 - self._memory
        self._predicted = self._predicted * keep + predicted_tokens * self._memory
        self._reported = self._reported * keep + min(reported_tokens, predicted_tokens) * self._memory
        value = self.value = min(1.0, self._reported / self._predicted)
        if value < self.SHRINK_BELOW:
            self._run = min(self._run, 0) - 1
        elif value > self.GROW_ABOVE:
            self._run = max(self._run, 0) + 1
        else:
            self._run = 0
        if abs(self._run) < self.SAMPLES:
            return 1.0
        factor = self.SHRINK if self._run < 0 else self.GROW
        self._run = 0
        return factor
