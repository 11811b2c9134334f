"""What clients asked and what came of it, beside what a gateway and its replicas say: for tests that kill things.

Three things must hold whatever dies, and `settle` checks all three against the processes that run: no request is lost
or doubled (each client has one whole answer or one clear end; the gateway's journal has one line per request; what the
replicas ran to the end is what clients got), nothing stays charged to a replica, and nothing stays held. Answers are
checked token by token: a replica sends one event per token here, so one that is missing or sent twice shows.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.serving import CHAT, Gateway, chat, metric, quiet, wait_for

WHOLE, CUT, BROKEN = "whole", "ended by an error event", "connection lost"
PATIENCE_S = 180.0
THINK_S = 0.05  # between two requests of a client that goes on asking: so many a second do, and cost a test little


Begun = Callable[[str], object]


class Opened:
    """A stream whose first token has come from `replica`; `job` answers how it ended."""

    job: Future[str]
    replica: str

    def __init__(self) -> None:
        self.first = threading.Event()

    def begun(self, replica: str) -> None:
        self.replica = replica
        self.first.set()


class Books:
    """One line per request: its id and how it ended. May be written from many threads."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}
        self.by: Counter[tuple[str, str]] = Counter()  # ends by how and the replica that answered
        self._lock = threading.Lock()
        self._next = 0

    def ask(
        self, url: str, text: str = "where is the sea", tokens: int = 4, begun: Begun = lambda replica: None
    ) -> str:
        """One streamed request on a connection of its own, read to its end. `begun` is told, with its first token, who
        answers."""
        with self._lock:
            self._next += 1
            name = f"book-{self._next}"
        ended, replica = _ask(url, name, f"{name}: {text}", tokens, begun)
        with self._lock:
            self.ended[name] = ended
            self.by[ended, replica] += 1
        return ended

    def counted(self) -> Counter[str]:
        return Counter(self.ended.values())

    def open(self, pool: ThreadPoolExecutor, urls: Sequence[str], count: int, tokens: int) -> list[Opened]:
        """So many streams, each after its first token."""
        opened = [Opened() for _ in range(count)]
        for i, one in enumerate(opened):
            one.job = pool.submit(self.ask, urls[i % len(urls)], "tell of the river", tokens, one.begun)
        for one in opened:
            assert one.first.wait(PATIENCE_S)
        return opened

    @contextmanager
    def asking(self, urls: Sequence[str], clients: int) -> Iterator[Callable[[int], None]]:
        """Clients that ask one request after the other for as long as the block lasts. What it gives waits until so
        many requests that were sent after the call have ended."""
        over = threading.Event()
        sent: list[str] = []

        def client(n: int) -> None:
            while not over.is_set():
                sent.append(self.ask(urls[n % len(urls)]))
                over.wait(THINK_S)

        def flows(count: int) -> None:
            # those that are under way now were sent before, one of each client
            enough = len(sent) + count + clients
            wait_for(lambda: len(sent) >= enough, f"{count} requests end", PATIENCE_S)

        with ThreadPoolExecutor(clients) as pool:
            jobs = [pool.submit(client, n) for n in range(clients)]
            try:
                yield flows
            finally:
                over.set()
            for job in jobs:
                job.result()

    @staticmethod
    def recorded(journals: Sequence[Path]) -> list[str]:
        """Ids of all requests that have a line in a journal, as often as they have one."""
        whole = (line for path in journals if path.exists() for line in path.read_bytes().split(b"\n")[:-1])
        return [json.loads(line)["request_id"] for line in whole]

    def settle(
        self,
        fronts: Iterable[Gateway],
        journals: Sequence[Path],
        ran: Callable[[], float],
        *,
        allowed: Iterable[str] = (),
        dead: str = "",
        recorded: bool = True,
    ) -> None:
        """Everybody is answered: nothing may be left. `allowed`: ends besides a whole answer that this fault may cause.
        `ran`: answers that replicas finished; what the `dead` one did nobody can say any more. `recorded` False: a core
        died, and what it had not written went with it.
        """
        seen = self.counted()
        assert set(seen) <= {WHOLE, *allowed}, seen
        for front in fronts:
            wait_for(lambda front=front: quiet(front), "nothing is charged to a replica and nothing is held")
        owed = {name for name, how in self.ended.items() if how != BROKEN} if recorded else set()
        wait_for(lambda: owed <= set(self.recorded(journals)), "every request that was answered has left its record")
        written = Counter(self.recorded(journals))
        assert {name: n for name, n in written.items() if n > 1} == {}
        assert set(written) <= set(self.ended)
        whole = seen[WHOLE] - self.by[WHOLE, dead]
        assert whole <= ran() <= whole + seen[BROKEN] + seen[CUT], "no answer was computed twice"


def finished(urls: Sequence[str]) -> float:
    """Answers that these replicas generated to their end."""
    return sum(metric(url, "vllm:request_success_total", finished_reason="length") for url in urls)


def _ask(url: str, name: str, text: str, tokens: int, begun: Begun) -> tuple[str, str]:
    """How it ended, and the replica that the answer names."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    body = json.dumps(chat(text, max_tokens=tokens, stream=True, ignore_eos=True))
    try:
        connection.request("POST", CHAT, body, {"content-type": "application/json", "x-request-id": name})
        answer = connection.getresponse()
        replica = answer.headers.get("x-forebay-replica", "")
        begun(replica)
        data = answer.read()
    except (http.client.HTTPException, ConnectionError):
        time.sleep(0.01)  # as a client that tries again: nobody listens for a moment
        return BROKEN, ""
    finally:
        connection.close()
    if answer.status != 200:
        return f"refused with {answer.status}", replica
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    ends, errors = events.count(b"[DONE]"), sum(b'"error"' in event for event in events)
    if errors == 1 and not ends:
        return CUT, replica
    got = sum(1 for event in events if b'"content":"' in event and b'"content":""' not in event)
    if (ends, errors, got) == (1, 0, tokens) and events[-1] == b"[DONE]":
        return WHOLE, replica
    return f"wrong: {ends} ends, {errors} errors, {got} of {tokens} tokens: {data[-300:]!r}", replica
