"""A Kubernetes API server as far as EndpointSlices go: list, watch, versions that expire, bookmarks, and ways to fail.

Shapes as the API reference of discovery.k8s.io/v1 and its watch documentation give them: one JSON object a line, each
with the whole slice; an ERROR event with a Status of code 410 for a version that is not kept any more.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"


def endpoint(pod: str, ip: str, uid: str = "", **conditions: bool | None) -> dict[str, Any]:
    """An endpoint of a pod; without `uid` one that somebody wrote by hand."""
    target = {"targetRef": {"kind": "Pod", "name": pod, "namespace": "inference", "uid": uid}} if uid else {}
    state = {"ready": True, "serving": True, "terminating": False, **conditions}
    return {"addresses": [ip], "conditions": state, "nodeName": "node-1", "zone": "z1", **target}


def slice_of(
    *endpoints: dict[str, Any], name: str = "vllm-abc12", port: int | None = 8000, family: str = "IPv4"
) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": "vllm", "endpointslice.kubernetes.io/managed-by": "controller"}
    return {
        "metadata": {"name": name, "generateName": "vllm-", "namespace": "inference", "uid": name, "labels": labels},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [
            {"name": "metrics", "port": 9100, "protocol": "TCP"},
            {"name": "http", "port": port, "protocol": "TCP"},
        ],
    }


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**head, "message": message, "reason": reason, "code": code}


@dataclass
class ApiServer:
    token: str | None = None
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 1000
    oldest: int = 0  # versions before it are 410 at the start of a watch
    lists: int = 0
    watches: list[int] = field(default_factory=list)  # versions that watches began at
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    down: bool = False  # answers 503
    url: str = ""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _log: list[tuple[int, str]] = field(default_factory=list)  # version and line of each event

    # -- what happens in the cluster ----------------------------------------------------------------------------

    def put(self, one: dict[str, Any], told: bool = True) -> None:
        """`told` False: the watch misses it."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = self._event(kind, one, told)

    def delete(self, name: str = "vllm-abc12", told: bool = True) -> None:
        self._event("DELETED", self.slices.pop(name), told)

    def bookmark(self) -> None:
        empty = {"metadata": {"creationTimestamp": None}, "addressType": "", "endpoints": None, "ports": None}
        self._event("BOOKMARK", empty, True)

    def expire(self) -> None:
        """Running watches are told that their version is gone."""
        self.oldest = self.version
        gone = status(410, "Expired", "too old resource version: 1000 (1001)")
        self._send(json.dumps({"type": "ERROR", "object": gone}) + "\n")

    def drop(self, cut: str = "") -> None:
        """Every watch breaks, after these characters."""
        for writer in list(self._open):
            if cut:
                self._chunk(writer, cut)
            writer.transport.abort() if not cut else writer.close()
            self._open.discard(writer)

    def end(self) -> None:
        """Every watch ends as at its timeout."""
        for writer in list(self._open):
            writer.write(b"0\r\n\r\n")
            self._open.discard(writer)

    @property
    def watched(self) -> bool:
        return bool(self._open)

    def _event(self, kind: str, one: dict[str, Any], told: bool) -> dict[str, Any]:
        self.version += 1
        head = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
        one = {**head, **one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}
        if told:
            line = json.dumps({"type": kind, "object": one}) + "\n"
            self._log.append((self.version, line))
            self._send(line)
        return one

    def _send(self, line: str) -> None:
        for writer in self._open:
            self._chunk(writer, line)

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(text), text.encode()))

    # -- HTTP ---------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = head.split(" ", 2)[1]
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                self._answer(writer, target, headers.get("authorization", "").removeprefix("bearer "))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, target: str, token: str) -> None:
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        self.asked.append(query)
        self.tokens.append(token)
        if self.down:
            self._whole(writer, 503, status(503, "ServiceUnavailable", "apiserver is shutting down"))
        elif self.token is not None and token != self.token:
            self._whole(writer, 401, status(401, "Unauthorized", "Unauthorized"))
        elif parts.path != PATH:
            self._whole(writer, 403, status(403, "Forbidden", "endpointslices.discovery.k8s.io is forbidden"))
        elif "watch" in query:
            self._watch(writer, int(query["resourceVersion"][0]))
        else:
            self.lists += 1
            document = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}}
            self._whole(writer, 200, {**document, "items": list(self.slices.values())})

    def _watch(self, writer: asyncio.StreamWriter, version: int) -> None:
        self.watches.append(version)
        if version < self.oldest:
            self._whole(writer, 410, status(410, "Expired", f"too old resource version: {version} ({self.oldest})"))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        self._open.add(writer)
        for at, line in self._log:
            if at > version:
                self._chunk(writer, line)

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (code, len(body))
        )
        writer.write(body)


@asynccontextmanager
async def api_server(tls: ssl.SSLContext | None = None, **settings: Any) -> AsyncIterator[ApiServer]:
    made = ApiServer(**settings)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made
        made.drop()
