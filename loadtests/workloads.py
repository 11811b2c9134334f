"""The built-in workloads, each a generator named by what it stresses; all lengths and pauses have a published source.

WC   WildChat-1M (Zhao et al. 2024, arXiv 2405.01470): 2.5 turns, 296 prompt and 441 answer tokens a turn on average.
MC   Mooncake conversation trace (FAST'25): answers p50 355, p90 605 tokens; 36 % of prompt tokens reused.
AZ   Azure LLM inference 2023 (Splitwise, ISCA 2024): conversation in p50 1,020, p90 2,735, out p50 129, p90 424; code
     in p50 1,469, p90 5,188, out p50 13, p90 55, with bursts of hundreds a minute between idle minutes.
KT   kv-cache-tester agentic sessions: first prompt p50 23,836 tokens, answers p50 221, p90 885, think time p50 10 s,
     p90 165 s, tool and system prefix p50 14,901 tokens.
BG   BurstGPT (arXiv 2401.17644): gamma arrivals; shape 0.5 gives a coefficient of variation of 1.41.
Zipf exponents near 1 are usual for document popularity (Breslau et al. 1999: 0.64 to 0.83 for web pages).
Trade-off: one knob (load) and no others, so that a workload's name says what was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loadtests.conversation import Segment, Talk, blocks_of
from loadtests.schedule import Row
from loadtests.seeds import Stream, Zipf, mix, name_id
from loadtests.source import Generator
from policies.model import ServiceClass

BLOCK_TOKENS = 64

# What an answer has to meet where --objective says nothing else.
CLASSES: dict[str, ServiceClass] = {
    "interactive": ServiceClass("interactive", ttft_s=2.0, ttft_s_per_token=0.00025, tpot_s=0.1),
    "standard": ServiceClass("standard", ttft_s=10.0, ttft_s_per_token=0.0005, tpot_s=0.2),
    "batch": ServiceClass(
        "batch", ttft_s=None, ttft_s_per_token=0.0, tpot_s=None, e2e_s=300.0, weight=0.1, floor_share=0.05,
        fill_only=True,
    ),
}  # fmt: skip


def chat(seed: int, span_s: float) -> Sequence[Row]:
    """Multi-turn chat over 12 products' system prompts: 2 sessions/s, closed loop, think p50 10 s, p90 60 s."""
    rows: list[Row] = []
    products = Zipf(12, 0.9)
    for n, at in enumerate(Stream(seed, "chat", "starts").poisson_times(2.0, span_s)):
        stream = Stream(seed, "chat", "session", str(n))
        product = products.draw(stream)
        system = 400 + Stream(0, "chat", "system", str(product)).below(2600)
        talk = Talk([Segment(mix(name_id("chat"), product), system)], mix(seed, name_id("chat"), n))
        rows += talk.turns(
            f"chat-{n}", at, 1 + min(15, int(stream.exponential(2.0))),
            said=lambda s, turn: _bounded(s.lognormal(200, 2_000) if turn else s.lognormal(1_500, 14_000), 1, 48_000),
            answer=lambda s: _bounded(s.lognormal(355, 605), 1, 2_000),
            think=lambda s: min(120.0, s.lognormal(10.0, 60.0)),
            stream=stream,
        )  # fmt: skip
    return rows


def coding(seed: int, span_s: float) -> Sequence[Row]:
    """Coding agents: 0.25 sessions/s, long shared tool prefix, closed loop, contexts that grow to 100k tokens."""
    rows: list[Row] = []
    for n, at in enumerate(Stream(seed, "coding", "starts").poisson_times(0.25, span_s)):
        stream = Stream(seed, "coding", "session", str(n))
        agent = stream.below(3)
        tools = (9_000, 14_901, 19_000)[agent]
        files = _bounded(stream.lognormal(9_000, 30_000), 500, 60_000)
        base = mix(seed, name_id("coding"), n)
        talk = Talk([Segment(mix(name_id("coding"), agent), tools), Segment(mix(base, 1), files)], base)
        rows += talk.turns(
            f"coding-{n}", at, 4 + min(36, int(stream.exponential(12.0))),
            said=lambda s, turn: _bounded(s.lognormal(700, 3_500), 20, 12_000),
            answer=lambda s: _bounded(s.lognormal(221, 885), 1, 4_000),
            think=lambda s: min(60.0, s.lognormal(6.0, 30.0)),
            stream=stream,
            longest=110_000,
        )  # fmt: skip
    return rows


def rag(seed: int, span_s: float) -> Sequence[Row]:
    """Questions over 2,000 documents, Zipf 0.8, 3 documents each behind one system prompt: 8/s, open loop."""
    rows: list[Row] = []
    popular = Zipf(2_000, 0.8)
    system = Segment(name_id("rag"), 600)
    for n, at in enumerate(Stream(seed, "rag", "starts").poisson_times(8.0, span_s)):
        stream = Stream(seed, "rag", str(n))
        found = sorted({popular.draw(stream) for _ in range(3)})  # a fixed order, as a prompt that wants hits would use
        documents = [Segment(mix(name_id("rag"), d), 800 + Stream(0, "rag", str(d)).below(2400)) for d in found]
        question = Segment(mix(seed, name_id("rag"), n, 7), _bounded(stream.lognormal(60, 200), 5, 1_000))
        rows.append(_row(at, [system, *documents, question], _bounded(stream.lognormal(129, 424), 1, 1_000)))
    return rows


def siblings(seed: int, span_s: float) -> Sequence[Row]:
    """Best-of-n sampling: 8 equal prompts at once, 1 group/s, prompts as Azure code, answers as Mooncake."""
    rows: list[Row] = []
    for n, at in enumerate(Stream(seed, "siblings", "starts").poisson_times(1.0, span_s)):
        stream = Stream(seed, "siblings", str(n))
        prompt = [Segment(mix(seed, name_id("siblings"), n), _bounded(stream.lognormal(1_469, 5_188), 16, 16_000))]
        rows += [_row(at, prompt, _bounded(stream.lognormal(355, 605), 1, 2_000)) for _ in range(8)]
    return rows


def unique(seed: int, span_s: float) -> Sequence[Row]:
    """No sharing at all, lengths as Azure conversations, 12/s: affinity must cost nothing here."""
    return _singles(seed, "unique", Stream(seed, "unique", "starts").poisson_times(12.0, span_s))


def hot_prefix(seed: int, span_s: float) -> Sequence[Row]:
    """Every prompt begins with the same 6,000 tokens, 12/s: affinity must not pile all work on one replica."""
    rows: list[Row] = []
    hot = Segment(name_id("hot_prefix"), 6_000)
    for n, at in enumerate(Stream(seed, "hot_prefix", "starts").poisson_times(12.0, span_s)):
        stream = Stream(seed, "hot_prefix", str(n))
        own = Segment(mix(seed, name_id("hot_prefix"), n), _bounded(stream.lognormal(300, 1_500), 5, 8_000))
        rows.append(_row(at, [hot, own], _bounded(stream.lognormal(129, 424), 1, 1_000)))
    return rows


def mixed(seed: int, span_s: float) -> Sequence[Row]:
    """Interactive chat beside batch: long prompts with a 300 s deadline and nobody waiting, 0.6/s."""
    return [*chat(seed, span_s), *_batch(seed, "mixed", 0.6, span_s)]


def half_batch(seed: int, span_s: float) -> Sequence[Row]:
    """As `unique`, beside 1.6 batch prompts/s as in `mixed`: half of all offered tokens; open loop."""
    return [*unique(seed, span_s), *batch_alone(seed, span_s)]


def batch_alone(seed: int, span_s: float) -> Sequence[Row]:
    """The batch of `half-batch`, row for row: what it gets when nobody else is there."""
    return _batch(seed, "half-batch", 1.6, span_s)


def _batch(seed: int, name: str, rate_rps: float, span_s: float) -> list[Row]:
    rows = []
    for n, at in enumerate(Stream(seed, name, "starts").poisson_times(rate_rps, span_s)):
        stream = Stream(seed, name, str(n))
        prompt = [Segment(mix(seed, name_id(name), n), _bounded(stream.lognormal(8_000, 24_000), 100, 32_000))]
        rows.append(_row(at, prompt, _bounded(stream.lognormal(355, 605), 1, 2_000), service_class="batch"))
    return rows


def lora(seed: int, span_s: float) -> Sequence[Row]:
    """20 adapters of unequal popularity (Zipf 1.0) over one base model, 10/s; nothing is shared across adapters."""
    rows: list[Row] = []
    popular = Zipf(20, 1.0)
    for n, at in enumerate(Stream(seed, "lora", "starts").poisson_times(10.0, span_s)):
        stream = Stream(seed, "lora", str(n))
        adapter = popular.draw(stream)
        system = Segment(mix(name_id("lora"), adapter), 800)
        own = Segment(mix(seed, name_id("lora"), n), _bounded(stream.lognormal(1_020, 2_735), 5, 12_000))
        output = _bounded(stream.lognormal(129, 424), 1, 1_000)
        rows.append(_row(at, [system, own], output, adapter=f"adapter-{adapter}"))
    return rows


def tenants(seed: int, span_s: float) -> Sequence[Row]:
    """As `unique`, from ten tenants: nine send 0.4/s each, the tenth floods with twenty times that."""
    return _of_tenants(seed, [0.4] * 9 + [8.0], span_s)


def tenants_alone(seed: int, span_s: float) -> Sequence[Row]:
    """The nine quiet tenants of `tenants`, row for row: what they have when nobody floods."""
    return _of_tenants(seed, [0.4] * 9, span_s)


def _of_tenants(seed: int, rates_rps: Sequence[float], span_s: float) -> list[Row]:
    rows: list[Row] = []
    for tenant, rate in enumerate(rates_rps):
        times = Stream(seed, "tenants", "starts", str(tenant)).poisson_times(rate, span_s)
        rows += [replace(row, tenant=f"tenant-{tenant}") for row in _singles(seed, f"tenants-{tenant}", times)]
    return sorted(rows, key=lambda row: row.at_s or 0.0)


def diurnal(seed: int, span_s: float) -> Sequence[Row]:
    """As `unique`, the rate swinging between 4/s and 20/s over 20 minutes (a day in quick motion)."""
    stream = Stream(seed, "diurnal", "starts")
    times = [at for at in stream.poisson_times(20.0, span_s) if stream.uniform() < 0.6 - 0.4 * _cosine(at / 1200.0)]
    return _singles(seed, "diurnal", times)


def bursty(seed: int, span_s: float) -> Sequence[Row]:
    """As `unique`, on and off: 6/s with gamma gaps (CV 1.41), four times that for 30 s in every 120 s."""
    stream = Stream(seed, "bursty", "starts")
    times, at = [], 0.0
    while at < span_s:
        rate = 24.0 if at % 120.0 >= 90.0 else 6.0
        at += stream.gamma(0.5, 2.0 / rate)
        if at < span_s:
            times.append(at)
    return _singles(seed, "bursty", times)


def _singles(seed: int, name: str, times: Sequence[float]) -> list[Row]:
    rows = []
    for n, at in enumerate(times):
        stream = Stream(seed, name, str(n))
        prompt = [Segment(mix(seed, name_id(name), n), _bounded(stream.lognormal(1_020, 2_735), 5, 14_000))]
        rows.append(_row(at, prompt, _bounded(stream.lognormal(129, 424), 1, 1_000)))
    return rows


def _row(
    at: float, prompt: list[Segment], output: int, service_class: str = "interactive", adapter: str | None = None
) -> Row:
    tokens = sum(s.tokens for s in prompt)
    blocks = blocks_of(prompt, BLOCK_TOKENS)
    return Row(0, at, tokens, output, blocks, service_class=service_class, adapter=adapter)


def _bounded(value: float, least: int, most: int) -> int:
    return min(most, max(least, round(value)))


def _cosine(turns: float) -> float:
    """cos(2 pi x turns) by its series on a reduced argument; the C library's may differ in the last bit."""
    x = (turns - round(turns)) * 6.283185307179586
    term = total = 1.0
    for k in range(1, 14):
        term *= -x * x / ((2 * k - 1) * (2 * k))
        total += term
    return total


_LIMITS = {
    "chat": (("interactive", 64_000, 2_000),),
    "coding": (("interactive", 110_000, 4_000),),
    "mixed": (("interactive", 64_000, 2_000), ("batch", 32_000, 2_000)),
    "half_batch": (("interactive", 16_000, 1_000), ("batch", 32_000, 2_000)),
    "batch_alone": (("batch", 32_000, 2_000),),
    "siblings": (("interactive", 16_000, 2_000),),
}
_MAKERS = (
    chat, coding, rag, siblings, unique, hot_prefix, mixed, half_batch, batch_alone, lora, tenants, tenants_alone,
    diurnal, bursty,
)  # fmt: skip

WORKLOADS: dict[str, Generator] = {
    make.__name__.replace("_", "-"): Generator(
        make.__name__.replace("_", "-"), make, _LIMITS.get(make.__name__, (("interactive", 16_000, 1_000),)),
        BLOCK_TOKENS, (make.__doc__ or "").strip(),
    )
    for make in _MAKERS
}  # fmt: skip
