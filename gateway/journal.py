"""One JSON line per request: what was asked, decided, believed and seen. Schema 1, written off the event path.

The line is rendered when the request ends and queued; a thread writes, so a slow disk can only drop lines (counted),
never delay a stream. The file is rotated by size: path, path.1, ... path.N. Tenants, sessions and the hashes of the
prefix chain are keyed with a deployment secret, so that lines of one deployment can be compared and nobody without
the secret can test a guess. Prompt text never, unless samples are switched on. Times are seconds since receipt.
Trade-off: a crash loses what was queued in the last moments; a journal is evidence, not accounting.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from gateway.dumped import dumps
from gateway.record import RequestRecord
from gateway.sections import Journal as JournalTable

SCHEMA = 1
FLUSH_S = 0.25
NEWLINE = ord("\n")
CACHED_HASHES = 65_536  # a conversation repeats its prefix each turn, so most keyed hashes are known already

log = logging.getLogger("forebay.journal")


class Keyed:
    """Keyed one-way names: equal inputs stay equal, nothing else can be told."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32).digest()
        self._chunks: dict[int, int] = {}

    def name(self, text: str | None) -> str | None:
        if text is None:
            return None
        return hashlib.blake2b(text.encode(errors="surrogateescape"), key=self._key, digest_size=8).hexdigest()

    def chain(self, chain: tuple[int, ...]) -> list[int]:
        known = self._chunks
        keyed = list(map(known.get, chain))
        if None in keyed:
            if len(known) > CACHED_HASHES:
                known.clear()
            for chunk in chain:
                if chunk not in known:
                    raw = hashlib.blake2b(chunk.to_bytes(8, "big"), key=self._key, digest_size=8).digest()
                    known[chunk] = int.from_bytes(raw, "big")
            keyed = list(map(known.get, chain))
        return keyed  # type: ignore[return-value]  # no None is left


def line(record: RequestRecord, keyed: Keyed) -> dict[str, Any]:
    """The finished record as it is journalled; the one definition of schema 1. Dataclasses inside go out as objects."""
    start = record.received_at
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "request_id": record.request_id,
        "received_unix": round(record.received_unix, 6),
        "endpoint": record.endpoint,
        "kind": record.kind,
        "model": record.model,
        "adapter": record.adapter,
        "tenant": keyed.name(record.tenant),
        "session": keyed.name(record.session),
        "service_class": record.service_class,
        "arm": record.arm,
        "policy": record.policy,
        "assignment": record.assignment,
        "objectives": record.objectives,
        "streams": record.streams,
        "prompt_bytes": record.prompt_bytes,
        "prompt_tokens": [record.prompt.count, record.prompt.source],
        "completion_tokens": [record.completion.count, record.completion.source],
        "cached_tokens": [record.cached.count, record.cached.source],
        "cacheable_tokens": record.cacheable_tokens,
        "chain": keyed.chain(record.chain),
        "unmatched": record.unmatched,
        "attempts": [
            {
                "replica_id": a.replica_id,
                "t_dispatch": _since(a.t_dispatch, start),
                "t_first": _since(a.t_first, start),
                "outcome": a.outcome,
                "detail": a.detail,
            }
            for a in record.attempts
        ],
        "client_retry": record.client_retry,
        "choice": record.choice_reason,
        "prediction": record.prediction,
        "alternatives": record.alternatives,
        "shadows": record.shadows,
        "queue_wait_s": _round(record.queue_wait_s),
        "ttft_s": _round(record.ttft_s),
        "tpot_s": _round(record.tpot_s),
        "longest_gap_s": _round(record.longest_gap_s),
        "e2e_s": _round(record.e2e_s),
        "committed_s": _since(record.committed_at, start),
        "content_events": record.content_events,
        "status": record.status,
        "outcome": record.outcome,
        "partition": record.partition,
        "reason": record.reason,
    }
    if record.sample is not None:
        fields["sample"] = record.sample.decode(errors="replace")
    return fields


def _since(at: float | None, start: float) -> float | None:
    return None if at is None else round(at - start, 6)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


class Journal:
    """Owner of the file, the queue and the thread. `write` is called on the event loop and never blocks."""

    def __init__(self, settings: JournalTable, environ: Mapping[str, str] = os.environ) -> None:
        """Raises OSError when the file cannot be opened for appending."""
        assert settings.path is not None
        self.settings = settings
        self.samples = settings.prompt_samples
        self.dropped = 0
        self.written = 0
        secret = environ.get(settings.secret_env, "").encode() or secrets.token_bytes(32)
        self._keyed = Keyed(secret)
        self._path = Path(settings.path)
        self._file: FileIO = self._path.open("ab", buffering=0)
        self._size = self._path.stat().st_size
        self._queue: deque[bytes] = deque()
        self._stop = threading.Event()
        self._failing = False
        self._overgrown = False  # it could not be rotated
        self._torn = False  # the file ends in the middle of a line
        self._thread = threading.Thread(target=self._run, name="forebay-journal", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord) -> None:
        if len(self._queue) >= self.settings.queue_lines:
            self.dropped += 1
            return
        self._queue.append(dumps(line(record, self._keyed), orjson.OPT_APPEND_NEWLINE))

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is queued and ends the thread."""
        self._stop.set()
        self._thread.join(timeout_s)
        self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), 256))]
            chunk: list[bytes] = []
            size = 0
            for one in batch:
                if self._size + size and self._size + size + len(one) > self.settings.max_bytes:
                    self._append(chunk)
                    self._rotate()
                    chunk, size = [], 0
                chunk.append(one)
                size += len(one)
            self._append(chunk)

    def _append(self, lines: list[bytes]) -> None:
        """Writes whole lines, or as much of them as the disk takes; what is not whole there counts as dropped."""
        data, done = (b"\n" if self._torn else b"") + b"".join(lines), 0
        try:
            while done < len(data):
                done += self._put(memoryview(data)[done:])
        except OSError as e:
            if not self._failing:
                log.error("journal %s: lines are dropped: %s", self._path, e.strerror)
            self._failing = True
        else:
            self._failing = False
        whole = data[:done].count(b"\n") - (self._torn and done > 0)
        self.written += whole
        self.dropped += len(lines) - whole
        if done:
            self._torn = data[done - 1] != NEWLINE  # the next line starts anew

    def _put(self, data: memoryview) -> int:
        """Bytes written, at least one. Raises OSError."""
        done = os.write(self._file.fileno(), data)
        self._size += done
        return done

    def _rotate(self) -> None:
        """path to path.1 and so on. Where that fails the file only becomes longer than it should."""
        try:
            for i in range(self.settings.files - 1, 0, -1):
                older = self._path.with_name(f"{self._path.name}.{i}")
                if older.exists():
                    older.replace(self._path.with_name(f"{self._path.name}.{i + 1}"))
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            file = self._path.open("ab", buffering=0)
        except OSError as e:
            if not self._overgrown:
                log.error("journal %s: cannot be rotated: %s", self._path, e.strerror)
            self._overgrown = True
            return
        self._overgrown = False
        self._file.close()
        self._file, self._size, self._torn = file, 0, False
