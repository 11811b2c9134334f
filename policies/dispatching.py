"""Sending one request: ask the policy, charge the ledgers, and later give everything back in one place.

The charge is made with the decision, before any I/O, so that the next decision already sees it. Trade-off: a request
whose connect then fails was counted as load for that long, which is what keeps a dead replica from attracting more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from policies.affinity import Affinity
from policies.fleet_state import Fleet, Pool, Replica
from policies.ledger import Charge
from policies.model import Alternative, Choice, Completed, Dispatch, Dispatched, FirstToken, Outcome, Prediction, Usage
from policies.policy import RoutingPolicy, listens
from policies.predictor import Errors, Margins, OutputPrior
from policies.settings import Settings
from policies.sight import Sight
from policies.tracked import Tracked

ALONE: Final = 1.1  # times what a request takes alone: up to that it did not queue
_SCORE = itemgetter(1)


class Dispatcher:
    """Owns what is learnt from dispatches: fits, margins, output lengths, prediction errors."""

    def __init__(self, policy: RoutingPolicy, settings: Settings) -> None:
        self.settings = settings
        self.use(policy)
        self.fleet = Fleet(settings)
        self.affinity = Affinity(settings.prior_bytes_per_token)
        self.sight = Sight(self.affinity, settings)
        self.outputs = OutputPrior()
        self.margins = Margins(settings.target_attainment)
        self.errors = Errors()

    def use(self, policy: RoutingPolicy) -> None:
        """This policy from the next decision on."""
        self.policy = policy
        self.blind: bool = getattr(policy, "blind", False)
        self.listens = listens(policy)  # to events of requests with an adapter, at least
        self.listens_to_all = self.listens and not getattr(policy, "adapters_only", False)
        self.by_count = self.blind and not self.settings.holds  # the fast lane

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        self.sight.holds = settings.holds
        self.by_count = self.blind and not settings.holds

    def send_by_count(self, tracked: Tracked, pool: Pool, now: float) -> Dispatch | None:
        """The fast lane of blind policies: the whole prompt is charged, nothing is predicted."""
        request = tracked.request
        self.sight.show(pool, tracked)
        choice = self.policy.choose(request, pool.view, now)
        if choice.replica_id is None:
            return None
        replica = self.fleet.replicas[choice.replica_id]
        tokens = float(request.prompt_tokens)
        service = tokens / replica.prefill.rate
        clocked = request.streams and request.generates
        output = float(request.expected_tokens) if request.generates else 0.0
        charge = Charge(tokens, service, tokens + output, now, 0.0, clocked, now + service, output, looked=False)
        replica.ledger.charge(request.id, charge)
        self._sent(tracked, replica, charge, now)
        return Dispatch(request.id, replica.id, choice.reason)

    def choose(self, tracked: Tracked, pool: Pool, now: float) -> Choice:
        """Refreshes the views and asks the policy; the views stay valid until the next look."""
        self.sight.look(pool, tracked, now)
        return self.policy.choose(tracked.request, pool.view, now)

    def dispatch(self, tracked: Tracked, pool: Pool, choice: Choice, now: float) -> Dispatch:
        """Charges `choice`, whose replica id must be set, from the views of the look just made."""
        request = tracked.request
        assert choice.replica_id is not None
        replica = self.fleet.replicas[choice.replica_id]
        view, pace = replica.view, replica.pace
        uncached, cached = view.uncached_tokens, view.cached_tokens
        ttft, service = replica.engine_ttft_s, replica.service_s
        output = self.outputs.expected(request.service_class, request.max_tokens, request.expected_tokens)
        alternatives = self._alternatives(pool, replica, choice) if len(pool.open) > 1 else ()
        answer = output if request.generates else 0.0
        charge = Charge(
            uncached,
            service,
            request.prompt_tokens + answer,
            now,
            uncached * (cached + 0.5 * uncached),
            request.streams and request.generates,
            now + ttft,
            answer,
            elsewhere_s=replica.peers_s(now),
        )
        replica.ledger.charge(request.id, charge)
        replica.kv.charge(uncached + output)
        if request.streams:
            pace.enter(request.tpot_s)
        if (pace.closed or pace.fixed) and not replica.streams(now):
            pace.clear(now)
        pace.spend(service, now)
        assert self.sight.last is not None
        self.affinity.dispatched(request, replica.id, self.sight.last, choice.reason, service, now)
        tracked.predicted_ttft_s, tracked.service_s = ttft, service
        prediction = Prediction(ttft, view.predicted_tpot_s, int(uncached + 0.5), int(cached + 0.5), view.scraped_age_s)
        self._sent(tracked, replica, charge, now)
        return Dispatch(request.id, replica.id, choice.reason, prediction, alternatives)

    def _sent(self, tracked: Tracked, replica: Replica, charge: Charge, now: float) -> None:
        if self.by_count:
            replica.counted(now)
        else:
            replica.changed(now)
        request = tracked.request
        tracked.replica, tracked.charge, tracked.started = replica, charge, False
        tracked.attempts += 1
        tracked.tried += (replica.id,)
        if tracked.service_class.fill_only:
            replica.fill[request.id] = tracked
        if self.listens_to_all or (self.listens and request.adapter is not None):
            self.policy.observe(Dispatched(request, replica.id), now)

    def first_token(self, tracked: Tracked, now: float) -> None:
        replica, charge = tracked.replica, tracked.charge
        if replica is None or charge is None or tracked.started:
            return
        tracked.started = True
        request = tracked.request
        if replica.fill:
            replica.fill.pop(request.id, None)
        since = replica.ledger.busy_since(charge)
        done = replica.ledger.first_token(request.id, charge, now, replica.peers_s(now))
        # at the very moment of the one before it: both share what that took, or each would look as long as both
        together = now == since and since > charge.dispatched_at
        if done and (now > since or together) and _tell(done):
            self._learn(replica, charge, done, since, now)
        if self.by_count:
            replica.counted(now)
        else:
            replica.changed(now)
        ttft = now - charge.dispatched_at
        if charge.looked and charge.clocked and not charge.stale:
            predicted = tracked.predicted_ttft_s
            self.margins.observe(request.service_class, ttft, predicted if predicted > 1e-3 else 1e-3)
            self.errors.observe(ttft, tracked.predicted_ttft_s)
        if self.listens_to_all or (self.listens and request.adapter is not None):
            self.policy.observe(FirstToken(request, replica.id, ttft, tracked.predicted_ttft_s), now)

    def _learn(self, replica: Replica, charge: Charge, done: list[Charge], since: float, now: float) -> None:
        """One busy period that began at `since`; none that may have begun behind prefill of others. What they sent
        later is prefilled later: without those periods the long ones would be missing, and long prompts be believed
        quicker than they are. What took no longer than it would have taken alone did not queue, however many were out:
        engines batch short prompts, and the network is a pipeline."""
        if any(c.crowded for c in done):
            return
        tokens = context = 0.0
        for c in done:
            tokens += c.uncached_tokens
            context += c.context
        latency = since <= charge.dispatched_at
        if not latency and len(done) == 1:
            alone = replica.prefill.overhead_s + charge.service_s
            if now - charge.dispatched_at <= ALONE * alone:
                since, latency = charge.dispatched_at, True
        self.fleet.learn(replica, tokens, context, now - since, latency)

    def _bounded(self, tracked: Tracked, replica: Replica, charge: Charge, now: float) -> None:
        """An answer that shows no first token came before its prefill was predicted to end: the prefill, and all ahead
        of it, took at most this long. Only such samples of it count, so that they bound the speed from below; without
        them a fleet that serves only whole answers would be held to the prior and refuse what it could serve."""
        since = replica.ledger.busy_since(charge)
        finished = replica.ledger.first_token(tracked.request.id, charge, now)
        if finished and now > since and all(c.looked for c in finished):
            self._learn(replica, charge, finished, since, now)

    def release(self, tracked: Tracked, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """The one place where an attempt gives back what it was charged. A request that is not out gives nothing."""
        replica, charge, request = tracked.replica, tracked.charge, tracked.request
        if replica is None or charge is None:
            return
        done = outcome is Outcome.SUCCESS
        if done and charge.prefilling and not charge.clocked:
            self._bounded(tracked, replica, charge, now)
        replica.ledger.release(request.id, charge, now)
        if self.by_count:
            replica.counted(now)
        else:
            replica.changed(now)
        if done and usage is not None and usage.completion_tokens:
            self.outputs.observe(request.service_class, usage.completion_tokens)
        if replica.fill:
            replica.fill.pop(request.id, None)
        if charge.looked:
            if request.streams:
                replica.pace.leave(request.tpot_s)
            prefilled = (done or tracked.started) and not charge.stale
            self.affinity.ended(request, replica.id, usage if done else None, prefilled, now)
        elif done and usage is not None:
            self.affinity.measured(request, usage)
        tracked.replica = tracked.charge = None
        if self.listens_to_all or (self.listens and request.adapter is not None):
            self.policy.observe(Completed(request, replica.id, outcome, usage, now - charge.dispatched_at), now)

    def _alternatives(self, pool: Pool, chosen: Replica, choice: Choice) -> tuple[Alternative, ...]:
        """The best of those that could have had it; a policy that gives no scores leaves 0 to the first of them."""
        most = self.settings.alternatives
        if most <= 0:
            return ()
        ranked: Sequence[tuple[str, float]] = choice.scores or [(r.id, 0.0) for r in pool.view.available()[: most + 1]]
        if len(ranked) > most + 1:
            ranked = sorted(ranked, key=_SCORE)[: most + 1]
        made = []
        for name, score in ranked:
            if name != chosen.id:
                v = pool.by_id[name].view
                made.append(Alternative(name, score, int(v.cached_tokens + 0.5), v.predicted_ttft_s, v.scraped_age_s))
        return tuple(made[:most])


def _tell(done: list[Charge]) -> bool:
    """Whether these say how long a prefill takes: what was computed is known of each, and when it was over."""
    for charge in done:  # noqa: SIM110 - a generator costs more than the loop: mostly there is one
        if not (charge.clocked and charge.looked):
            return False
    return True
