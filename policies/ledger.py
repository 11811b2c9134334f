"""What this gateway has on one replica: prefill backlog, open requests, live decodes, KV tokens.

Charged when the decision is made, before any I/O, and released in one place (`release`), so a fast error
or a slow connect never looks like an idle replica. vLLM prefills first come, first served, hence the
first-token clock: a first token proves that everything dispatched before it on that replica is
prefilled. Between first tokens only the head drains: W(t) = behind + head x (1 - elapsed / its seconds), so
a stuck replica keeps its backlog; and it drains after what other gateways had there before it, or two ledgers of one
engine would drain twice as fast as it works. Requests that show no first token (not streamed, or nothing to
generate) give their prefill back at the predicted instant. A charge belongs to its request and has no
age limit: a lease that expired by age would make a slow replica look empty.
Trade-off: engines that reorder (priorities, preemption) are seen through FCFS glasses.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr


@mypyc_attr(acyclic=True)
class Charge:
    """One open dispatch. `prefilling` turns false at its first token or at the predicted instant."""

    __slots__ = (
        "answer_tokens", "clocked", "context", "crowded", "decoding", "dispatched_at", "elsewhere_s", "kv_tokens",
        "looked", "prefilling", "release_at", "service_s", "stale", "uncached_tokens",
    )  # fmt: skip

    def __init__(
        self,
        uncached_tokens: float,
        service_s: float,
        kv_tokens: float,
        dispatched_at: float,
        context: float = 0.0,
        clocked: bool = True,
        release_at: float = 0.0,
        answer_tokens: float = 0.0,
        looked: bool = True,
        elsewhere_s: float = 0.0,
    ) -> None:
        self.uncached_tokens = uncached_tokens
        self.service_s = service_s  # predicted prefill seconds of this request alone
        self.kv_tokens = kv_tokens
        self.dispatched_at = dispatched_at
        self.context = context  # u (h + u/2), for the fit
        self.clocked = clocked  # streams and generates: its first token can be seen
        self.release_at = release_at  # predicted end of prefill, used when it is not clocked
        self.answer_tokens = answer_tokens  # expected; part of kv_tokens
        self.elsewhere_s = elsewhere_s  # prefill seconds of other gateways that were ahead of it
        self.crowded = elsewhere_s > 0.0  # or may have been: its first token says nothing about its prefill
        self.looked = looked  # what of it was cached was asked; otherwise it teaches nothing about rates
        self.prefilling = True
        self.decoding = False
        self.stale = False  # the replica restarted since: only in_flight is still owed


class WorkLedger:
    """Account of one replica. Every operation is O(1) amortised."""

    __slots__ = (
        "_head_since",
        "_open",
        "_queued",
        "_queued_s",
        "_unclocked",
        "in_flight",
        "kv_tokens",
        "live_decodes",
        "pending",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.live_decodes = 0
        self.kv_tokens = 0.0
        self._open: dict[str, Charge] = {}  # given back by nobody yet
        self.pending: dict[str, Charge] = {}  # not yet prefilled, in order of dispatch
        self._queued = 0.0  # sum of their uncached tokens
        self._queued_s = 0.0  # and of their predicted seconds
        self._unclocked = 0  # how many of them show no first token
        self._head_since = 0.0  # when the head of the queue began to drain

    def charge(self, request_id: str, charge: Charge) -> None:
        if not self.pending:
            self._head_since = charge.dispatched_at + charge.elsewhere_s
        self._open[request_id] = self.pending[request_id] = charge
        self._queued += charge.uncached_tokens
        self._queued_s += charge.service_s
        if not charge.clocked:
            self._unclocked += 1
        self.in_flight += 1
        self.kv_tokens += charge.kv_tokens

    def backlog(self, now: float) -> float:
        """W: uncached tokens dispatched and, as far as the clock shows, not yet prefilled. Never negative."""
        if self._unclocked:
            self._settle(now)
        for head in self.pending.values():
            done = (now - self._head_since) / head.service_s if head.service_s > 0.0 else 1.0
            return max(0.0, self._queued - head.uncached_tokens * min(1.0, max(0.0, done)))
        return 0.0

    def backlog_s(self, now: float) -> float:
        """The same in predicted prefill seconds."""
        if self._unclocked:
            self._settle(now)
        for head in self.pending.values():
            return max(0.0, self._queued_s - min(head.service_s, max(0.0, now - self._head_since)))
        return 0.0

    def both(self, now: float) -> tuple[float, float]:
        """`backlog` and `backlog_s` at once: asked of every replica for every decision."""
        if self._unclocked:
            self._settle(now)
        for head in self.pending.values():
            elapsed = now - self._head_since
            if elapsed >= head.service_s:
                return self._queued - head.uncached_tokens, self._queued_s - head.service_s
            if elapsed <= 0.0:
                return self._queued, self._queued_s
            return self._queued - head.uncached_tokens * elapsed / head.service_s, self._queued_s - elapsed
        return 0.0, 0.0

    def crowd(self, since: float) -> None:
        """Others sent prefill at about the time of what was dispatched since then."""
        for charge in reversed(self.pending.values()):
            if charge.dispatched_at < since:
                break
            charge.crowded = True

    @property
    def prefilling(self) -> bool:
        return bool(self.pending)

    @property
    def queued(self) -> int:
        """Requests dispatched and not known to be prefilled."""
        return len(self.pending)

    def head_age(self, now: float) -> float:
        """Seconds since the request at the head began to prefill; 0 when there is none."""
        return max(0.0, now - self._head_since) if self.pending else 0.0

    def busy_since(self, charge: Charge) -> float:
        """Start of the busy period sample that ends with this charge's first token; ask before `first_token`."""
        dispatched_at, head_since = charge.dispatched_at, self._head_since
        return dispatched_at if dispatched_at >= head_since else head_since

    def first_token(self, request_id: str, charge: Charge, now: float, elsewhere_s: float = 0.0) -> list[Charge]:
        """Clock tick: everything up to this request is prefilled. Returns those charges, this one last.

        elsewhere_s: prefill seconds that other gateways have there now."""
        if charge.stale:
            return []
        done: list[Charge] = []
        if charge.prefilling:
            for earlier in list(self.pending):
                done.append(self._unqueue(earlier))
                if earlier == request_id:
                    break
            self._head_since = now
            for head in self.pending.values():
                self._head_since += min(head.elsewhere_s, elsewhere_s)
                break
        if not charge.decoding:
            charge.decoding = True
            self.live_decodes += 1
        return done

    def begun(self, request_id: str, charge: Charge) -> None:
        """It had its first token before it was charged here: that says nothing about what others wait for."""
        self._unqueue(request_id)
        charge.decoding = True
        self.live_decodes += 1

    def release(self, request_id: str, charge: Charge, now: float) -> None:
        """The only way out: gives back whatever of the charge is still held."""
        self.in_flight -= 1
        if charge.stale:
            if not self.in_flight:
                self.kv_tokens = 0.0
            return
        del self._open[request_id]
        if charge.prefilling:
            was_head = next(iter(self.pending)) == request_id
            self._unqueue(request_id)
            if was_head and now > self._head_since:
                self._head_since = now
        if charge.decoding:
            charge.decoding = False
            self.live_decodes -= 1
        left = self.kv_tokens - charge.kv_tokens if self.in_flight else 0.0
        self.kv_tokens = left if left > 0.0 else 0.0

    @property
    def answer_tokens(self) -> float:
        """Expected answers of everything open here, in full. O(open here)."""
        return sum([c.answer_tokens for c in self._open.values()], 0.0)

    def restart(self) -> None:
        """The replica lost all it had; what is open stays in flight until it is released."""
        for charge in self._open.values():
            charge.stale = True
            charge.prefilling = charge.decoding = False
        self._open.clear()
        self.pending.clear()
        self._queued = self._queued_s = self.kv_tokens = 0.0
        self._unclocked = self.live_decodes = 0

    def next_settle(self) -> float | None:
        """When the next prefill that shows no first token is predicted to end."""
        if not self._unclocked:
            return None
        return min(c.release_at for c in self.pending.values() if not c.clocked)

    def _settle(self, now: float) -> None:
        due = [i for i, c in self.pending.items() if not c.clocked and c.release_at <= now]
        for request_id in due:
            charge = self._unqueue(request_id)
            self._head_since = max(self._head_since, charge.release_at)

    def _unqueue(self, request_id: str) -> Charge:
        charge = self.pending.pop(request_id)
        charge.prefilling = False
        if not charge.clocked:
            self._unclocked -= 1
        if self.pending:
            self._queued -= charge.uncached_tokens
            self._queued_s -= charge.service_s
        else:  # exactly zero: sums of floats drift
            self._queued = self._queued_s = 0.0
        return charge
