"""Sending one request: ask the policy, charge the ledgers, and later give everything back in one place.

The charge is made with the decision, before any I/O, so that the next decision already sees it. Trade-off: a request
whose connect then fails was counted as load for that long, which is what keeps a dead replica from attracting more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from policies.affinity import Affinity
from policies.fleet_state import Fleet, Pool, Replica
from policies.ledger import Charge
from policies.model import Alternative, Choice, Completed, Dispatch, Dispatched, FirstToken, Outcome, Prediction, Usage
from policies.policy import RoutingPolicy, listens
from policies.predictor import Errors, Margins, OutputPrior
from policies.settings import Settings
from policies.sight import Sight
from policies.tracked import Tracked

ALONE = 1.1  # times what a request takes alone: up to that it did not queue
_SCORE = itemgetter(1)


class Dispatcher:
    """Owns what is learnt from dispatches: fits, margins, output lengths, prediction errors."""

    def __init__(self, policy: RoutingPolicy, settings: Settings) -> None:
        self.use(policy)
        self.settings = settings
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
        self.listens = listens(policy)

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
        charge = Charge(
            tokens, service, tokens + output, now, 0.0, clocked, now + service, answer_tokens=output, looked=False
        )
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
        view, ledger = replica.view, replica.ledger
        uncached, ttft, service = view.uncached_tokens, replica.engine_ttft_s, replica.service_s
        output = self.outputs.expected(request.service_class, request.max_tokens, request.expected_tokens)
        prediction = Prediction(
            ttft, view.predicted_tpot_s, int(uncached + 0.5), int(view.cached_tokens + 0.5), view.scraped_age_s
        )
        alternatives = self._alternatives(pool, replica, choice) if len(pool.open) > 1 else ()
        charge = Charge(
            uncached,
            service,
            request.prompt_tokens + (output if request.generates else 0.0),
            now,
            uncached * (view.cached_tokens + 0.5 * uncached),
            request.streams and request.generates,
            now + ttft,
            answer_tokens=output if request.generates else 0.0,
        )
        ledger.charge(request.id, charge)
        replica.kv.charge(uncached + output)
        if request.streams:
            replica.pace.enter(request.tpot_s)
        if not replica.streams(now):
            replica.pace.clear(now)
        replica.pace.spend(service, now)
        assert self.sight.last is not None
        self.affinity.dispatched(request, replica.id, self.sight.last, choice.reason, service, now)
        tracked.predicted_ttft_s, tracked.cached_tokens, tracked.service_s = ttft, view.cached_tokens, service
        self._sent(tracked, replica, charge, now)
        return Dispatch(request.id, replica.id, choice.reason, prediction, alternatives)

    def _sent(self, tracked: Tracked, replica: Replica, charge: Charge, now: float) -> None:
        replica.changed(now)
        tracked.replica, tracked.charge, tracked.started = replica, charge, False
        tracked.attempts += 1
        if tracked.service_class.fill_only:
            replica.fill[tracked.request.id] = tracked
        tracked.tried = (*tracked.tried, replica.id)
        if self.listens:
            self.policy.observe(Dispatched(tracked.request, replica.id), now)

    def first_token(self, tracked: Tracked, now: float) -> None:
        replica, charge = tracked.replica, tracked.charge
        if replica is None or charge is None or tracked.started:
            return
        tracked.started = True
        request = tracked.request
        if replica.fill:
            replica.fill.pop(request.id, None)
        since = replica.ledger.busy_since(charge)
        done = replica.ledger.first_token(request.id, charge, now)
        if done and now > since and all(c.clocked and c.looked for c in done):
            self._learn(replica, charge, done, since, now)
        replica.changed(now)
        ttft = now - charge.dispatched_at
        if charge.looked and charge.clocked and not charge.stale:
            self.margins.observe(request.service_class, ttft, max(tracked.predicted_ttft_s, 1e-3))
            self.errors.observe(ttft, tracked.predicted_ttft_s)
        if self.listens:
            self.policy.observe(FirstToken(request, replica.id, ttft, tracked.predicted_ttft_s), now)

    def _learn(self, replica: Replica, charge: Charge, done: list[Charge], since: float, now: float) -> None:
        """One busy period that began at `since`. What took no longer than it would have taken alone did not queue,
        however many were out: engines batch short prompts, and the network is a pipeline."""
        tokens, context = sum([c.uncached_tokens for c in done], 0.0), sum([c.context for c in done], 0.0)
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
        replica.changed(now)
        if done and usage is not None and usage.completion_tokens:
            self.outputs.observe(request.service_class, usage.completion_tokens)
        if replica.fill:
            replica.fill.pop(request.id, None)
        if charge.looked:
            if request.streams:
                replica.pace.leave(request.tpot_s)
            prefilled = (done or tracked.started) and not charge.stale
            self.affinity.ended(request, replica.id, usage if done else None, prefilled)
        elif done and usage is not None:
            self.affinity.measured(request, usage)
        tracked.replica = tracked.charge = None
        if self.listens:
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
                cached = int(v.cached_tokens + 0.5)
                made.append(Alternative(name, score, cached, v.predicted_ttft_s, v.scraped_age_s))
        return tuple(made[:most])
