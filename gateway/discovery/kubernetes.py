"""Replicas from the EndpointSlices of a Kubernetes cluster: one list, then a watch from there, then again.

List, then watch from the list's resourceVersion; bookmarks move it on; each event carries a whole slice. A watch that
ends is taken up where it was; 410 (the version is too old) or `relist_s` leads to a new list, which also repairs
deletes that the watch missed. While the API server cannot be read nothing changes. The service-account token is read
again for each request, the authority for each list, since both are rotated.
Trade-off: `relist_s` bounds how long a missed delete stays; health keeps such a replica out of rotation before that.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson

from gateway.discovery import slices
from gateway.discovery.report import Report, SourceError
from gateway.discovery.slices import Spoken
from gateway.discovery.tables import KubernetesSource
from gateway.lost_cancel import told_to_end

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
FIRST_PAUSE_S = 0.5
WATCH_S = 60.0  # one watch, so that a connection that died in silence is noticed
GRACE_S = 10.0  # a watch that outlives its own timeout by this much is dead
CONNECT_S = 5.0


class ExpiredError(Exception):
    """410: the version asked for is not kept any more."""


class Kubernetes:
    def __init__(
        self,
        settings: KubernetesSource,
        key_env: str | None = None,
        ca_file: str | None = None,
        environ: Mapping[str, str] = os.environ,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._spoken = Spoken(settings.scheme, settings.port, key_env, ca_file)
        self._environ = environ
        self._rng = rng or random.Random()
        self._clock = clock
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._version = ""

    async def run(self, report: Report) -> None:
        pause_s = 0.0
        while not told_to_end():
            try:
                async with self._client() as http:
                    await self._list(http, report)
                    pause_s = 0.0
                    until = self._clock() + self.settings.relist_s
                    while (left_s := until - self._clock()) > 0:
                        began = self._clock()
                        try:
                            await self._watch(http, report, min(left_s, WATCH_S))
                            brief = self._clock() - began < FIRST_PAUSE_S  # whoever ends it, it must not spin
                            pause_s = self._longer(pause_s) if brief else 0.0
                        except SourceError as e:  # the list is good still: the watch is taken up again
                            report.failed(str(e))
                            pause_s = self._longer(pause_s)
                        await asyncio.sleep(min(pause_s, max(0.0, until - self._clock())))
            except ExpiredError:
                await asyncio.sleep(self._jittered(FIRST_PAUSE_S) if pause_s else 0.0)
                pause_s = self._longer(pause_s)
            except SourceError as e:
                report.failed(str(e))
                pause_s = self._longer(pause_s)
                await asyncio.sleep(self._jittered(pause_s))

    async def _list(self, http: httpx.AsyncClient, report: Report) -> None:
        answer = await self._get(http, {})
        try:
            document = orjson.loads(answer)
            self._slices = {one["metadata"]["name"]: one for one in document.get("items") or []}
            self._version = str(document["metadata"]["resourceVersion"])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise SourceError("the API server answered something else than a list of EndpointSlices") from None
        report.told(slices.members(self._slices.values(), self._spoken))
        report.fine()

    async def _watch(self, http: httpx.AsyncClient, report: Report, left_s: float) -> None:
        """Follows changes for at most `left_s` seconds. Raises ExpiredError, SourceError."""
        async for event in self._events(http, report, left_s):
            kind, one = event.get("type"), event.get("object") or {}
            if kind == "ERROR":
                if one.get("code") == 410:
                    raise ExpiredError
                raise SourceError(f"the API server ended the watch: {one.get('message') or one.get('reason')}")
            metadata = one.get("metadata") or {}
            self._version = str(metadata.get("resourceVersion") or self._version)
            report.fine()  # bookmarks too
            if kind == "BOOKMARK" or "name" not in metadata:
                continue
            if kind == "DELETED":
                self._slices.pop(metadata["name"], None)
            else:
                self._slices[metadata["name"]] = one
            report.told(slices.members(self._slices.values(), self._spoken))

    async def _events(self, http: httpx.AsyncClient, report: Report, left_s: float) -> AsyncIterator[dict[str, Any]]:
        timeout_s = max(1, round(left_s))
        parameters = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        try:
            async with (
                asyncio.timeout(timeout_s + GRACE_S),
                http.stream(
                    "GET", self._url, params=self._selected(parameters), headers=self._token(), timeout=_watching()
                ) as answer,
            ):
                if answer.status_code == 410:
                    raise ExpiredError
                if answer.status_code != 200:
                    await answer.aread()
                    raise SourceError(_refused(answer))
                report.fine()
                async for line in answer.aiter_lines():
                    if line.strip():
                        yield orjson.loads(line)
        except TimeoutError:
            raise SourceError("the watch was silent beyond its end") from None
        except httpx.HTTPError as e:
            raise SourceError(f"the watch broke: {e or type(e).__name__}") from None
        except orjson.JSONDecodeError:
            raise SourceError("the watch broke in the middle of an event") from None

    async def _get(self, http: httpx.AsyncClient, parameters: Mapping[str, str]) -> bytes:
        try:
            answer = await http.get(self._url, params=self._selected(parameters), headers=self._token(), timeout=30.0)
        except httpx.HTTPError as e:
            raise SourceError(f"the API server cannot be read: {e or type(e).__name__}") from None
        if answer.status_code != 200:
            raise SourceError(_refused(answer))
        return answer.content

    # -- where and who ---------------------------------------------------------------------------------------------

    @property
    def _url(self) -> str:
        base = self.settings.api_url
        if base is None:
            host, port = (self._environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
            if not host:
                raise SourceError("not in a cluster (KUBERNETES_SERVICE_HOST is not set); set api_url")
            base = f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
        return f"{base.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"

    @property
    def _namespace(self) -> str:
        if self.settings.namespace is not None:
            return self.settings.namespace
        try:
            return NAMESPACE.read_text().strip()
        except OSError:
            raise SourceError(f"{NAMESPACE} cannot be read; set namespace") from None

    def _selected(self, parameters: Mapping[str, str]) -> dict[str, str]:
        return {"labelSelector": self.settings.selector or "", **parameters}

    def _token(self) -> dict[str, str]:
        try:
            token = Path(self.settings.token_file).read_text().strip()
        except OSError:
            return {}  # an API server that lets everyone read, as `kubectl proxy`
        return {"authorization": f"Bearer {token}"}

    def _client(self) -> httpx.AsyncClient:
        verify: ssl.SSLContext | bool = False  # plain HTTP has nothing to verify
        if self._url.startswith("https:"):
            try:
                verify = ssl.create_default_context(cafile=self.settings.ca_file)
            except (OSError, ssl.SSLError):
                raise SourceError(f"{self.settings.ca_file}: must be a readable PEM file") from None
        return httpx.AsyncClient(trust_env=False, verify=verify)

    def _longer(self, pause_s: float) -> float:
        return min(self.settings.retry_max_s, max(FIRST_PAUSE_S, 2.0 * pause_s))

    def _jittered(self, pause_s: float) -> float:
        return pause_s * (0.5 + 0.5 * self._rng.random())


def _watching() -> httpx.Timeout:
    return httpx.Timeout(CONNECT_S, read=None)


def _refused(answer: httpx.Response) -> str:
    try:
        said = str(orjson.loads(answer.content).get("message") or "")
    except (orjson.JSONDecodeError, AttributeError):
        said = ""
    need = "; the service account needs get, list and watch of endpointslices" if answer.status_code == 403 else ""
    return f"the API server answered {answer.status_code}{f': {said[:200]}' if said else ''}{need}"
