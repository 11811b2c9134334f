"""One attempt at a replica: its response read as callbacks, judged event by event, written to the client.

Before commit nothing reaches the client, so a failure can still become a true status or another replica's answer:
envelope events wait in order until the first content or terminal event. After it every usual read costs one match
against the stream's template and one write of the bytes as they came. A failure after commit ends in an error event
of the API's own form and no terminal event. Answers that are not streamed are collected and judged whole up to
`COLLECT_BYTES`; what is longer is passed on as it comes.
"""

from __future__ import annotations

from enum import Enum
from time import monotonic

from gateway import answer, retry
from gateway.chunks import FRAMES, FRAMES_BYTES
from gateway.endpoints import Kind
from gateway.errors import Api
from gateway.http1 import Break, Head, UpstreamConnection
from gateway.result import Asker, Result
from gateway.retry import Failure
from gateway.sse import ABORT, COMMENT, CONTENT, ERROR, FINISH, TERMINAL, USAGE, EventScanner, data_of

COLLECT_BYTES = 256 * 1024
_NO_EVENTS = EventScanner(Api.OTHER)  # of an answer that is no stream; nobody writes to it
_FINGERPRINT = b',"system_fingerprint":'


class Mode(Enum):
    HEAD = "head"  # nothing yet
    STREAM = "stream"  # events, judged
    COLLECT = "collect"  # a whole answer, judged at its end
    PASS = "pass"  # bytes, not judged any more


class Relay:
    """`http1.Receiver` of one attempt, and a `pulses.Live` stream once content came."""

    __slots__ = (
        "_collected", "_framed", "_held", "_held_framed", "_long", "_parked", "_prefix", "_raw", "_size", "_suffix",
        "_terminal", "_text_at", "_usual", "_withhold", "broke", "client", "connection", "content_events",
        "dispatched_at", "exchange", "first_at", "head", "last_at", "last_event_at", "longest_gap_s", "meter",
        "mode", "over", "passing", "scan", "tpot_s",
    )  # fmt: skip

    def __init__(self, exchange: Asker, now: float) -> None:
        self.exchange = exchange
        self.client = exchange.client
        self.meter = exchange.meter
        self.scan = _NO_EVENTS
        self.connection: UpstreamConnection | None = None
        self.mode = Mode.HEAD
        self.head: Head | None = None
        self.dispatched_at = self.last_event_at = now
        self.first_at = self.last_at = 0.0
        self.longest_gap_s = 0.0
        self.content_events = 0
        self.tpot_s = exchange.tpot_s
        self.passing = False  # committed: bytes of this attempt reached the client
        self.broke: Failure | None = None  # a failure inside the stream, after commit
        self._framed = exchange.client.framed
        self._raw = exchange.client.raw
        self._withhold = exchange.call.withholds_usage
        self._held: list[bytes] = []
        self._held_framed: list[bytes] | None = []  # the same with its framing, while that is untouched
        self._parked: bytes | None = None  # the event with the finish reason, until usage has come
        self._collected: list[bytes] = []
        self._size = 0
        self._terminal = False
        self._usual = False  # the next event may go on as it came, if it fits the template:
        self._prefix = self._suffix = b""
        self._text_at = 0
        self.over = False

    # -- the response --------------------------------------------------------------------------------------------

    def on_head(self, head: Head) -> None:
        self.head = head
        kind = head.get(b"content-type") or b""
        if head.status == 200 and kind[:17].lower() == b"text/event-stream":
            if self.exchange.endpoint.kind is Kind.GENERATE:
                self.mode = Mode.STREAM
                self.scan = EventScanner(self.exchange.endpoint.api)
                return
            self._pass_on()
            return
        self.mode = Mode.COLLECT

    def on_whole(self, head: Head, body: bytes) -> None:
        self.on_head(head)
        if self.mode is Mode.COLLECT and len(body) <= COLLECT_BYTES:
            self._finish(Result(None, head, body))
            return
        self.on_data(body, None)
        self.on_end()

    def on_chunk(self, framed: bytes, start: int) -> None:
        """The usual read: one event as one chunk. Where it fits the template it goes on as it came."""
        if (
            self._usual
            and framed.startswith(self._prefix, start)
            and framed.endswith(self._suffix)
            and framed[start + self._text_at] != 0x22
            and framed.find(b"\n\n", start) == len(framed) - 4
        ):
            self._raw(framed)
            now = monotonic()
            gap = now - self.last_at
            self.last_at = now
            self.content_events += 1
            if gap > self.longest_gap_s:
                self.longest_gap_s = gap
            meter = self.meter
            if meter.prefilling:
                meter.busy_gaps += 1
                meter.busy_sum_s += gap
            else:
                meter.idle_gaps += 1
                meter.idle_sum_s += gap
            return
        self.on_data(framed[start:-2], framed)

    def on_chunks(self, framed: bytes) -> bool:
        """A read of several events, each of them as the template has it: together they go on as they came."""
        events = self._count_usual(framed) if self._usual else 0
        if not events:
            return False
        self._raw(framed)
        self._gap(monotonic())
        self.content_events += events  # those after the first came at once: gaps of zero
        if self.meter.prefilling:
            self.meter.busy_gaps += events - 1
        else:
            self.meter.idle_gaps += events - 1
        return True

    def _count_usual(self, framed: bytes) -> int:
        """How many events of the template, a chunk each, the read is made of; 0 where there is anything else in it."""
        prefix, text_at, suffix = self._prefix, self._text_at, self._suffix
        at, count, size = 0, 0, len(framed)
        while at < size:
            end = framed.find(b"\n\n", at) + 4  # of the chunk, with its CRLF
            if end < 4 or end - at >= FRAMES_BYTES:
                return 0
            line = FRAMES[end - at]
            start = at + len(line)
            usual = framed.startswith(line, at) and framed.startswith(prefix, start)
            if not usual or not framed.endswith(suffix, start, end) or framed[start + text_at] == 0x22:
                return 0
            count += 1
            at = end
        return count

    def on_data(self, payload: bytes, framed: bytes | None) -> None:
        now = monotonic()
        if self.mode is Mode.STREAM:
            self._events(payload, framed, now)
        elif self.mode is Mode.PASS:
            self.last_event_at = now
            self._long.add(payload)
            self.client.write(payload)
            self._brake()
        else:
            self.last_event_at = now
            self._collected.append(payload)
            self._size += len(payload)
            if self._size > COLLECT_BYTES:
                self._pass_on()

    def on_end(self) -> None:
        if self.over:
            return
        if self.mode is Mode.STREAM:
            self._stream_ended(retry.EARLY_END)
        elif self.mode is Mode.PASS:
            self.scan.usage, self.scan.first_id = self._long.usage(), self._long.response_id
            self.client.end()
            self._finish(Result())
        else:
            self._finish(Result(head=self.head, body=b"".join(self._collected)))

    def on_break(self, kind: Break, stale: bool) -> None:
        if self.over:
            return
        if self.mode is Mode.STREAM:
            self._stream_ended(retry.BREAKS[kind])
        elif self.mode is Mode.PASS:
            self.client.break_off()
            self._finish(Result(retry.BREAKS[kind]))
        else:
            self._finish(Result(retry.BREAKS[kind], stale=stale))

    # -- from outside --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The client left or the core took the attempt back: full close, no result."""
        self.over = True
        self.meter.live.discard(self)
        if self.connection is not None:
            self.connection.abort()

    def fail(self, failure: Failure) -> None:
        """A timeout or the deadline: the attempt is given up."""
        if self.over:
            return
        if self.connection is not None:
            self.connection.abort()
        if self.mode is Mode.STREAM:
            self._stream_ended(failure)
        elif self.mode is Mode.PASS:
            self.client.break_off()
            self._finish(Result(failure))
        else:
            self._finish(Result(failure))

    @property
    def last_sign_at(self) -> float:
        """When the replica last showed life: an event that is no comment, or bytes of an answer."""
        return max(self.last_at, self.last_event_at)

    @property
    def _forced(self) -> bool:
        """The replica adds usage to every stream by itself, so the client would have got it without us."""
        return self.scan.forced_usage and not self.exchange.call.wants_running_usage

    # -- streams -------------------------------------------------------------------------------------------------

    def _events(self, payload: bytes, framed: bytes | None, now: float) -> None:
        scan = self.scan
        self._usual = False
        altered = bool(scan.carry) or self._parked is not None
        out: list[bytes] = []
        commit = False
        try:
            events = scan.split(payload)
        except ValueError:
            self.fail(retry.BREAKS[Break.MALFORMED])
            return
        for event, kind in events:
            if kind != COMMENT:  # a comment is no sign of life
                self.last_event_at = now
            if kind & ERROR and self._broken_by_error(event):
                return
            if kind & ABORT and self._broken_by_abort():
                return
            if kind & CONTENT:
                self._content(now)
                commit = True
            if kind & USAGE and self._withhold and not self._forced:
                if self._parked is not None:
                    out.append(_with_fingerprint(self._parked, event))
                    self._parked = None
                altered = True
                continue
            if self._parked is not None:
                out.append(self._parked)
                self._parked = None
            if kind & TERMINAL:
                commit = self._terminal = True
                if self.broke is not None:
                    altered = True
                    continue
            if kind & FINISH and self._withhold and not self.broke:
                self._parked = event
                altered = True
                continue
            out.append(event)
        if scan.carry:
            altered = True
        if not self.passing:
            self._held += out
            if altered or framed is None:
                self._held_framed = None
            elif self._held_framed is not None:
                self._held_framed.append(framed)
            if not commit or not self._held:
                return
            out, self._held = self._held, []
            altered = self._held_framed is None
            framed = None if self._held_framed is None else b"".join(self._held_framed)
            self._commit(now)
        if not altered and framed is not None and self._framed:
            self.client.write_framed(framed)
        elif out:
            self.client.write(b"".join(out))
        self._expect()
        self._brake()

    def _expect(self) -> None:
        """Takes the template for the next reads, where they may go on untouched."""
        scan = self.scan
        self._usual = self.passing and self._framed and not scan.carry and self._parked is None and not self.over
        if self._usual:
            self._prefix, self._text_at, self._suffix = scan.prefix, scan.at, scan.suffix + b"\r\n"

    def _content(self, now: float) -> None:
        self.content_events += 1
        if self.content_events == 1:
            self.first_at = self.last_at = now
            self.meter.live.add(self)
            self.exchange.on_first_content(now)
            return
        self._gap(now)

    def _gap(self, now: float) -> None:
        gap = now - self.last_at
        self.last_at = now
        if gap > self.longest_gap_s:
            self.longest_gap_s = gap
        meter = self.meter
        if meter.prefilling:
            meter.busy_gaps += 1
            meter.busy_sum_s += gap
        else:
            meter.idle_gaps += 1
            meter.idle_sum_s += gap

    def _commit(self, now: float) -> None:
        self.passing = True
        assert self.head is not None
        self.exchange.commit(self.head, None, now)

    def _broken_by_error(self, event: bytes) -> bool:
        """An error event. True where the attempt is over because nothing was committed yet."""
        assert self.scan.error is not None
        status, failure = retry.of_error_event(self.scan.error)
        if self.passing:
            self.broke = failure
            return False
        self._give_up(Result(failure, body=data_of(event) or b"", status=status))
        return True

    def _broken_by_abort(self) -> bool:
        if self.passing:
            self.broke = retry.ABORT
            return False
        self._give_up(Result(retry.ABORT))
        return True

    def _give_up(self, result: Result) -> None:
        if self.connection is not None:
            self.connection.abort()
        self._finish(result)

    def _stream_ended(self, otherwise: Failure) -> None:
        """The body is over; without a terminal event that is the failure `otherwise`."""
        failure = self.broke or (None if self._terminal else otherwise)
        if failure is None:
            if self._parked is not None:
                self.client.write(self._parked)
            self.client.end()
            self._finish(Result())
            return
        if self.passing:
            rest = self._parked or b""
            if self.scan.error is None:
                rest += self.exchange.error_event(failure, self.scan.events + self.content_events)
            if rest:
                self.client.write(rest)
            self.client.end()
        self._finish(Result(failure))

    # -- answers -------------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """From here on bytes go to the client as they come."""
        self.mode = Mode.PASS
        head = self.head
        assert head is not None
        self.exchange.commit(head, head.length, monotonic())
        begun = b"".join(self._collected)
        self._collected.clear()
        self._long = answer.Long(self.exchange.endpoint.api, begun)
        if begun:
            self.client.write(begun)
        self._brake()

    def _brake(self) -> None:
        if self.client.paused and self.connection is not None:
            self.connection.pause_reading()

    def _finish(self, result: Result) -> None:
        self.over = True
        self.meter.live.discard(self)
        self.exchange.on_result(result)


def _with_fingerprint(event: bytes, usage_event: bytes) -> bytes:
    """The finish event as the replica writes it when nobody asks for usage: vLLM puts its fingerprint on the last."""
    at = usage_event.rfind(_FINGERPRINT)
    if at < 0 or _FINGERPRINT in event:
        return event
    field = usage_event[at : usage_event.rfind(b"}")]
    close = event.rfind(b"}")
    return event[:close] + field + event[close:]
