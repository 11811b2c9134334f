"""Which conversations may begin: only as many as the fleet's caches can keep.

When the prefixes of the conversations that are alive exceed the KV capacity, least-recently-used eviction turns every
turn into a cold prefill, and goodput falls for all of them. So a new conversation is let in only while the
expected working set, the sum of context x probability that the next turn comes, fits into a share of the capacity;
conversations that are in stay in. How long one is alive (think times) and how likely it returns (by turn) are learnt,
and the share too: it shrinks when later turns report fewer cached tokens than their last prompt had, and grows slowly.
Where most conversations do not return there is nothing to protect, and nobody is kept out.
Conversations are told apart by session, else by a prompt that extends an earlier one.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from policies.model import Request, Usage

MOST: Final = 100_000  # conversations remembered
WORTH: Final = 0.6  # return probability from which keeping them is worth refusing others
EVIDENCE: Final = 30  # conversations seen to return or to end before that is believed
PATIENCE: Final = 1.5  # a conversation is given up after this many times the 90 % think time
LOST: Final = 0.9  # share of the last prompt that should still be cached
SHRINK: Final = 0.995
GROW: Final = 0.0005
LEAST_SHARE: Final = 0.3
MOST_SHARE: Final = 1.0
NOBODY: Final = -1


@mypyc_attr(acyclic=True)
class Conversation:
    """One link of the chain from the longest unseen to the last seen: an OrderedDict of as many stops everything for
    milliseconds whenever it grows. Its neighbours are numbers, so there is nothing for the garbage collector to follow,
    which would stop everything too."""

    __slots__ = ("at", "key", "newer", "older", "open", "seen_at", "tokens", "turns", "weight")

    def __init__(self, key: str | int, at: int) -> None:
        self.key = key
        self.at = at  # its place among all of them
        self.older = NOBODY
        self.newer = NOBODY
        self.tokens = 0.0  # context after its last turn
        self.turns = 0
        self.open = 0  # turns in progress
        self.seen_at = 0.0  # end of the last turn, or its start while one is open
        self.weight = 0.0  # what it contributes to the working set


class WorkingSet:
    """All conversations of one gateway. Amortised O(1) per turn, O(chain) to recognise one without a session."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.tokens = 0.0  # expected working set
        self.think_s = 15.0  # 90 % quantile of think time, learnt
        self._alive: dict[str | int, Conversation] = {}
        self._places: list[Conversation] = []
        self._free: list[int] = []  # places whose conversation is forgotten
        self._oldest = NOBODY  # longest unseen
        self._newest = NOBODY
        self._tails: dict[int, str | int] = {}
        self._returned = [1.0, 1.0, 1.0]  # by turns so far: 1, 2, more
        self._ended = [1.0, 1.0, 1.0]
        self._evidence = 0

    @property
    def enforced(self) -> bool:
        """Whether conversations return often enough here to be protected."""
        if self._evidence < EVIDENCE:
            return False
        first, second, more = self._returned
        returned = first + second + more
        first, second, more = self._ended
        return returned / (returned + first + second + more) >= WORTH

    def known(self, request: Request) -> Conversation | None:
        """The conversation this request continues, if it is alive."""
        return self._alive.get(self._key(request))

    def alive(self, request: Request) -> bool:
        """Whether its conversation is, as far as is known here or from what other gateways saw of its prompt."""
        if self.known(request) is not None:
            return True
        elsewhere = max(request.shared_depth.values(), default=0) if request.shared_depth else 0
        return 2 * elsewhere >= max(1, len(request.chain))

    def headroom(self, capacity_tokens: float) -> float:
        """Tokens of context a new conversation may bring now. Unknown capacity (0) keeps nobody out."""
        if capacity_tokens <= 0.0 or not self._alive or not self.enforced:
            return float("inf")
        return self.share * capacity_tokens - self.tokens

    def began(self, request: Request, now: float) -> float:
        """A turn was dispatched. Answers the context its conversation had before, in tokens."""
        key = self._key(request)
        conversation = self._alive.get(key)
        if conversation is None:
            if len(self._alive) >= MOST:
                self._forget(self._places[self._oldest])
            conversation = self._alive[key] = self._placed(key)
            self._link(conversation)
        else:
            self._just_seen(conversation)
            if conversation.open == 0:
                gap = now - conversation.seen_at
                # quantile by stochastic approximation: up 9 parts for each late one, down 1 part for each early one
                self.think_s = min(600.0, max(2.0, self.think_s * (1.045 if gap > self.think_s else 0.995)))
                self._returned[min(conversation.turns, 3) - 1] += 1.0
                self._evidence += 1
        before = conversation.tokens
        conversation.open += 1
        conversation.turns += 1
        if request.prompt_tokens > before:
            conversation.tokens = float(request.prompt_tokens)
        conversation.seen_at = now
        self._weigh(conversation)
        return before

    def ended(self, request: Request, usage: Usage | None, now: float) -> None:
        """A turn is over, whatever its outcome."""
        key = self._key(request)
        conversation = self._alive.get(key)
        if conversation is None:
            return
        conversation.open = max(0, conversation.open - 1)
        conversation.seen_at = now
        self._just_seen(conversation)
        if usage is not None:
            prompt = float(usage.prompt_tokens or request.prompt_tokens)
            conversation.tokens = max(conversation.tokens, prompt + (usage.completion_tokens or 0))
        if request.session is None and request.chain:
            self._tails[request.chain[-1]] = key
        self._weigh(conversation)

    def reported(self, last_tokens: float, cached_tokens: int) -> None:
        """A later turn told how much of its last context it found cached."""
        if cached_tokens < LOST * last_tokens:
            self.share = max(LEAST_SHARE, self.share * SHRINK)
        else:
            self.share = min(MOST_SHARE, self.share + GROW)

    def _key(self, request: Request) -> str | int:
        if request.session is not None:
            return request.session
        for chunk in reversed(request.chain):
            key = self._tails.get(chunk)
            if key is not None and key in self._alive:
                return key
        return request.chain[-1] if request.chain else request.id

    def _weigh(self, conversation: Conversation) -> None:
        weight = conversation.tokens
        if not conversation.open:
            at = min(conversation.turns, 3) - 1
            weight *= self._returned[at] / (self._returned[at] + self._ended[at])
        self.tokens += weight - conversation.weight
        conversation.weight = weight

    def expire(self, now: float) -> None:
        """Gives up conversations that are silent for too long."""
        limit = now - PATIENCE * self.think_s
        for _ in range(8):  # a few per call: the sum is an expectation anyway
            if self._oldest == NOBODY:
                return
            oldest = self._places[self._oldest]
            if oldest.seen_at >= limit:
                return
            if oldest.open:
                self._just_seen(oldest)
                continue
            self._ended[min(oldest.turns, 3) - 1] += 1.0
            self._evidence += 1
            self._forget(oldest)

    def _just_seen(self, conversation: Conversation) -> None:
        self._unlink(conversation)
        self._link(conversation)

    def _placed(self, key: str | int) -> Conversation:
        """A new one, in no chain yet."""
        if self._free:
            at = self._free.pop()
            made = self._places[at] = Conversation(key, at)
        else:
            made = Conversation(key, len(self._places))
            self._places.append(made)
        return made

    def _link(self, conversation: Conversation) -> None:
        """As the last seen."""
        last = conversation.older = self._newest
        if last == NOBODY:
            self._oldest = conversation.at
        else:
            self._places[last].newer = conversation.at
        self._newest = conversation.at

    def _unlink(self, conversation: Conversation) -> None:
        older, newer = conversation.older, conversation.newer
        if older == NOBODY:
            self._oldest = newer
        else:
            self._places[older].newer = newer
        if newer == NOBODY:
            self._newest = older
        else:
            self._places[newer].older = older
        conversation.older = conversation.newer = NOBODY

    def _forget(self, conversation: Conversation) -> None:
        del self._alive[conversation.key]
        self._unlink(conversation)
        self._free.append(conversation.at)
        self.tokens = max(0.0, self.tokens - conversation.weight) if self._alive else 0.0
        if len(self._tails) > 4 * MOST:
            self._tails.clear()
