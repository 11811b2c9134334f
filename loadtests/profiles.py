"""How long one engine step takes: named profiles of third-party figures, and the formula they fill.

    t = max(floor, a + b x tokens) + c x decode context + d x sum(chunk x its mean context) + e x sequences + overhead

floor, a, b: fitted to the per-layer profiles published with the Vidur simulator (MIT,
data/profiling/compute/*/mlp.csv): linear layers, norms and rope only. c: KV bytes per token / (0.8 x memory
bandwidth). d: 4 x layers x hidden flops per (token x context token) at half of peak. overhead: lm_head weights read
once a step, plus 1 ms assumed for scheduling and sampling. 70B figures hold no all-reduce. KV capacity: memory x 0.92
less weights and activations. Nothing here was measured on the GPU by this project: `forebay calibrate URL` fits a
profile to a real replica, and only such a profile predicts it. Trade-off: a step is a deterministic function of its
batch; jitter, kernel tile effects and CPU stalls are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(slots=True, frozen=True)
class Profile:
    """Step time and memory of one replica. Seconds, tokens; `source` says where the figures come from."""

    name: str
    floor_s: float  # least time of the linear layers: the weights are read once
    base_s: float  # a
    per_token_s: float  # b
    per_context_token_s: float  # c: each decode reads its whole context
    per_chunk_context_s: float  # d: attention of a prefill chunk to what stands before it
    overhead_s: float = 0.0
    per_sequence_s: float = 0.0  # e: sampling, detokenising, per running sequence
    frontend_s: float = 0.0  # from the HTTP request to the engine's queue, and back: adds to TTFT only
    num_blocks: int = 26_000
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    source: str = ""

    def step_s(self, tokens: int, sequences: int, context_tokens: float, chunk_context: float) -> float:
        """Seconds of a step of `tokens` new tokens; `chunk_context` is the sum of chunk x mean context."""
        linear = self.base_s + self.per_token_s * tokens
        return (
            (linear if linear > self.floor_s else self.floor_s)
            + self.overhead_s
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
            + self.per_chunk_context_s * chunk_context
        )

    @property
    def kv_capacity_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of a full token budget of prefill without context: a hint for a gateway that has not learnt it yet."""
        budget = self.max_num_batched_tokens
        return budget / self.step_s(budget, 1, 0.0, budget * budget / 2)


_VIDUR = "Vidur per-layer profiles (third party), KV reads and attention computed; not measured here"

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        # A100 80GB (2.0 TB/s, 312 TFLOP/s bf16), Llama-3-8B, TP1; 131 072 B of KV per token
        Profile("a100-8b", 0.0105, 0.0069, 66.9e-6, 0.082e-6, 3.36e-9, 0.0017, source=_VIDUR),
        # H100 80GB (3.35 TB/s, 989 TFLOP/s): Llama-2-7B fit x the A100's ratio of Llama-3-8B to Llama-2-7B
        # (floor 1.117, slope 1.036)
        Profile(
            "h100-8b", 0.0065, 0.0030, 21.1e-6, 0.049e-6, 1.06e-9, 0.0014,
            max_num_batched_tokens=8192, max_num_seqs=1024, source=_VIDUR,
        ),
        # 4 x A100 80GB, Llama-3-70B, TP4; 327 680 B of KV per token over four GPUs
        Profile("a100-70b", 0.0262, 0.0202, 159e-6, 0.051e-6, 4.20e-9, 0.0013, num_blocks=26_900, source=_VIDUR),
        # 4 x H100 80GB, Llama-2-70B fit, TP4
        Profile(
            "h100-70b", 0.0150, 0.0101, 53.5e-6, 0.031e-6, 1.32e-9, 0.0012,
            num_blocks=26_900, max_num_batched_tokens=8192, max_num_seqs=1024, source=_VIDUR,
        ),
    )
}  # fmt: skip


def from_mapping(values: Mapping[str, object]) -> Profile:
    """A profile from the JSON that `forebay calibrate` prints. Raises ValueError naming the field."""
    known = {f.name: f.type for f in fields(Profile)}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"profile field {key!r} is unknown; one of {', '.join(known)}")
        wanted = str if known[key] == "str" else (int, float)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"profile field {key!r} is {value!r}; it must be a {known[key]}")
    missing = [f.name for f in fields(Profile)[:6] if f.name not in values]
    if missing:
        raise ValueError(f"profile lacks {', '.join(missing)}")
    return Profile(**values)  # type: ignore[arg-type]


def load(name: str) -> Profile:
    """A built-in profile by name, or one from a JSON file. Raises ValueError saying what would be right."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if path.is_file():
        try:
            return from_mapping(json.loads(path.read_text()))
        except json.JSONDecodeError as problem:
            raise ValueError(f"profile file {name}: not JSON ({problem})") from None
    raise ValueError(f"profile {name!r} is neither built in ({', '.join(PROFILES)}) nor a JSON file")


def dump(profile: Profile) -> str:
    return json.dumps(asdict(profile), indent=2)
