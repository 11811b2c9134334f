"""Every trace format by a literal file of a few rows: what is read, what is changed and said, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import orjson
import pytest

from gateway.journal import Keyed, line
from gateway.record import RequestRecord
from loadtests.schedule import Row, ScheduleError
from loadtests.source import Generator, Source
from loadtests.traces import read
from loadtests.workloads import CLASSES


def write(tmp_path: Path, *lines: object, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def source(path: Path) -> Source:
    found = read(path)
    assert isinstance(found, Source)
    return found


# -- Mooncake ----------------------------------------------------------------------------------------------------------


def mooncake(stamp: int, length: int, ids: list[int], output: int = 9) -> dict[str, object]:
    return {"timestamp": stamp, "input_length": length, "output_length": output, "hash_ids": ids}


def test_mooncake_rows_keep_their_ids_and_time_starts_at_the_first_row(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(5000, 600, [0, 1]), mooncake(7500, 512, [0]))
    found = source(path)
    assert found.rows == (Row(0, 0.0, 600, 9, (0, 1)), Row(0, 2.5, 512, 9, (0,)))
    assert (found.name, found.block_tokens, found.span_s, found.tick_s) == ("mooncake", 512, 2.5, 0.0)


def test_mooncake_ticks_are_found_although_they_wobble_by_a_millisecond(tmp_path: Path) -> None:
    stamps = (0, 0, 3000, 5999, 5999, 9000)
    found = source(write(tmp_path, *(mooncake(s, 512, [i]) for i, s in enumerate(stamps))))
    assert found.tick_s == 3.0
    assert [r.at_s for r in found.rows] == [0.0, 0.0, 3.0, 6.0, 6.0, 9.0]
    assert found.span_s == 12.0


def test_mooncake_with_another_block_size_is_refused_instead_of_read_short(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(0, 600, [0, 1]), mooncake(0, 600, list(range(38))))
    with pytest.raises(ScheduleError, match="line 2: 38 hash_ids for input_length 600; 2 would be right"):
        read(path)


def test_the_packed_file_reads_like_the_plain_one(tmp_path: Path) -> None:
    plain = write(tmp_path, mooncake(0, 600, [0, 1]))
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    assert source(packed).rows == source(plain).rows
    assert source(packed).sha256 != source(plain).sha256  # of the bytes as they lie there


# -- Azure, BurstGPT ---------------------------------------------------------------------------------------------------


def test_azure_times_have_seven_digits_and_nothing_is_shared(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\r",
        "2023-11-16 18:15:46.6805900,374,44\r",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    found = source(path)
    assert [(r.prompt_tokens, r.output_tokens) for r in found.rows] == [(374, 44), (396, 109)]
    assert found.rows[1].at_s == pytest.approx(4.314579, abs=1e-6)
    assert set(found.rows[0].blocks).isdisjoint(found.rows[1].blocks)
    assert found.notes == ("no prefix identity in the trace: no prompt shares anything",)


def test_a_wrong_number_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,many,44")
    with pytest.raises(ScheduleError, match="line 2: ContextTokens is 'many'; a whole number would be right"):
        read(path)


def test_burstgpt_failures_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,0,1087,Conversation log",
        "118,GPT-4,417,276,693,Conversation log",
    )
    found = source(path)
    assert [(r.at_s, r.prompt_tokens, r.tenant) for r in found.rows] == [(0.0, 472, "ChatGPT"), (113.0, 417, "GPT-4")]
    assert found.notes[0] == "1 failed calls of the source left out"


def test_burstgpt_rows_of_one_session_extend_each_other(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,abc,1.0,ChatGPT,130,18,148,Conversation log",
        "9,abc,1.0,ChatGPT,300,18,318,Conversation log",
        "9.5,,1.0,ChatGPT,300,18,318,API log",
    )
    first, second, other = source(path).rows
    assert second.blocks[:2] == first.blocks[:2]
    assert first.blocks[2] not in second.blocks
    assert set(other.blocks).isdisjoint(second.blocks)


# -- Qwen / Bailian ----------------------------------------------------------------------------------------------------


def bailian(chat: int, stamp: float, length: int, ids: list[int], parent: int = -1) -> dict[str, object]:
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": stamp, "input_length": length,
            "output_length": 7, "type": "text", "turn": 1, "hash_ids": ids}  # fmt: skip


def test_bailian_blocks_are_chained_so_that_equal_blocks_behind_other_prefixes_differ(tmp_path: Path) -> None:
    path = write(
        tmp_path, bailian(1, 0.5, 48, [1, 2, 3]), bailian(2, 1.5, 48, [9, 2, 3]), bailian(3, 2.0, 48, [1, 2, 4])
    )
    one, other, sibling = source(path).rows
    assert one.blocks[1] != other.blocks[1]
    assert one.blocks[:2] == sibling.blocks[:2]
    assert one.blocks[2] != sibling.blocks[2]
    assert [r.at_s for r in (one, other, sibling)] == [0.0, 1.0, 1.5]


def test_bailian_partial_last_blocks_without_id_are_shared_with_nothing(tmp_path: Path) -> None:
    found = source(write(tmp_path, bailian(1, 0.0, 40, [1, 2]), bailian(2, 1.0, 40, [1, 2])))
    assert found.rows[0].blocks[:2] == found.rows[1].blocks[:2]
    assert found.rows[0].blocks[2] != found.rows[1].blocks[2]
    with pytest.raises(ScheduleError, match="line 1: 1 hash_ids for input_length 48; 3 would be right"):
        read(write(tmp_path, bailian(1, 0.0, 48, [1])))


# -- weka --------------------------------------------------------------------------------------------------------------


def weka(name: str, *requests: dict[str, object], tools: int = 64, system: int = 64) -> dict[str, object]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": tools,
            "system_tokens": system, "requests": list(requests)}  # fmt: skip


def call(length: int, runs: list[list[int]], think: float = 0.0, output: int = 5) -> dict[str, object]:
    return {"t": 0.0, "type": "n", "model": "m", "in": length, "out": output, "think_time": think, "hash_runs": runs}


def test_weka_sessions_are_closed_loop_with_capped_think_time(tmp_path: Path) -> None:
    path = write(tmp_path, weka("a", call(200, [[1, 3]]), call(330, [[1, 5]], 500.0)), weka("b", call(130, [[1, 2]])))
    first, second, other = source(path).rows
    assert (first.at_s, second.at_s, second.think_s) == (0.0, None, 60.0)
    assert (first.session, second.turn, other.session) == ("a", 1, "b")
    assert second.blocks[:3] == first.blocks[:3]
    assert len(second.blocks) == 6  # five full ones and the partial sixth
    assert (other.at_s or 0.0) > 0.0


def test_weka_tool_prefixes_are_shared_between_sessions_and_the_rest_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, weka("a", call(200, [[1, 3]])), weka("b", call(200, [[1, 3]])))
    one, other = source(path).rows
    assert one.blocks[:2] == other.blocks[:2]  # (64 + 64) // 64
    assert one.blocks[2] != other.blocks[2]


def test_weka_subagents_run_in_their_place(tmp_path: Path) -> None:
    nested: dict[str, object] = {"t": 1.0, "type": "subagent", "requests": [call(64, [[90, 1]])]}
    found = source(write(tmp_path, weka("a", call(130, [[1, 2]]), nested, call(260, [[1, 4]], 2.0))))
    assert [r.prompt_tokens for r in found.rows] == [130, 64, 260]
    assert [r.turn for r in found.rows] == [0, 1, 2]


def test_weka_sessions_end_before_a_prompt_no_model_takes(tmp_path: Path) -> None:
    path = write(tmp_path, weka("a", call(130, [[1, 2]]), call(200_000, [[1, 3125]]), call(260, [[1, 4]])))
    assert len(source(path).rows) == 1


# -- ServeGen ----------------------------------------------------------------------------------------------------------

SERVEGEN = (
    "model,client,window_start_s,rate_rps,iat_cv,dist,arg1,arg2,in_mean,in_p50,in_p90,in_p99,out_mean,out_p50,out_p90,out_p99",
    "m,1,0,8.0,2.0,Gamma,0.25,0.5,100,80,200,400,50,40,100,200",
    "m,2,0,2.0,1.5,Weibull,0.7,0.4,,,,,,,,",
    "m,1,600,10.0,2.0,Gamma,0.25,0.4,100,80,200,400,50,40,100,200",
)


def test_servegen_draws_clients_at_their_shares_of_the_base_rate(tmp_path: Path) -> None:
    found = read(write(tmp_path, *SERVEGEN))
    assert isinstance(found, Generator)
    cut = found.cut(0, 1.0, 1500.0, 10.0, CLASSES)
    by_client = {name: sum(r.tenant == name for r in cut.cohort) for name in ("m/1", "m/2")}
    # the pool's mean of 10/s is scaled to 4/s
    assert sum(by_client.values()) / 1500.0 == pytest.approx(4.0, rel=0.25)
    assert by_client["m/1"] > 4 * by_client["m/2"] > 0
    assert cut.sha256 == found.cut(0, 1.0, 1500.0, 10.0, CLASSES).sha256


def test_servegen_with_an_unknown_law_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="line 2: dist is 'Pareto'; Gamma or Weibull"):
        read(write(tmp_path, SERVEGEN[0], SERVEGEN[1].replace("Gamma", "Pareto")))


# -- ShareGPT ----------------------------------------------------------------------------------------------------------


def test_sharegpt_turns_hold_all_that_was_said(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 80},
        {"from": "human", "value": "z" * 40}, {"from": "gpt", "value": "w" * 8},
    ]  # fmt: skip
    path = write(
        tmp_path, [{"id": "c", "conversations": talk}, {"id": "d", "conversations": talk[:2]}, {"conversations": []}]
    )
    first, second, other = source(path).rows
    assert (first.prompt_tokens, first.output_tokens) == (102, 20)  # 400 bytes + 6 of the role
    assert second.prompt_tokens == -(-(406 + 91 + 46) // 4)
    assert second.blocks[:1] == first.blocks[:1] == other.blocks[:1]
    assert (second.at_s, second.turn) == (None, 1)
    assert second.think_s > 0.0


# -- Forebay's journal -------------------------------------------------------------------------------------------------


def journal(at: float, tokens: int, chain: list[int], **more: object) -> dict[str, object]:
    return {"schema": 1, "received_unix": at, "kind": "generate", "service_class": "interactive",
            "prompt_bytes": tokens * 4, "prompt_tokens": [tokens, "usage"], "completion_tokens": [50, "usage"],
            "chain": chain, "session": None, "tenant": None, "adapter": None} | more  # fmt: skip


def test_journal_lines_share_what_their_chains_share(tmp_path: Path) -> None:
    path = write(tmp_path, journal(100.5, 192, [1, 2, 3]), journal(103.0, 200, [1, 2, 9]))
    one, other = source(path).rows
    assert (one.at_s, other.at_s) == (0.0, 2.5)
    assert one.blocks[:2] == other.blocks[:2]
    assert one.blocks[2] != other.blocks[2]


def test_journal_retries_and_pools_are_left_out_and_missing_lengths_are_the_median(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        journal(1.0, 64, [1], completion_tokens=[30, "usage"]),
        journal(2.0, 64, [2], completion_tokens=[None, None]),
        journal(3.0, 64, [3], client_retry=True),
        journal(4.0, 64, [4], kind="pool"),
    )
    found = source(path)
    assert [r.output_tokens for r in found.rows] == [30, 30]
    assert found.notes[0] == "1 requests without an answer ask for the median of 30 tokens"


def test_a_line_of_a_real_journal_is_read(tmp_path: Path) -> None:
    record = RequestRecord(request_id="r1", received_at=10.0, received_unix=1000.0)
    record.chain, record.prompt_bytes = (5, 6), 600
    found = source(write(tmp_path, orjson.dumps(line(record, Keyed(b"secret"))).decode()))
    assert found.rows[0].prompt_tokens == 150
    assert len(found.rows[0].blocks) == 3


# -- neither -----------------------------------------------------------------------------------------------------------


def test_an_unknown_file_lists_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="mooncake, bailian, weka, azure, burstgpt, servegen, journal, sharegpt"):
        read(write(tmp_path, "hello"))
    with pytest.raises(ScheduleError, match="format 'csv' is not one of"):
        read(write(tmp_path, "hello"), "csv")
    with pytest.raises(ScheduleError, match="is empty"):
        read(write(tmp_path, ""))
    with pytest.raises(ScheduleError, match="cannot be read"):
        read(tmp_path / "missing")
