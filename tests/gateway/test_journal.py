"""What a journal line says, what it never says, and what happens when the disk is slow or full."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import orjson
import pytest

from gateway.dumped import dumps
from gateway.journal import Journal, Keyed, line
from gateway.record import RequestRecord, Tokens, TokenSource, Unmatched
from gateway.sections import Journal as JournalTable
from policies.model import Alternative, Outcome, Prediction
from policies.objectives import Objectives, Partition


def finished(request_id: str = "r-1") -> RequestRecord:
    record = RequestRecord(
        request_id,
        received_at=100.0,
        received_unix=1.8e9,
        endpoint="chat",
        model="m",
        tenant="alice",
        session="s-1",
        service_class="interactive",
        policy="round_robin",
        objectives=Objectives(ttft_s=2.0, tpot_s=0.1),
        prompt_bytes=1200,
        prompt=Tokens(300, TokenSource.USAGE),
        completion=Tokens(11, TokenSource.USAGE),
        cached=Tokens(256, TokenSource.USAGE),
        chain=(11, 22, 33),
        unmatched=Unmatched("user", "messages[1].content", 512),
        choice_reason="affinity",
        prediction=Prediction(0.3, 0.02, 44, 256, 0.7),
        alternatives=(Alternative("b", 0.5, 0, 0.9, 0.6),),
        committed_at=100.5,
        first_content_at=100.5,
        last_content_at=101.5,
        longest_gap_s=0.2,
        content_events=11,
        ended_at=101.6,
        status=200,
        outcome=Outcome.SUCCESS,
        partition=Partition.GOOD,
    )
    failed = record.attempt("b", 100.1)
    failed.outcome, failed.detail = Outcome.ERROR, "refused"
    answered = record.attempt("a", 100.2)
    answered.t_first, answered.outcome = 100.5, Outcome.SUCCESS
    return record


def settings(path: Path, **values: object) -> JournalTable:
    return JournalTable.model_validate({"path": str(path), **values})


def test_a_line_tells_the_whole_life_of_a_request() -> None:
    keyed = Keyed(b"secret")
    told = orjson.loads(dumps(line(finished(), keyed)))
    assert told == {
        "schema": 1,
        "request_id": "r-1",
        "received_unix": 1.8e9,
        "endpoint": "chat",
        "kind": "generate",
        "model": "m",
        "adapter": None,
        "tenant": keyed.name("alice"),
        "session": keyed.name("s-1"),
        "service_class": "interactive",
        "arm": None,
        "policy": "round_robin",
        "assignment": None,
        "objectives": {"ttft_s": 2.0, "tpot_s": 0.1, "itl_s": None, "e2e_s": None},
        "streams": True,
        "prompt_bytes": 1200,
        "prompt_tokens": [300, "usage"],
        "completion_tokens": [11, "usage"],
        "cached_tokens": [256, "usage"],
        "cacheable_tokens": None,
        "chain": keyed.chain((11, 22, 33)),
        "unmatched": {
            "kind": "user",
            "path": "messages[1].content",
            "offset": 512,
            "family": "",
            "lost_tokens": 0,
            "requests": 1,
        },
        "attempts": [
            {"replica_id": "b", "t_dispatch": 0.1, "t_first": None, "outcome": "error", "detail": "refused"},
            {"replica_id": "a", "t_dispatch": 0.2, "t_first": 0.5, "outcome": "success", "detail": ""},
        ],
        "client_retry": 0,
        "choice": "affinity",
        "prediction": {
            "ttft_s": 0.3,
            "tpot_s": 0.02,
            "uncached_tokens": 44,
            "cached_tokens": 256,
            "scraped_age_s": 0.7,
        },
        "alternatives": [
            {"replica_id": "b", "score": 0.5, "cached_tokens": 0, "predicted_ttft_s": 0.9, "scraped_age_s": 0.6}
        ],
        "shadows": [],
        "queue_wait_s": 0.1,
        "ttft_s": 0.5,
        "tpot_s": 0.1,
        "longest_gap_s": 0.2,
        "e2e_s": 1.6,
        "committed_s": 0.5,
        "content_events": 11,
        "status": 200,
        "outcome": "success",
        "partition": "good",
        "reason": "",
    }


def test_names_and_chain_are_keyed_with_the_secret_of_the_deployment() -> None:
    one, same, other = Keyed(b"one"), Keyed(b"one"), Keyed(b"other")
    assert one.name("alice") == same.name("alice") != other.name("alice")
    assert one.chain((1, 2)) == same.chain((1, 2)) != other.chain((1, 2))
    assert one.chain((1, 2, 3))[:2] == one.chain((1, 2))  # a shared prefix stays visible
    assert set(one.chain((1, 2))).isdisjoint({1, 2})
    assert one.name(None) is None


def test_prompt_text_is_written_only_when_a_sample_was_taken() -> None:
    assert "sample" not in line(finished(), Keyed(b""))
    record = finished()
    record.sample = b'{"prompt": "\xff"}'
    assert line(record, Keyed(b""))["sample"] == '{"prompt": "�"}'


def test_lines_are_on_disk_after_close(tmp_path: Path) -> None:
    journal = Journal(settings(tmp_path / "j.jsonl"), {})
    for i in range(600):
        journal.write(finished(f"r-{i}"))
    journal.close()
    lines = (tmp_path / "j.jsonl").read_text().splitlines()
    assert [json.loads(one)["request_id"] for one in lines] == [f"r-{i}" for i in range(600)]
    assert (journal.written, journal.dropped) == (600, 0)


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        journal = Journal(settings(tmp_path / "j.jsonl"), {})
        journal.write(finished(name))
        journal.close()
    assert len((tmp_path / "j.jsonl").read_text().splitlines()) == 2


def test_files_are_rotated_by_size_and_the_oldest_goes(tmp_path: Path) -> None:
    one = len(dumps(line(finished("r-0"), Keyed(b"")))) + 40
    journal = Journal(settings(tmp_path / "j.jsonl", max_bytes=2 * one, files=2), {})
    for i in range(9):
        journal.write(finished(f"r-{i}"))
    journal.close()
    kept = {p.name: [json.loads(x)["request_id"] for x in p.read_text().splitlines()] for p in tmp_path.iterdir()}
    assert kept == {"j.jsonl": ["r-8"], "j.jsonl.1": ["r-6", "r-7"], "j.jsonl.2": ["r-4", "r-5"]}


def test_a_stuck_disk_drops_lines_and_counts_them_and_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, entered = threading.Event(), threading.Event()
    journal = Journal(settings(tmp_path / "j.jsonl", queue_lines=3), {})
    append = journal._append

    def slow(batch: list[bytes]) -> None:
        entered.set()
        stuck.wait()
        append(batch)

    monkeypatch.setattr(journal, "_append", slow)
    journal.write(finished("first"))
    entered.wait()
    for i in range(10):
        journal.write(finished(f"r-{i}"))
    assert journal.dropped == 7
    stuck.set()
    journal.close()
    assert journal.written == 4


def test_a_full_disk_drops_lines_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """/dev/full answers every write as a full disk does."""
    journal = Journal(settings(Path("/dev/full")), {})
    for i in range(300):  # more than one batch
        journal.write(finished(f"r-{i}"))
    journal.close()
    assert not journal._thread.is_alive()
    assert (journal.dropped, journal.written) == (300, 0)
    assert caplog.text.count("journal /dev/full: lines are dropped: No space left on device") == 1


def test_a_disk_that_fills_in_the_middle_of_a_line_and_is_emptied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(settings(tmp_path / "j.jsonl"), {})
    one = len(dumps(line(finished("r-0"), Keyed(b"")), orjson.OPT_APPEND_NEWLINE))
    room = [2 * one + 100]  # two lines and a part of the third
    put = journal._put

    def disk(data: memoryview) -> int:
        fits = data[: room[0]]
        if not fits:
            raise OSError(28, "No space left on device")
        done = put(fits)
        room[0] -= done
        return done

    monkeypatch.setattr(journal, "_put", disk)
    journal._append([orjson.dumps({"n": i, "text": "x" * (one - 18)}) + b"\n" for i in range(5)])
    assert (journal.written, journal.dropped) == (2, 3)
    room[0] = 10 * one
    journal._append([b'{"n": 5}\n', b'{"n": 6}\n'])
    journal.close()
    lines = (tmp_path / "j.jsonl").read_text().splitlines()
    whole = [json.loads(x)["n"] for x in lines if x.endswith("}")]
    assert whole == [0, 1, 5, 6]
    assert len(lines) == 5  # and the torn one stands alone
    assert (journal.written, journal.dropped) == (4, 3)


def test_a_file_that_cannot_be_rotated_grows_instead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    journal = Journal(settings(folder / "j.jsonl", max_bytes=1000, files=1), {})
    (folder / "j.jsonl.1").mkdir()
    (folder / "j.jsonl.1" / "in the way").touch()
    for i in range(9):
        journal.write(finished(f"r-{i}"))
    journal.close()
    assert (journal.written, journal.dropped) == (9, 0)
    assert caplog.text.count("cannot be rotated: Is a directory") == 1
    assert len((folder / "j.jsonl").read_text().splitlines()) == 9
