"""uvicorn's HTTP protocol with a splice: the proxy writes a stream straight to the client's transport.

The cycle of each request is a `client.Client`. A request that came whole is handed to `Proxied.begin` inside the read
that completed it; any other runs as an ASGI task, with the client in `scope["extensions"]["forebay.splice"]`. This
class also bounds what a client may send: size of the head (431), time for head and body (408), upgrades (426; h2c is
ignored, as RFC 9110 allows), and request shapes that two parsers could read differently, which llhttp refuses in strict
mode and which are answered 400 with the connection closed. Several requests sent ahead are served in turn.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from functools import partial
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.client import Client
from gateway.coming import MOST_BYTES, PATIENCE_S, Coming
from gateway.cycle import SplicedCycle, refuse
from gateway.door import Door
from gateway.errors import Code, GatewayError
from gateway.request_head import RequestHead, learn, target, without_upgrade

PIPELINE_DEPTH = 8  # requests read ahead; reading goes on meanwhile, so that a client that leaves is noticed
MOST_LESSONS = 4  # heads of one connection that are remembered in turn before we stop trying


class Proxied(Protocol):
    """Who serves requests without a task."""

    leaving: bool  # connections end with their next answer
    door: Door

    def begin(self, scope: Any, client: Client, head: RequestHead | None) -> bool:
        """Takes a request whose body is there. False: it is not one for here."""


def protocol(
    *,
    max_header_bytes: int,
    body_timeout_s: float,
    client_stall_s: float | None = None,
    proxied: Proxied | None = None,
) -> Any:
    """What uvicorn takes as `http=`."""
    return partial(
        WireProtocol,
        max_header_bytes=max_header_bytes,
        body_timeout_s=body_timeout_s,
        client_stall_s=client_stall_s,
        proxied=proxied,
    )


class WireProtocol(HttpToolsProtocol):
    """One client connection. `cycle` is the request being read, `serving` the one being answered."""

    cycle: SplicedCycle | None  # type: ignore[assignment]
    serving: SplicedCycle | None

    def __init__(
        self,
        *args: Any,
        max_header_bytes: int,
        body_timeout_s: float,
        client_stall_s: float | None,
        proxied: Proxied | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.client_stall_s = client_stall_s
        self.proxied = proxied
        self._known: RequestHead | None = None  # what the requests of this connection begin with
        self._lessons = MOST_LESSONS if proxied is not None else 0
        self._coming: Coming | None = None
        self._starting: SplicedCycle | None = None  # begun in the read that is being parsed
        self.max_header_bytes = max_header_bytes
        self.body_timeout_s = body_timeout_s
        self.serving = None
        self._in_head = False
        self._in_message = False
        self._head_bytes = 0  # since a head began (without the read that it began inside of), or since bytes of a body
        self._read_bytes = 0  # size of the read that is being parsed
        self._fresh = True  # nothing of that read belonged to an earlier request
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._slow: asyncio.TimerHandle | None = None

    # -- bytes in ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = time.monotonic()  # also for one that never sends a byte
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_idle)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._coming is not None:
            self._more(self._coming, data)
            return
        between = not self._in_message and (self.serving is None or self.serving.response_complete)
        if between and self._known is not None and (found := self._known.begins(data)) is not None:
            at, missing = found
            if missing == 0:
                self._again(self._known, data[at:])
                return
            if 0 < missing <= MOST_BYTES and self.proxied is not None and self.proxied.door.fits(len(data) - at):
                self._in_message = True
                self._coming = coming = Coming(self._known, self.proxied.door, data, at, missing)
                coming.timer = self.loop.call_later(PATIENCE_S, self._parse_coming)
                return
        self._parse(data, between)

    def _more(self, coming: Coming, data: bytes) -> None:
        """The next read of a request whose head is known."""
        if not coming.add(data):
            self._parse_coming()
        elif not coming.missing:
            self._end_coming()
            self._again(coming.known, b"".join(coming.parts))

    def _end_coming(self) -> None:
        if self._coming is not None:
            self._coming.close()
        self._coming = None
        self._in_message = False

    def _parse_coming(self) -> None:
        """It takes the ordinary way."""
        coming = self._coming
        if coming is not None:
            self._end_coming()
            self._parse(b"".join([coming.head, *coming.parts]), True)

    def _parse(self, data: bytes, between: bool) -> None:
        """`between`: no request was in progress before these bytes."""
        self._read_bytes = len(data)
        self._fresh = not self._in_message
        self._head_bytes += self._read_bytes
        rest = self._feed(data)
        while rest is not None:  # a loop: thousands of them may come in one read
            between = False
            rest = self._feed(rest)
        if self._in_message:
            if self._head_bytes > self.max_header_bytes:
                self._too_large()
            elif self._slow is None and not self.pipeline and not self._refused:
                self._slow = self.loop.call_later(self.body_timeout_s, self._too_slow)
        starting = self._starting
        if starting is None:
            return
        self._starting = None
        if self._lessons and between and starting is self.cycle:
            self._lessons -= 1
            self._known = learn(data, starting.scope)
        if starting.more_body:
            self._start_asgi_task(starting, self.app)
        else:
            self._start(starting, None)

    def _feed(self, data: bytes) -> bytes | None:
        """Gives bytes to the parser; answers those that have to be read again, without an upgrade that is ignored."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as e:
            self._refuse(GatewayError(Code.MALFORMED, f"the request is not valid HTTP/1.1: {e}"))
        return None

    def _again(self, known: RequestHead, body: bytes) -> None:
        """One whole request with a head that is known."""
        cycle = self.cycle = self.serving = SplicedCycle(self, known.scope, self.transport, self.flow, False, True)
        cycle.parts.append(body)
        cycle.size = len(body)
        cycle.more_body = False
        self._lessons = MOST_LESSONS
        self._start(cycle, known)

    def _start(self, cycle: SplicedCycle, head: RequestHead | None) -> None:
        """A request that is whole."""
        if self.proxied is not None and self.proxied.leaving:
            cycle.keep_alive = False
        if self.proxied is None or not self.proxied.begin(cycle.scope, cycle, head):
            self._start_asgi_task(cycle, self.app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = self._read_bytes if self._fresh else 0
        self._fresh = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer: never mixed into the headers
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser = self.parser
        if parser.should_upgrade():
            return
        # what was read may be the body or others: then the head itself is counted
        if self._head_bytes + self._read_bytes > self.max_header_bytes and self._size() > self.max_header_bytes:
            self._too_large()
        else:
            self._begin(parser.get_method().decode("ascii"), parser.get_http_version(), parser.should_keep_alive())
        if self._refused:
            raise ConnectionAbortedError  # to the parser: it stops, and what stands behind is not read

    def _size(self) -> int:
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers], 0)

    def _begin(self, method: str, version: str, keep_alive: bool) -> None:
        scope = self.scope
        scope["method"] = method
        if version != "1.1":
            scope["http_version"] = version
            if any(name == b"transfer-encoding" for name, _ in self.headers):
                self._refuse(GatewayError(Code.MALFORMED, "transfer-encoding is not part of HTTP/1.0"))
                return
        raw_path, query = target(self.url)
        path = raw_path.decode("latin-1")
        scope["path"] = self.root_path + (urllib.parse.unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + raw_path
        scope["query_string"] = query
        before = self.cycle
        cycle = self.cycle = SplicedCycle(
            self,
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and keep_alive,
        )
        if before is None or before.response_complete:
            self.serving = cycle
            self._starting = cycle
        else:
            self.pipeline.appendleft((cycle, self.app))
            if len(self.pipeline) >= PIPELINE_DEPTH:
                self.flow.pause_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        assert isinstance(cycle, SplicedCycle)
        self.serving = cycle
        if self.proxied is not None and self.proxied.leaving:
            cycle.keep_alive = False
        cycle.for_asgi()
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.parts.append(body)
        cycle.size += len(body)
        if cycle.size > HIGH_WATER_LIMIT and cycle.limit_bytes is None:
            self.flow.pause_reading()
        cycle.arrived()

    def on_message_complete(self) -> None:
        self._in_message = False
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        cycle = self.cycle
        if cycle is None or self.parser.should_upgrade():
            return
        cycle.more_body = False
        if cycle.response_complete:
            if not cycle.keep_alive:
                self.close()  # the answer was given early and the rest is read now
            return
        cycle.arrived()

    # -- refusals that happen before there is a request ----------------------------------------------------------

    def _refuse(self, error: GatewayError) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        serving = self.serving
        if serving is not None and serving.response_complete and not serving.keep_alive:
            self.close()  # it was answered before its body had come; our side of the connection has ended
            return
        if serving is not None and not serving.response_complete:
            if serving is not self.cycle or not serving.more_body:
                serving.keep_alive = False  # what came before is answered still, then the connection closes
                self.pipeline.clear()
                return
            if serving.response_started:
                self.transport.close()  # ours would stand in the middle of another answer
                return
            serving.lost()
        path = self.url.partition(b"?")[0].decode("latin-1")
        refuse(self, error, path)

    def _too_large(self) -> None:
        message = f"the request head, or its trailers, are larger than {self.max_header_bytes} bytes"
        self._refuse(GatewayError(Code.HEADERS_TOO_LARGE, message))

    def _too_slow(self) -> None:
        self._slow = None
        serving = self.serving
        reading = serving is not None and serving is self.cycle and serving.more_body and not serving.response_complete
        if reading and serving is not None and serving.limit_bytes is not None:
            return  # its reader has the same limit, and answers in the API's own form
        self._refuse(GatewayError(Code.BODY_TOO_SLOW, f"no whole request within {self.body_timeout_s:g} s"))

    def _upgrade(self, rest: bytes) -> bytes | None:
        """h2c is ignored: the bytes of the request without it, to be read again. Anything else is refused."""
        wanted = next((value.lower() for name, value in self.headers if name == b"upgrade"), b"")
        if wanted != b"h2c":
            self._refuse(GatewayError(Code.UPGRADE, "protocol upgrades are not supported here"))
            return None
        head = without_upgrade(self.parser.get_method(), self.url, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        return head + rest

    # -- the end of connections and answers ----------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
            return
        # one timer that looks again when it fires costs less than one set and cancelled for every request
        self._idle_since = time.monotonic()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_idle)

    def _look_idle(self) -> None:
        self._idle_timer = None
        serving = self.serving
        if self._in_message or (serving is not None and not serving.response_complete):
            return  # set again when the answer is complete
        left = self._idle_since + self.timeout_keep_alive - time.monotonic()
        if left > 0.001:
            self._idle_timer = self.loop.call_later(left, self._look_idle)
        else:
            self.close()

    def leave(self, idle_s: float) -> None:
        """Closes if it has been idle for so long after an answer."""
        serving = self.serving
        idle = serving is not None and serving.response_complete and not self._in_message
        if idle and time.monotonic() - self._idle_since >= idle_s:
            self.close()

    def close(self) -> None:
        """Closes once all is sent; what a client has not taken by `client_stall_s` from now is dropped."""
        transport = self.transport
        transport.close()
        if self.client_stall_s is not None and transport.get_write_buffer_size():
            self.loop.call_later(self.client_stall_s, transport.abort)

    def shutdown(self) -> None:
        self._parse_coming()  # else it would look idle
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._parse_coming()  # what was lost is on record, as for every other request
        for timer in (self._slow, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._slow = self._idle_timer = None
        serving = self.serving
        super().connection_lost(exc)
        self.pipeline.clear()
        for cycle in {self.cycle, serving}:
            if cycle is not None and not cycle.response_complete:
                cycle.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.serving is not None and self.serving.listener is not None:
            self.serving.listener.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.serving is not None and self.serving.listener is not None:
            self.serving.listener.on_resume()
