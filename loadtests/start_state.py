"""Every run of a comparison begins in the same state, and a probe shows it.

Replicas that allow it (`/reset_prefix_cache`, development routes) are emptied directly; where one does not, every run
gets a salt of its own (`cache_salt`), so that it can share nothing with the runs before it. Proof: a canary prompt
that is in no schedule is sent to each replica after every run, and again after the reset (or with the new salt):
the second time it must report cached_tokens = 0. Replicas that report no cached_tokens leave the state unproven, which
is kept in the result. Policies of one gateway are switched by its admin API, which also clears its prefix index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtests.prompts import block_text

SETTLE_S = 15.0
CANARY_TOKENS = 600
CANARY_BLOCK = 0x0F0EBA  # no schedule has it: generated ids are hashes of 64 bits, those of traces are dense


class StartStateError(RuntimeError):
    """A gateway or replica that could not be put into the start state; the text says what it answered."""


@dataclass
class StartState:
    """Puts replicas and gateway into the start state. Without replica URLs probes go to the gateway."""

    model: str
    replicas: Sequence[str] = ()
    gateway: str | None = None  # whose policy is switched
    api_key: str | None = None
    admin_token: str | None = None
    resets: bool = field(default=False, init=False)  # every replica could be emptied
    _warmed: bool = field(default=False, init=False)
    _before: dict[str, Any] = field(default_factory=dict, init=False)  # the policy that the gateway ran by itself

    async def look(self, policies: Sequence[str] = ()) -> None:
        """Finds out whether every replica can be reset; asks each once. The gateway is asked whether it knows
        `policies`, since the second would else fail only after the first arm's run. Raises StartStateError."""
        self.resets = bool(self.replicas)
        async with self._client() as client:
            if policies:
                answer = await _call(client, "GET", f"{self.gateway}/admin/policy", headers=self._admin())
                told = self._told(answer)
                self._before = {key: told[key] for key in ("name", "settings") if key in told}
                known = told.get("known") or policies
                for arm in policies:
                    if arm.partition("+")[0] not in known:
                        raise StartStateError(f"--arm {arm}: {self.gateway} knows {', '.join(known)}")
            for url in self.replicas:
                if not await self._reset(client, url):
                    self.resets = False

    def salt_of(self, run: str) -> str | None:
        """The salt that a run must use; None where replicas are emptied instead."""
        return None if self.resets else f"forebay-{run}"

    async def prepare(self, run: str, arm: str | None, target: str) -> dict[str, Any]:
        """Before a run. Gives the proof: {"method", "proven", "cached_tokens"}. Raises StartStateError."""
        async with self._client() as client:
            if self.gateway is not None and arm is not None:
                await self._switch(client, arm)
            if self.resets:
                for url in self.replicas:
                    await self._empty(client, url)
            seen = [await self._canary(client, url, self.salt_of(run)) for url in self.replicas or [target]]
        known = [n for n in seen if n is not None]
        if any(known):
            raise StartStateError(f"{target}: the canary found {max(known)} cached tokens; the start state is not cold")
        return {
            "method": "reset" if self.resets else "salt",
            "proven": self._warmed and len(known) == len(seen),
            "cached_tokens": seen,
        }

    async def warm(self, run: str, target: str) -> None:
        """After a run: leaves the canary in every cache, so that the next probe proves something."""
        async with self._client() as client:
            for url in self.replicas or [target]:
                await self._canary(client, url, self.salt_of(run))
        self._warmed = True

    async def leave(self) -> str | None:
        """The gateway runs its own policy again; the name, where one was switched. Raises StartStateError."""
        if not self._before:
            return None
        async with self._client() as client:
            url = f"{self.gateway}/admin/policy"
            self._told(await _call(client, "PUT", url, json=self._before, headers=self._admin()))
        return str(self._before["name"])

    async def _switch(self, client: httpx.AsyncClient, arm: str) -> None:
        body = {"name": arm, "clear_index": True}
        self._told(await _call(client, "PUT", f"{self.gateway}/admin/policy", json=body, headers=self._admin()))

    def _admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.admin_token}"} if self.admin_token else {}

    def _told(self, answer: httpx.Response) -> dict[str, Any]:
        """What the admin API says. Raises StartStateError where it refuses, or is none."""
        if answer.status_code in (401, 403):
            raise StartStateError(f"{self.gateway}: needs the admin token; put it into FOREBAY_ADMIN_TOKEN")
        try:
            told: dict[str, Any] = dict(answer.json())
            refused = "; ".join(told["errors"]) if answer.status_code != 200 else ""
        except (ValueError, KeyError, TypeError):
            refused = "is that a Forebay gateway?"
        if refused:
            raise StartStateError(f"{self.gateway}: answered {answer.status_code} at /admin/policy: {refused}")
        return told

    async def _empty(self, client: httpx.AsyncClient, url: str) -> None:
        """A cache cannot be reset while blocks are held: the last run's cancelled requests may take a moment."""
        for _ in range(round(SETTLE_S / 0.1)):
            if await self._reset(client, url):
                return
            await asyncio.sleep(0.1)
        raise StartStateError(f"{url}: /reset_prefix_cache failed for {SETTLE_S:g} s; is a request still running?")

    async def _reset(self, client: httpx.AsyncClient, url: str) -> bool:
        answer = await _call(client, "POST", f"{url.rstrip('/')}/reset_prefix_cache")
        if answer.status_code != 200:
            return False
        try:
            return answer.json().get("success") is not False
        except ValueError:  # older servers answer an empty 200
            return True

    async def _canary(self, client: httpx.AsyncClient, url: str, salt: str | None) -> int | None:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": block_text(CANARY_BLOCK, CANARY_TOKENS)}],
            "max_tokens": 1,
        }
        if salt is not None:
            body["cache_salt"] = salt
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        base = url.rstrip("/").removesuffix("/v1")
        answer = await _call(client, "POST", f"{base}/v1/chat/completions", json=body, headers=headers)
        if answer.status_code != 200:
            raise StartStateError(f"{url}: the canary was answered {answer.status_code}: {answer.text[:200]}")
        details = answer.json().get("usage", {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return None if cached is None else int(cached)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=60.0, trust_env=False)


async def _call(client: httpx.AsyncClient, method: str, url: str, **more: Any) -> httpx.Response:
    try:
        return await client.request(method, url, **more)
    except httpx.HTTPError as error:
        raise StartStateError(f"{url}: {type(error).__name__} {error}".strip()) from None
