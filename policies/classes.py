"""Service classes a bare install knows, and how a class turns into the deadlines of one request.

TTFT objective = ttft_s + ttft_s_per_token x prompt tokens: nobody expects 64k tokens to be read as fast as 1k.
A request may tighten its objectives and never loosen them, else every client would ask for the best class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from policies.model import Request, ServiceClass

INTERACTIVE = ServiceClass("interactive", ttft_s=2.0, ttft_s_per_token=0.00025, tpot_s=0.1, weight=1.0)
STANDARD = ServiceClass("standard", ttft_s=10.0, ttft_s_per_token=0.0005, tpot_s=0.2, weight=1.0)
BATCH = ServiceClass(
    "batch", ttft_s=None, ttft_s_per_token=0.0, tpot_s=None, e2e_s=3600.0, weight=0.1, floor_share=0.05, fill_only=True
)
DEFAULT_CLASSES: tuple[ServiceClass, ...] = (INTERACTIVE, STANDARD, BATCH)


def by_name(classes: Iterable[ServiceClass] | Mapping[str, ServiceClass]) -> dict[str, ServiceClass]:
    """Classes keyed by name, in the order given. Raises ValueError when two share a name."""
    listed = list(classes.values()) if isinstance(classes, Mapping) else list(classes)
    named = {c.name: c for c in listed}
    if len(named) != len(listed):
        names = [c.name for c in listed]
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"service class {twice!r} is defined twice; class names must be unique")
    return named


def stamp(
    request: Request,
    service_class: ServiceClass,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    e2e_s: float | None = None,
) -> Request:
    """Writes the absolute deadlines and paces of its class into `request` (seconds); the keywords only tighten."""
    ttft = service_class.ttft_s
    if ttft is not None:
        ttft += service_class.ttft_s_per_token * request.prompt_tokens
    ttft, pace, e2e = _least(ttft, ttft_s), _least(service_class.tpot_s, tpot_s), _least(service_class.e2e_s, e2e_s)
    request.service_class = service_class.name
    request.ttft_deadline = None if ttft is None else request.received_at + ttft
    request.tpot_s = pace
    request.itl_s = service_class.itl_s
    request.deadline = None if e2e is None else request.received_at + e2e
    return request


def _least(bound: float | None, asked: float | None) -> float | None:
    if bound is None or asked is None:
        return asked if bound is None else bound
    return min(bound, asked)
