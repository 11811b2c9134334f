"""Reads vLLM's `/metrics` text, versions 0.10 to 0.33, into the few values that matter. Pure.

Only lines of known names are looked at: a page has 50 KB, and it is read once a second per replica on the loop that
also streams. Names that changed are tried newest first. A value that is absent, negative, beyond `MOST` or no number
is unknown (None), never zero. A server with data parallel ranks has one series per engine: counts and capacities are
summed, KV usage is the largest, it is awake when all are, and the steps of each engine are kept apart as its heartbeat.
Source: vLLM's metrics documentation and recorded pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from policies.model import Scraped

Series: TypeAlias = Mapping[str, list[tuple[dict[str, str], float]]]

GAUGES_AND_COUNTERS = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "num_requests_kv_fetch_by_stage",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",  # to 0.10, hidden in 0.11
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total",  # to 0.10, hidden in 0.11
    "gpu_prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_cached_by_source_total",
    "num_preemptions_total",
    "request_success_total",
    "admission_rejections_total",
    "engine_sleep_state",
    "lora_requests_info",
    "cache_config_info",
)
HISTOGRAMS = (  # of these only _sum and _count
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",  # to 0.11
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
)
_NAMES = frozenset(
    (
        "process_start_time_seconds",
        *("vllm:" + name for name in GAUGES_AND_COUNTERS),
        *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("sum", "count")),
    )
)
MOST = 1e18  # a value beyond is no count, size or time: nothing that is computed of such comes near the ends of a float
MOST_DIGITS = 12  # of a number in a label: blocks, tokens, adapters
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:\\.|[^"\\])*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def series(text: str) -> Series:
    """Every known series of the page, by name without the `vllm:` prefix. Never raises: what is garbled is left out."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.split("\n"):
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        if name not in _NAMES:
            continue
        labels, _, raw = rest.rpartition("}") if brace else ("", "", rest)
        try:
            value = float(raw.split(maxsplit=1)[0])  # a timestamp may follow
        except (ValueError, IndexError):
            continue
        if 0.0 <= value <= MOST:
            found.setdefault(name.removeprefix("vllm:"), []).append((_labels(labels), value))
    return found


def read(text: str, replica_id: str, at: float) -> Scraped:
    """The values the core uses; `at` is when the page was read, in the core's seconds."""
    s = series(text)
    config = [labels for labels, _ in s.get("cache_config_info", ())]
    newest = max(s.get("lora_requests_info", ()), key=lambda row: row[1], default=None)
    lora = newest[0] if newest else {}
    return Scraped(
        replica_id=replica_id,
        at=at,
        running=_sum(s, "num_requests_running"),
        waiting=_sum(s, "num_requests_waiting"),
        kv_usage=_max(s, "kv_cache_usage_perc", "gpu_cache_usage_perc"),
        num_gpu_blocks=_total(_whole(labels, "num_gpu_blocks") for labels in config),
        block_size=next((size for labels in config if (size := _block_size(labels)) is not None), None),
        prefix_queries=_sum(s, "prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
        prefix_hits=_sum(s, "prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
        prompt_tokens=_sum(s, "prompt_tokens_total"),
        generation_tokens=_sum(s, "generation_tokens_total"),
        preemptions=_sum(s, "num_preemptions_total"),
        iterations=_sum(s, "iteration_tokens_total_count"),
        awake=_awake(s),
        started_at=_max(s, "process_start_time_seconds"),
        adapters_running=_names(lora, "running_lora_adapters"),
        adapters_waiting=_names(lora, "waiting_lora_adapters"),
        max_adapters=_whole(lora, "max_lora"),
        engines=_engines(s),
    )


def _engines(s: Series) -> tuple[tuple[str, float, float], ...]:
    """Each data-parallel engine with the requests it has and its steps so far; empty where there is only one."""
    steps = {labels.get("engine", ""): value for labels, value in s.get("iteration_tokens_total_count", ())}
    if len(steps) < 2:
        return ()
    there = dict.fromkeys(steps, 0.0)
    for name in ("num_requests_running", "num_requests_waiting"):
        for labels, value in s.get(name, ()):
            if (engine := labels.get("engine", "")) in there:
                there[engine] += value
    return tuple((engine, there[engine], count) for engine, count in steps.items())


def _labels(text: str) -> dict[str, str]:
    if not text:
        return {}
    labels = {}
    for key, value in _LABEL.findall(text):
        labels[key] = re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), value) if "\\" in value else value
    return labels


def _values(s: Series, names: tuple[str, ...]) -> list[float]:
    return next(([value for _, value in s[name]] for name in names if name in s), [])


def _sum(s: Series, *names: str) -> float | None:
    values = _values(s, names)
    return math.fsum(values) if values else None


def _max(s: Series, *names: str) -> float | None:
    return max(_values(s, names), default=None)


def _awake(s: Series) -> bool | None:
    states = [value for labels, value in s.get("engine_sleep_state", ()) if labels.get("sleep_state") == "awake"]
    return all(value > 0 for value in states) if states else None


def _whole(labels: Mapping[str, str], key: str) -> int | None:
    """Labels hold numbers as text, and `None` where the engine has not decided."""
    text = labels.get(key, "")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def _block_size(labels: Mapping[str, str]) -> int | None:
    size = _whole(labels, "block_size")
    return size if size is not None else _whole(labels, "effective_attention_block_size")


def _total(numbers: Iterable[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if known else None


def _names(labels: Mapping[str, str], key: str) -> tuple[str, ...]:
    return tuple(name for part in labels.get(key, "").split(",") if (name := part.strip()))
