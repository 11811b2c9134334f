"""What is read from recorded pages of a real vLLM 0.32 server, and from older names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.vllm_metrics import read, series

CAPTURES = Path(__file__).parents[1] / "captures"
PAGE = (CAPTURES / "metrics-sample.txt").read_text()


def test_the_recorded_page_of_one_engine() -> None:
    page = read(PAGE, "r1", 7.0)
    assert (page.replica_id, page.at) == ("r1", 7.0)
    assert (page.running, page.waiting, page.kv_usage) == (0.0, 0.0, 0.0)
    assert (page.num_gpu_blocks, page.block_size) == (1024, 32)
    assert (page.prefix_queries, page.prefix_hits) == (49928.0, 32160.0)
    assert (page.prompt_tokens, page.generation_tokens, page.preemptions) == (49928.0, 8056.0, 0.0)
    assert (page.iterations, page.awake) == (961.0, True)


def test_what_the_page_does_not_say_is_unknown_and_not_zero() -> None:
    page = read(PAGE, "r1", 7.0)
    assert page.started_at is None  # the recording leaves the process_* lines out
    assert (page.max_adapters, page.adapters_running) == (None, ())
    empty = read("", "r1", 0.0)
    assert (empty.running, empty.waiting, empty.kv_usage, empty.iterations) == (None, None, None, None)
    assert (empty.num_gpu_blocks, empty.block_size, empty.awake) == (None, None, None)


def test_two_engines_on_one_page_are_summed_and_the_fuller_kv_counts() -> None:
    page = (CAPTURES / "data-parallel-metrics.txt").read_text().split("## after")[0]
    page += 'vllm:kv_cache_usage_perc{engine="2",model_name="tiny"} 0.75\n'
    page += 'vllm:num_requests_running{engine="2",model_name="tiny"} 3.0\n'
    for engine in "01":
        page += f'vllm:cache_config_info{{block_size="32",engine="{engine}",num_gpu_blocks="2048"}} 1.0\n'
    both = read(page, "r1", 0.0)
    assert (both.running, both.waiting, both.kv_usage) == (3.0, 0.0, 0.75)
    assert (both.num_gpu_blocks, both.block_size) == (4096, 32)


def test_reasons_and_sources_are_not_added_to_their_totals() -> None:
    page = (
        'vllm:num_requests_waiting{engine="0"} 5\nvllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 5\n'
    )
    assert read(page, "r1", 0.0).waiting == 5.0


def test_names_of_version_0_10_are_understood_and_newer_twins_win() -> None:
    old = (
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 100\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 40\n'
    )
    page = read(old, "r1", 0.0)
    assert (page.kv_usage, page.prefix_queries, page.prefix_hits) == (0.5, 100.0, 40.0)
    assert read(old + 'vllm:kv_cache_usage_perc{model_name="m"} 0.6\n', "r1", 0.0).kv_usage == 0.6


def test_an_engine_that_sleeps_is_not_awake_even_beside_one_that_is() -> None:
    row = 'vllm:engine_sleep_state{{engine="{}",sleep_state="awake"}} {}\n'
    assert read(row.format(0, 1.0) + row.format(1, 0.0), "r1", 0.0).awake is False


def test_the_newest_lora_row_is_the_current_one() -> None:
    row = 'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{}",waiting_lora_adapters="{}"}} {}\n'
    page = read(row.format("a,b", "c", 1.5e9) + row.format("b", "", 1.6e9) + row.format("a", "", 1.4e9), "r1", 0.0)
    assert (page.adapters_running, page.adapters_waiting, page.max_adapters) == (("b",), (), 4)


def test_label_values_may_hold_braces_quotes_and_commas() -> None:
    page = r'vllm:cache_config_info{a="[]}",b="say \"hi\", x=\"1\"",block_size="16",num_gpu_blocks="None"} 1.0'
    assert series(page)["cache_config_info"][0][0]["b"] == 'say "hi", x="1"'
    assert (read(page, "r1", 0.0).block_size, read(page, "r1", 0.0).num_gpu_blocks) == (16, None)


def test_a_process_start_time_is_read() -> None:
    assert read("process_start_time_seconds 1.79596961e+09\n", "r1", 0.0).started_at == 1795969610.0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "x", ""])
def test_a_value_that_is_no_number_is_unknown(value: str) -> None:
    assert read(f"vllm:num_requests_running {value}\n", "r1", 0.0).running is None


@given(st.text())
def test_no_page_makes_it_raise(text: str) -> None:
    read(text + "\nvllm:num_requests_running{" + text + "} " + text, "r1", 0.0)
