"""The science: pure routing, admission and pacing. No I/O, no clock, no asyncio; events in, decisions out."""

from policies.registry import POLICIES, PolicySpec, make

__all__ = ["POLICIES", "PolicySpec", "make"]
