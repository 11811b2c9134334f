"""The names by which policies are chosen, what each is in one line, and how it is made from settings.

Adding a policy is one file, one line in `_TABLE` and one test with hand-worked expectations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from policies.blind import RoundRobin, Uniform
from policies.cache_aware import (
    CacheAware,
    CacheAwareLibrary,
    CacheAwareLibraryParameters,
    CacheAwareParameters,
    RayPrefix,
    RayPrefixParameters,
)
from policies.chwbl import Chwbl, ChwblParameters, ChwblWork, ChwblWorkParameters, PrefixHash256, PrefixHashParameters
from policies.counts import LeastRequest, PowerOfTwo
from policies.dynamo import DynamoCost, DynamoParameters
from policies.forebay import Forebay, ForebayParameters
from policies.hashing import Rendezvous, SessionHash
from policies.latency import PeakEwma, PeakEwmaParameters
from policies.llm_d import (
    StickyParameters,
    StickyUntilSaturated,
    Weighted,
    Weighted111,
    Weighted111Parameters,
    WeightedParameters,
)
from policies.parameters import NoParameters, read
from policies.policy import RoutingPolicy
from policies.preble import Preble, PrebleParameters
from policies.prefix_match import (
    AibrixParameters,
    AibrixPrefix,
    LoadAware,
    LoadAwareParameters,
    PrefixTrie,
    PrefixTrieParameters,
)
from policies.single_signal import KvHeadroom, PrefixOnly, VllmDp
from policies.sticky_table import StickyTable, StickyTableParameters
from policies.work import LeastWork, Lmetric, LmetricParameters


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One entry of `POLICIES`: a class built from its parameters (a dataclass) and a source of chance."""

    kind: Callable[[Any, Random], RoutingPolicy]
    parameters: type[Any]
    name: str
    about: str  # one line for --help

    def make(self, settings: Mapping[str, Any] | None, rng: Random) -> RoutingPolicy:
        """A fresh policy; ValueError names a wrong setting, its value and what would be right."""
        return self.kind(read(self.name, self.parameters, settings), rng)


_NONE = NoParameters
_TABLE: tuple[tuple[Any, type[Any], str], ...] = (
    (Forebay, ForebayParameters, "least delay caused, own and others'; prefix homes, active load, KV headroom"),
    (RoundRobin, _NONE, "each available replica in turn; the reference"),
    (Uniform, _NONE, "uniform over the available replicas"),
    (LeastRequest, _NONE, "fewest requests in flight"),
    (PowerOfTwo, _NONE, "fewer in flight of two drawn at random"),
    (PeakEwma, PeakEwmaParameters, "decaying peak of TTFT times requests in flight (Finagle)"),
    (SessionHash, _NONE, "the session's place on a hash ring"),
    (Rendezvous, _NONE, "highest hash of session and replica"),
    (Chwbl, ChwblParameters, "hash of the first 100 characters, bounded load in requests (KubeAI)"),
    (ChwblWork, ChwblWorkParameters, "the same key, bounded load in uncached tokens"),
    (PrefixHash256, PrefixHashParameters, "hash of the first 256 tokens, least loaded within the bound (SMG)"),
    (CacheAware, CacheAwareParameters, "text tree with a gate on imbalance, 0.3 / 64 / 1.5 (SGLang, vllm-router)"),
    (CacheAwareLibrary, CacheAwareLibraryParameters, "the same with the library's parameters, 0.5 / 32 / 1.1"),
    (PrefixTrie, PrefixTrieParameters, "random among the replicas with the deepest match (production-stack)"),
    (Weighted, WeightedParameters, "queue, KV and prefix scores weighted 2:2:3 (llm-d)"),
    (Weighted111, Weighted111Parameters, "the same weighted 1:1:1 (Gateway API inference extension)"),
    (StickyUntilSaturated, StickyParameters, "80 % of the prefix until 18 s behind, then least tokens (llm-d)"),
    (StickyTable, StickyTableParameters, "sessions stay unless overloaded and small (vllm-router branch)"),
    (LoadAware, LoadAwareParameters, "matched share minus relative load (production-stack)"),
    (RayPrefix, RayPrefixParameters, "longest match in a text tree, fewest in flight (Ray Serve LLM)"),
    (AibrixPrefix, AibrixParameters, "best match within mean plus deviation, gate at 8 (AIBrix)"),
    (DynamoCost, DynamoParameters, "prefill blocks less overlap plus decode blocks (NVIDIA Dynamo)"),
    (Lmetric, LmetricParameters, "uncached tokens ahead times batch size"),
    (LeastWork, _NONE, "fewest uncached tokens ahead"),
    (Preble, PrebleParameters, "exploit a long match, else explore by windowed cost"),
    (VllmDp, _NONE, "4 x waiting + running, the balancer inside vLLM"),
    (KvHeadroom, _NONE, "most free KV tokens"),
    (PrefixOnly, _NONE, "most cached tokens whatever the load; the negative control"),
)  # fmt: skip

POLICIES: dict[str, PolicySpec] = {
    kind.name: PolicySpec(kind, parameters, kind.name, about) for kind, parameters, about in _TABLE
}


def make(name: str, settings: Mapping[str, Any] | None = None, rng: Random | None = None) -> RoutingPolicy:
    """Build the policy `name` with its own settings and source of chance (seed 0 if none is given)."""
    spec = POLICIES.get(name)
    if spec is None:
        raise ValueError(f"policy {name!r} is unknown; known: {', '.join(sorted(POLICIES))}")
    return spec.make(settings, rng if rng is not None else Random(0))
