"""`/metrics` of the simulated replica: vLLM's names, labels and buckets, and three of its own.

Gauges are those of the end of the last engine step, as in vLLM. Aborted requests appear in no per-request metric,
though their tokens are counted, as in vLLM. Own: `forebay_sim_lag_seconds` (histogram of how late the replica woke
for a step's end), its p99 as a gauge, and the time scale.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from loadtests.engine import Job, Step

if TYPE_CHECKING:
    from loadtests.live_replica import Replica

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,
)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LAG = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds the quantile; 0 when nothing was observed."""
        total = sum(self.counts)
        if not total:
            return 0.0
        seen = 0
        for bound, n in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += n
            if seen >= q * total:
                return bound
        return float("inf")

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        seen = 0
        for bound, n in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += n
            shown = "+Inf" if bound == float("inf") else repr(float(bound))
            yield f'{name}_bucket{{{labels},le="{shown}"}} {float(seen)}'
        yield f"{name}_count{{{labels}}} {float(seen)}"
        yield f"{name}_sum{{{labels}}} {self.sum}"


class Figures:
    """What a replica counts beside the engine's own counters. Seconds are engine seconds but for the lag."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(_TTFT)
        self.itl_s = Histogram(_ITL)
        self.tpot_s = Histogram(_ITL)
        self.e2e_s = Histogram(_LATENCY)
        self.queue_s = Histogram(_LATENCY)
        self.prefill_s = Histogram(_LATENCY)
        self.decode_s = Histogram(_LATENCY)
        self.inference_s = Histogram(_LATENCY)
        self.iteration_tokens = Histogram(_ITERATION)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.computed_tokens = Histogram(_TOKENS)
        self.preemptions = Histogram((1, 2, 5, 10, 20))
        self.lag_s = Histogram(_LAG)
        self.reasons = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.requests = 0

    def step(self, step: Step) -> None:
        self.iteration_tokens.observe(step.prefill_tokens + step.decoded)
        if step.decoded:
            self.itl_s.observe(step.end - step.start, step.decoded)
        for job in step.first:
            self.ttft_s.observe(step.end - job.arrived_at)

    def finished(self, job: Job, end: float) -> None:
        first = job.first_token_at if job.first_token_at is not None else end
        admitted = job.admitted_at if job.admitted_at is not None else end
        self.reasons[getattr(job.tag, "reason", "length")] += 1
        self.e2e_s.observe(end - job.arrived_at)
        self.queue_s.observe(admitted - job.arrived_at)
        self.prefill_s.observe(first - admitted)
        self.decode_s.observe(end - first)
        self.inference_s.observe(end - admitted)
        self.prompt_tokens.observe(job.prompt_tokens)
        self.generation_tokens.observe(job.output_tokens)
        self.computed_tokens.observe(job.prompt_tokens - job.cached_tokens)
        self.preemptions.observe(job.preemptions)
        if job.output_tokens > 1:
            self.tpot_s.observe((end - first) / (job.output_tokens - 1))


def exposition(replica: Replica) -> bytes:
    """The text format, one engine."""
    engine, figures, settings = replica.engine, replica.figures, replica.settings
    gauges = engine.gauges(replica.now())
    counters = engine.counters
    model = f'model_name="{settings.model}"'
    labels = f'engine="0",{model}'
    asleep = replica.faults.frozen == "sleep"
    lines: list[str] = []

    def put(name: str, kind: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{{{labels}{more}}} {float(value)}" for more, value in samples)

    put("vllm:num_requests_running", "gauge", ("", gauges.running))
    put("vllm:num_requests_waiting", "gauge", ("", gauges.waiting))
    put(
        "vllm:num_requests_waiting_by_reason", "gauge",
        (',reason="capacity"', gauges.waiting - gauges.deferred), (',reason="deferred"', gauges.deferred),
    )  # fmt: skip
    put(
        "vllm:engine_sleep_state", "gauge",
        (',sleep_state="awake"', not asleep), (',sleep_state="weights_offloaded"', asleep),
        (',sleep_state="discard_all"', 0),
    )  # fmt: skip
    put("vllm:kv_cache_usage_perc", "gauge", ("", gauges.kv_usage))
    put("vllm:prefix_cache_queries_total", "counter", ("", counters.prefix_queries))
    put("vllm:prefix_cache_hits_total", "counter", ("", counters.prefix_hits))
    put("vllm:external_prefix_cache_queries_total", "counter", ("", 0))
    put("vllm:external_prefix_cache_hits_total", "counter", ("", 0))
    put("vllm:num_preemptions_total", "counter", ("", counters.preemptions))
    put("vllm:prompt_tokens_total", "counter", ("", counters.prompt_tokens))
    put(
        "vllm:prompt_tokens_by_source_total", "counter",
        (',source="local_compute"', counters.prefix_queries - counters.prefix_hits),
        (',source="local_cache_hit"', counters.prefix_hits), (',source="external_kv_transfer"', 0),
    )  # fmt: skip
    put("vllm:prompt_tokens_cached_total", "counter", ("", counters.prefix_hits))
    put("vllm:generation_tokens_total", "counter", ("", gauges.generation_tokens))
    put(
        "vllm:request_success_total", "counter",
        *((f',finished_reason="{reason}"', n) for reason, n in figures.reasons.items()),
    )  # fmt: skip
    lines.append("# TYPE vllm:admission_rejections_total counter")
    lines.extend(
        f'vllm:admission_rejections_total{{{model},reason="{reason}"}} {float(n)}'
        for reason, n in counters.rejected.items()
    )
    lines.append("# TYPE vllm:cache_config_info gauge")
    config = engine.config
    lines.append(
        f'vllm:cache_config_info{{block_size="{engine.block}",cache_dtype="auto",enable_prefix_caching='
        f'"{config.enable_prefix_caching}",engine="0",kv_cache_size_tokens="{engine.pool.usable * engine.block}",'
        f'num_gpu_blocks="{engine.pool.usable + 1}",num_cpu_blocks="None"}} 1.0'
    )
    if settings.adapters:
        running = {job.adapter for job in engine.running.values() if job.adapter}
        waiting = {job.adapter for job in engine.waiting_jobs() if job.adapter}
        lines.append("# TYPE vllm:lora_requests_info gauge")
        lines.append(
            f'vllm:lora_requests_info{{max_lora="{config.max_loras}",running_lora_adapters="{",".join(sorted(running))}",'
            f'waiting_lora_adapters="{",".join(sorted(waiting))}"}} {replica.started_at + replica.now()}'
        )
    for name, histogram in (
        ("iteration_tokens_total", figures.iteration_tokens),
        ("time_to_first_token_seconds", figures.ttft_s),
        ("inter_token_latency_seconds", figures.itl_s),
        ("request_time_per_output_token_seconds", figures.tpot_s),
        ("e2e_request_latency_seconds", figures.e2e_s),
        ("request_queue_time_seconds", figures.queue_s),
        ("request_inference_time_seconds", figures.inference_s),
        ("request_prefill_time_seconds", figures.prefill_s),
        ("request_decode_time_seconds", figures.decode_s),
        ("request_prompt_tokens", figures.prompt_tokens),
        ("request_generation_tokens", figures.generation_tokens),
        ("request_prefill_kv_computed_tokens", figures.computed_tokens),
        ("request_num_preemptions", figures.preemptions),
    ):
        lines.extend(histogram.lines(f"vllm:{name}", labels))
    lines.append("# TYPE process_start_time_seconds gauge")
    lines.append(f"process_start_time_seconds {replica.started_at}")
    lines.extend(figures.lag_s.lines("forebay_sim_lag_seconds", f'replica="{replica.name}"'))
    for name, value in (("lag_p99_seconds", figures.lag_s.quantile(0.99)), ("time_scale", settings.time_scale)):
        lines.append(f"# TYPE forebay_sim_{name} gauge")
        lines.append(f'forebay_sim_{name}{{replica="{replica.name}"}} {value}')
    return ("\n".join(lines) + "\n").encode()
