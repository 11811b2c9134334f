"""Processes are killed while clients stream, ask and wait: nothing is lost or doubled, nothing stays charged or held.

Each story has requests in every state when it happens: streams that have begun, requests that replicas have and have
not answered, requests that are held because no replica has room, and clients that go on asking. Replicas stand still
meanwhile (`hang`) where the story needs somebody to be held. What settles an account is in `tests/books.py`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.books import BROKEN, CUT, WHOLE, Books, Opened, finished
from tests.gateway.shared.pair import Server as Redis
from tests.serving import PLAIN, Gateway, gateway, samples, seen, wait_for
from tests.simulated import Simulated, simulated

# Nothing here may happen because a machine is slow: beside what `serving.unhurried` sees to, no wait ends in vain.
# A replica that has more than a millisecond of prefill to do gets no more, so somebody is held however fast it is.
CONFIG = """
[workers]
count = {workers}
[journal]
path = "{journal}"
[scrape]
interval_s = 0.5
[health]
probe_interval_s = 0.5
slow_start_s = 0.0
[timeouts]
first_event_s = 600.0
idle_s = 600.0
[admission]
backlog_s = 0.001
[retry]
budget_per_s = 1000.0
[listen]
drain_s = 60.0
[discovery]
drain_s = 600.0
"""
CLIENTS, STREAMS, MOST = 4, 6, 60
PROMPT = "the sea gives it back as rain and the river takes it to the sea again " * 200


@dataclass
class Scene:
    """Gateways that share replicas, and the books of their clients."""

    fronts: list[Gateway]
    journals: list[Path]
    fleets: list[Simulated]
    books: Books

    @property
    def urls(self) -> list[str]:
        return [front.url for front in self.fronts]

    @property
    def replicas(self) -> list[str]:
        return [url for fleet in self.fleets for url in fleet.urls]

    def each(self, kind: str) -> None:
        for fleet in self.fleets:
            for i in range(len(fleet.urls)):
                fleet.order(i, kind)

    @contextmanager
    def in_every_state(self, during: Callable[[list[Opened]], object]) -> Iterator[Callable[[int], None]]:
        """Streams have begun, requests are held everywhere, clients ask; then `during`, and replicas work again. The
        block can wait until so many requests more have ended; it ends when all have."""
        with ThreadPoolExecutor(STREAMS + MOST) as pool, self.books.asking(self.urls, CLIENTS) as flows:
            try:
                flows(8)
                streams = self._standing(pool)
                asked: list[Future[str]] = []
                for front in self.fronts:
                    self._hold(pool, front, len(streams), asked)
                during(streams)
            finally:
                self.each("clear")  # whatever went wrong: nobody waits for ever
            yield flows
            flows(8)
            for job in (*asked, *(stream.job for stream in streams)):
                job.result()

    def _hold(self, pool: ThreadPoolExecutor, front: Gateway, streams: int, asked: list[Future[str]]) -> None:
        """Asks until somebody is held there; then all that clients have sent is known to the gateways."""
        while True:
            wait_for(lambda: self.waiting() == streams + len(asked) + CLIENTS, "all that clients have sent is waiting")
            if seen(front, "forebay_held_requests"):
                return
            assert len(asked) < MOST
            asked.append(pool.submit(self.books.ask, front.url, PROMPT, 1))

    def waiting(self) -> float:
        """Requests that a core has sent to a replica or holds."""
        names = ("forebay_replica_in_flight", "forebay_held_requests")
        return sum(seen(front, name) or 0 for front in self.fronts for name in names)

    def _standing(self, pool: ThreadPoolExecutor) -> list[Opened]:
        """Streams that have begun and cannot end, since all replicas stand still."""
        while True:
            streams = self.books.open(pool, self.urls, STREAMS, tokens=300)
            self.each("hang")
            wait_for(self._delivered, "what was generated before is where it belongs")
            if open_ := [stream for stream in streams if not stream.job.done()]:
                return open_
            self.each("clear")  # a machine so slow that all of them ended meanwhile

    def _delivered(self) -> bool:
        return len(self.books.ended) >= finished(self.replicas)

    def settle(self, **terms: Any) -> None:
        self.books.settle(self.fronts, self.journals, lambda: finished(self.replicas), **terms)


@contextmanager
def scene(
    folder: Path,
    *,
    workers: int = 2,
    gateways: int = 1,
    config: str = "",
    fleets: Sequence[int] = (2,),
    listed: int = 2,
) -> Iterator[Scene]:
    """`fleets`: processes of so many replicas each, of which the first `listed` stand in the configuration."""
    with ExitStack() as stack:
        found = Scene(
            [], [], [stack.enter_context(simulated(folder, count, "--time-scale", "5")) for count in fleets], Books()
        )
        for n in range(gateways):
            journal = folder / f"journal-{n}.jsonl"
            text = config + CONFIG.format(workers=workers, journal=journal)
            found.fronts.append(stack.enter_context(gateway(found.replicas[:listed], folder, config=text)))
            found.journals.append(journal)
        if workers > 1:
            for front in found.fronts:
                wait_for(lambda front=front: len(processes(front).get("hands", ())) == workers, "all hands are there")
        yield found


def processes(front: Gateway) -> dict[str, Any]:
    """Empty while there is no core."""
    answer = httpx.get(f"{front.url}/admin/workers", timeout=60, verify=PLAIN)
    known: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
    return known


def hands(front: Gateway) -> dict[int, int]:
    """Open requests by pid."""
    return {row["pid"]: row["open_at_core"] for row in processes(front)["hands"]}


def test_a_hand_is_killed(tmp_path: Path) -> None:
    """What it carried is gone, for its clients and for the core, and the core says so in the journal."""
    with scene(tmp_path) as s:
        (front,) = s.fronts
        before = hands(front)

        def killed(streams: list[Opened]) -> None:
            carried = hands(front)
            os.kill(max(carried, key=carried.__getitem__), signal.SIGKILL)

        with s.in_every_state(killed):
            wait_for(lambda: len(hands(front)) == 2 and hands(front).keys() != before.keys(), "another is there")
        s.settle(allowed={BROKEN})
        lost = {name for name, how in s.books.ended.items() if how == BROKEN}
        assert lost
        wait_for(lambda: lost <= set(s.books.recorded(s.journals)), "they are in the journal by the names they had")


def test_the_core_is_killed(tmp_path: Path) -> None:
    """Nobody who asks notices."""
    with scene(tmp_path) as s:
        (front,) = s.fronts
        victim = processes(front)["core"]["pid"]
        with s.in_every_state(lambda streams: os.kill(victim, signal.SIGKILL)):
            wait_for(lambda: processes(front).get("core", {}).get("pid", victim) != victim, "another takes its place")
        s.settle(recorded=False)


def test_a_replica_is_killed(tmp_path: Path) -> None:
    """Its streams end with an error, since no retry could take back what was said; everybody else goes elsewhere."""
    with scene(tmp_path, fleets=(1, 1)) as s:
        (front,) = s.fronts
        begun: list[Opened] = []
        dead = ""

        def killed(streams: list[Opened]) -> None:
            nonlocal dead
            begun.extend(streams)
            dead = begun[0].replica
            victim = next(fleet for fleet in s.fleets if dead in fleet.urls[0])
            s.fleets.remove(victim)
            os.kill(victim.pid, signal.SIGKILL)

        with s.in_every_state(killed):
            wait_for(lambda: front.metric("forebay_replica_available") == 1, "it is out")
        s.settle(allowed={CUT}, dead=dead)
        ended = [stream.job.result() for stream in begun]
        assert ended == [CUT if stream.replica == dead else WHOLE for stream in begun]
        assert {replica for how, replica in s.books.by if how == CUT} == {dead}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    made = Redis(tmp_path)
    made.start()
    yield made
    made.stop()


def test_redis_is_paused_for_five_seconds_and_emptied_and_killed(tmp_path: Path, redis: Redis) -> None:
    """Between two gateways; nobody who asks notices anything of it."""
    shared = f'[redis]\nurl = "redis://127.0.0.1:{redis.port}/0"\ncall_s = 1.0\n'
    with scene(tmp_path, workers=1, gateways=2, config=shared) as s:
        knows(s, 1)
        stopped_at = 0.0

        def paused(streams: list[Opened]) -> None:
            nonlocal stopped_at
            redis.send(signal.SIGSTOP)
            stopped_at = time.monotonic()
            knows(s, 0)

        try:
            with s.in_every_state(paused) as flows:
                flows(8)
                while time.monotonic() < stopped_at + 5.0:
                    flows(1)
                redis.send(signal.SIGCONT)
                knows(s, 1)
        finally:
            redis.send(signal.SIGCONT)
        with s.in_every_state(lambda streams: redis.client.flushall()) as flows:
            flows(8)
        with s.in_every_state(lambda streams: (redis.stop(), knows(s, 0))) as flows:
            flows(8)
            redis.start()
            knows(s, 1)
        s.settle()


def knows(s: Scene, peers: int) -> None:
    """Until every gateway has Redis and hears of so many others; without Redis it hears of none."""
    for front in s.fronts:
        for name in ("forebay_shared_up", "forebay_shared_peers"):
            wait_for(lambda front=front, name=name: front.metric(name) == peers, f"{name} {peers}")


def test_a_thousand_changes_of_membership(tmp_path: Path) -> None:
    """As fast as they go: replicas are added, drained, taken back and removed, while requests are held and clients ask.
    One replica stays, so that there is always an answer."""
    with (
        scene(tmp_path, fleets=(5,), listed=1) as s,
        httpx.Client(base_url=s.urls[0], timeout=120, verify=PLAIN) as admin,
    ):
        (front,) = s.fronts
        members = Members(admin, s.replicas[1:])
        members.add_all()
        wait_for(lambda: front.metric("forebay_replica_available") == 5, "all replicas are in")
        with s.in_every_state(lambda streams: members.change(300)) as flows:
            members.change(700)
            flows(8)
        members.remove_all()
        s.settle()
        wait_for(
            lambda: len(httpx.get(f"{front.url}/admin/fleet", timeout=60, verify=PLAIN).json()) == 1,
            "all others are gone",
        )
        assert front.metric("forebay_replica_available") == 1
        text = httpx.get(f"{front.url}/metrics", timeout=30, verify=PLAIN).text
        assert len({row["replica"] for _, row, _ in samples(text) if "replica" in row}) == 1, "and so are their series"


@dataclass
class Members:
    """Replicas that come and go through the admin API, each time as another one."""

    admin: httpx.Client
    urls: list[str]
    there: dict[str, str] = field(default_factory=dict)  # url: id
    drained: set[str] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(6))
    count: int = 0

    def add(self, url: str) -> None:
        self.count += 1
        self.there[url] = f"member-{self.count}"
        self.done(self.admin.post("/admin/fleet", json={"url": url, "id": self.there[url]}))

    def remove(self, url: str) -> None:
        name = self.there.pop(url)
        self.drained.discard(name)
        self.done(self.admin.delete(f"/admin/fleet/{name}"))

    def drain(self, url: str) -> None:
        name = self.there[url]
        self.drained ^= {name}
        draining = str(name in self.drained).lower()
        self.done(self.admin.post(f"/admin/drain/{name}", params={"draining": draining}))

    @staticmethod
    def done(answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text

    def change(self, times: int) -> None:
        for _ in range(times):
            url = self.rng.choice(self.urls)
            if url not in self.there:
                self.add(url)
            elif self.rng.random() < 0.4:
                self.drain(url)
            else:
                self.remove(url)

    def add_all(self) -> None:
        for url in self.urls:
            self.add(url)

    def remove_all(self) -> None:
        for url in list(self.there):
            self.remove(url)
