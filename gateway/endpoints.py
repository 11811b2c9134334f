"""The allow table: which paths of vLLM are proxied, how, and which are never.

Kinds: *generate* streams tokens and is routed by prefix; *pool* computes once over its input (embeddings, score,
audio); *cheap* costs the replica milliseconds (tokenize); *stateful* must go to the replica that holds the state. A
path that is not here is 404: vLLM leaves development, LoRA-loading, scaling and sleep routes open to anyone.
`retry` says whether an attempt may be repeated on another replica before commit (stateful ones hold state: no).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.errors import Api


class Kind(StrEnum):
    GENERATE = "generate"
    POOL = "pool"
    CHEAP = "cheap"
    STATEFUL = "stateful"


@dataclass(slots=True, frozen=True)
class Endpoint:
    """`name` is the bounded label for metrics; `asks_usage`: stream_options.include_usage exists there."""

    name: str
    kind: Kind
    api: Api = Api.OTHER
    methods: tuple[str, ...] = ("POST",)
    retry: bool = True
    asks_usage: bool = False

    @property
    def takes_steps(self) -> bool:
        """Whether an answer takes steps of an engine."""
        return self.kind in (Kind.GENERATE, Kind.POOL)

    @property
    def allow(self) -> str:
        return ", ".join((*self.methods, "OPTIONS"))


def _pool(name: str) -> Endpoint:
    return Endpoint(name, Kind.POOL)


ALLOW: dict[str, Endpoint] = {
    "/v1/chat/completions": Endpoint("chat", Kind.GENERATE, Api.CHAT, asks_usage=True),
    "/v1/completions": Endpoint("completions", Kind.GENERATE, Api.COMPLETIONS, asks_usage=True),
    "/v1/responses": Endpoint("responses", Kind.GENERATE, Api.RESPONSES),
    "/v1/messages": Endpoint("messages", Kind.GENERATE, Api.MESSAGES),
    "/v1/messages/count_tokens": Endpoint("count_tokens", Kind.CHEAP, Api.MESSAGES),
    "/tokenize": Endpoint("tokenize", Kind.CHEAP),
    "/detokenize": Endpoint("detokenize", Kind.CHEAP),
    "/v1/embeddings": _pool("embeddings"),
    "/v2/embed": _pool("embed"),
    "/pooling": _pool("pooling"),
    "/classify": _pool("classify"),
    "/score": _pool("score"),
    "/v1/score": _pool("score"),
    "/rerank": _pool("rerank"),
    "/v1/rerank": _pool("rerank"),
    "/v2/rerank": _pool("rerank"),
    "/v1/audio/transcriptions": _pool("transcriptions"),
    "/v1/audio/translations": _pool("translations"),
}

MODELS_PATH = "/v1/models"  # answered by the gateway itself, merged over the fleet
PREFLIGHT = Endpoint("preflight", Kind.CHEAP, methods=("OPTIONS",))  # CORS is the replica's business
MODELS = Endpoint("models", Kind.CHEAP, methods=("GET", "HEAD"))
RESPONSE = Endpoint("response", Kind.STATEFUL, Api.RESPONSES, ("GET", "HEAD", "DELETE"), retry=False)
RESPONSE_CANCEL = Endpoint("response_cancel", Kind.STATEFUL, Api.RESPONSES, ("POST",), retry=False)

_RESPONSES = "/v1/responses/"
_CANCEL = "/cancel"


def find(path: str) -> Endpoint | None:
    """The endpoint of a path, or None: not proxied."""
    known = ALLOW.get(path)
    if known is not None:
        return known
    if path == MODELS_PATH:
        return MODELS
    if path.startswith(_RESPONSES):
        rest = path[len(_RESPONSES) :]
        if rest.endswith(_CANCEL) and response_id(path):
            return RESPONSE_CANCEL
        if rest and "/" not in rest:
            return RESPONSE
    return None


def response_id(path: str) -> str:
    """The id in `/v1/responses/{id}` and `/v1/responses/{id}/cancel`; empty where there is none."""
    rest = path[len(_RESPONSES) :].removesuffix(_CANCEL)
    return "" if "/" in rest else rest
