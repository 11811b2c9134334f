"""Servers and clients that whole-system tests share: the gateway as a process, and a plain client of streams."""

from __future__ import annotations

import itertools
import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtests.bench.contenders import FOREBAY
from loadtests.bench.processes import Server
from loadtests.ports import free_ports

CHAT = "/v1/chat/completions"
# no objective that a slow machine could miss: then nothing is refused for one
PATIENT = '[classes.standard]\nttft_s = "none"\nttft_s_per_token = 0.0\ntpot_s = "none"\n'
PLAIN = False  # httpx's `verify`: reading the certificates of the machine costs 50 ms of CPU for each client
_numbers = itertools.count()


def wait_for(condition: Callable[[], Any], what: str, within_s: float = 120.0) -> Any:
    """The first truthy value of `condition`, asked every 20 ms. Raises AssertionError naming `what`."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s:g} s: {what}")


def comes_to(expected: float, read: Callable[[], float | None], what: str, within_s: float = 120.0) -> None:
    """Waits until `read` answers that. Raises AssertionError naming `what`, and what it answered last."""
    said: list[float | None] = []

    def reached() -> bool:
        said[:] = [read()]
        return said == [expected]

    try:
        wait_for(reached, what, within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}: {said[0]}, not {expected}") from None


def told(url: str) -> httpx.Response:
    """What the control plane says there, once one is asked who has a core."""

    def answered() -> httpx.Response | None:
        answer = httpx.get(url, timeout=30, verify=PLAIN)
        return None if answer.status_code == 503 else answer

    answer: httpx.Response = wait_for(answered, f"an answer at {url}")
    return answer


COUNTERS = (
    "forebay_replica_in_flight",
    "forebay_replica_prefill_backlog_tokens",
    "forebay_open_requests",
    "forebay_held_requests",
    "forebay_held_bytes",
)


@dataclass
class Gateway:
    """A running gateway. `server` is its process; its log is `server.log`."""

    url: str
    server: Server

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of that name whose labels include `labels`; 0 where there is none."""
        return metric(self.url, name, **labels)


UNHURRIED = {
    "limits": {"loop_lag_s": '"none"'},
    "health": {"probe_timeout_s": "30.0", "hang_s": "600.0"},
    "scrape": {"timeout_s": "30.0"},
    "workers": {"answer_s": "60.0", "hang_s": "120.0"},
}


def unhurried(config: str) -> str:
    """TOML of a gateway that refuses nothing, misses no probe and gives nobody up for dead because the machine is busy,
    unless it says so."""
    given = tomllib.loads(config)
    for table, keys in UNHURRIED.items():
        lines = "".join(f"{key} = {value}\n" for key, value in keys.items() if key not in given.get(table, {}))
        head, _, rest = config.partition(f"[{table}]\n")
        config = f"{head}\n[{table}]\n{lines}{rest}"
    return config if "standard" in given.get("classes", {}) else config + "\n" + PATIENT


@contextmanager
def gateway(
    replicas: Sequence[str],
    folder: Path,
    *,
    policy: str = "forebay",
    config: str = "",
    env: Mapping[str, str] | None = None,
    ready: bool = True,
) -> Iterator[Gateway]:
    """`forebay serve` in front of these URLs; `config` is TOML laid under the flags. Waits until it has them all."""
    (port,) = free_ports(1)
    n = next(_numbers)
    file = folder / f"gateway-{n}.toml"
    file.write_text(unhurried(config))
    argv = [*FOREBAY, "serve", "--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    argv += [part for url in replicas for part in ("--replica", url)]
    server = Server(argv, folder / f"gateway-{n}.log", env=env)
    try:
        server.wait_ready(f"http://127.0.0.1:{port}/{'ready' if ready else 'health'}", within_s=180)
        running = Gateway(f"http://127.0.0.1:{port}", server)
        if ready:  # it says so with the first replica
            comes_to(len(replicas), lambda: running.metric("forebay_replica_available"), "all replicas are in")
        yield running
    finally:
        server.stop()


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every line of a Prometheus text whose label values hold no comma."""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name, _, rest = series.partition("{")
        pairs = (pair.partition("=") for pair in rest.rstrip("}").split(",") if "=" in pair)
        yield name, {key: text.strip('"') for key, _, text in pairs}, float(value)


def metric(url: str, name: str, **labels: str) -> float:
    return sum(v for n, have, v in samples(told(f"{url}/metrics").text) if n == name and labels.items() <= have.items())


@dataclass
class Stream:
    """An answer read event by event. `body` holds the bytes so far, chunk framing removed."""

    response: httpx.Response
    body: bytearray = field(default_factory=bytearray)
    broken: str | None = None  # the connection failed before the end of the body

    @property
    def replica(self) -> str:
        return self.response.headers["x-forebay-replica"]

    def __iter__(self) -> Iterator[bytes]:
        """Raw events without the blank line that ends them; comments are events here."""
        rest = b""
        try:
            for piece in self.response.iter_raw():
                self.body += piece
                *whole, rest = (rest + piece).split(b"\n\n")
                yield from whole
        except (httpx.ReadError, httpx.RemoteProtocolError) as failure:
            self.broken = repr(failure)

    def read(self) -> Stream:
        for _ in self:
            pass
        return self

    @property
    def events(self) -> list[Any]:
        """The parsed `data:` lines; "[DONE]" stands for itself."""
        lines = [line[6:] for line in bytes(self.body).split(b"\n") if line.startswith(b"data: ")]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]

    @property
    def done(self) -> bool:
        return "[DONE]" in self.events

    @property
    def error(self) -> dict[str, Any] | None:
        return next((e["error"] for e in self.events if isinstance(e, dict) and e.get("error")), None)

    @property
    def text(self) -> str:
        choices = (c for e in self.events if isinstance(e, dict) for c in e.get("choices", ()))
        return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((e["usage"] for e in self.events if isinstance(e, dict) and e.get("usage")), None)

    @property
    def finish(self) -> str | None:
        choices = (c for e in self.events if isinstance(e, dict) for c in e.get("choices", ()))
        return next((c["finish_reason"] for c in choices if c.get("finish_reason")), None)


@contextmanager
def streaming(url: str, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> Iterator[Stream]:
    """An open stream; leaving the block closes the connection."""
    timeout = httpx.Timeout(120.0)
    with (
        httpx.Client(timeout=timeout, verify=PLAIN) as client,
        client.stream("POST", url + path, json={**body, "stream": True}, headers=headers) as response,
    ):
        yield Stream(response)


def stream(url: str, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> Stream:
    """A stream read to its end."""
    with streaming(url, body, path, **headers) as opened:
        return opened.read()


def post(url: str, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=120.0, verify=PLAIN)


def chat(text: str, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """Body of a chat request for the model `tiny` with one user message."""
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}


def begun(
    stack: ExitStack, front: Gateway, count: int, max_tokens: int = 400, **headers: str
) -> list[tuple[Stream, Iterator[bytes]]]:
    """So many streams on connections of their own, each after its first content, and of `max_tokens` tokens: a model
    that may end its answer ends it when it likes."""
    out = []
    for _ in range(count):
        body = chat("tell of the river that runs to the sea", max_tokens=max_tokens, ignore_eos=True)
        opened = stack.enter_context(streaming(front.url, body, **headers))
        events = iter(opened)
        for event in events:
            if b'"content"' in event:
                break
        out.append((opened, events))
    return out


def seen(front: Gateway, name: str) -> float | None:
    """Sum of the series of that name; None while no core answers."""
    answer = httpx.get(f"{front.url}/metrics", timeout=30, verify=PLAIN)
    return None if answer.status_code != 200 else sum(v for n, _, v in samples(answer.text) if n == name)


def quiet(front: Gateway) -> bool:
    return all(seen(front, name) == 0 for name in COUNTERS)
