"""The `[discovery]` tables of the configuration: which sources name replicas, and how they are read.

Sources add to the `[[replicas]]` of the configuration. What a source says is always its whole list; what goes wrong
while it is read changes nothing. Trade-off: a source that cannot be read for long leaves replicas in the list that are
gone; their health keeps them out of rotation.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from gateway.sections import Replica, Seconds, Table

SRV = "srv+"


def _name(value: str) -> str:
    """A host name to look up, written as the URL that its replicas get."""
    service = value.startswith(SRV)
    try:
        url = Replica(url=value.removeprefix(SRV)).url
    except ValueError:  # a mistake of its own, or the line would name a key of [[replicas]]
        raise ValueError("must be http://NAME:PORT, as http://vllm.example:8000, or srv+http://NAME") from None
    parts = urlsplit(url)
    if service and parts.port is not None:
        raise ValueError("must not have a port: SRV records name it")
    if not service and parts.scheme == "https":
        raise ValueError("must be http, or srv+https: certificates name hosts, and these replicas have addresses only")
    return f"{SRV if service else ''}{url}"


def _server(value: str) -> str:
    """A name server as ADDRESS, ADDRESS:PORT or [IPV6]:PORT."""
    address, port = server(value)
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise ValueError("must be ADDRESS, ADDRESS:PORT or [IPV6]:PORT") from None
    if not 0 < port < 65536:
        raise ValueError("must have a port between 1 and 65535")
    return value


def server(text: str) -> tuple[str, int]:
    """Address and port of a name server."""
    bare = text.count(":") > 1 and "[" not in text
    parts = urlsplit(f"//[{text}]" if bare else f"//{text}")
    return parts.hostname or "", parts.port or 53


DnsName = Annotated[str, AfterValidator(_name)]
DnsServer = Annotated[str, AfterValidator(_server)]


class FileSource(Table):
    path: str | None = None
    """TOML file with [[replicas]] tables, watched for changes; left out: no such file."""
    poll_s: Seconds = 1.0
    """Time between two looks at the file; a change counts when two looks agree, so a half-written file does not."""


class DnsSource(Table):
    names: list[DnsName] = Field(default=[])
    """Names to look up: "http://vllm.example:8000" (A and AAAA) or "srv+http://_vllm._tcp.example"; empty: none."""
    servers: list[DnsServer] = Field(default=[])
    """Name servers as ADDRESS, ADDRESS:PORT or [IPV6]:PORT; empty: those of the system."""
    families: Literal["first", "both"] = "first"
    """"first" takes IPv4 addresses, and IPv6 ones where there are none; "both" takes each address as a replica."""
    timeout_s: Seconds = 5.0
    """Longest time for one look-up."""
    ttl_min_s: Seconds = 1.0
    """Shortest time between two look-ups, whatever the records say."""
    ttl_max_s: Seconds = 60.0
    """Longest time between two look-ups, whatever the records say."""


class KubernetesSource(Table):
    selector: str | None = None
    """Labels of the EndpointSlices, as "kubernetes.io/service-name=vllm"; left out: Kubernetes is not asked."""
    namespace: str | None = None
    """Namespace of the EndpointSlices; left out: the one this gateway runs in."""
    port: str | None = None
    """Name or number of the port; left out: the first of the slice."""
    scheme: Literal["http", "https"] = "http"
    """How replicas are spoken to."""
    api_url: str | None = None
    """Address of the API server; left out: that of the cluster this gateway runs in."""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """File with the bearer token, read again for every request because it is rotated."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """PEM file of the authority that signed the API server's certificate."""
    relist_s: Seconds = 300.0
    """Time after which the whole list is read again, whatever the watch said: repairs what it missed."""
    retry_max_s: Seconds = 30.0
    """Longest pause after the API server could not be read; the first is 0.5 s and doubles."""

    @field_validator("selector")
    @classmethod
    def _labels(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError('must be labels as "kubernetes.io/service-name=vllm", several with commas')
        return value


class Discovery(Table):
    drain_s: Seconds = 60.0
    """Longest time that a replica which is taken out may have open requests before it is forgotten; they go on."""
    key_env: str | None = None
    """Environment variable with the API key of replicas that DNS or Kubernetes name."""
    ca_file: str | None = None
    """PEM file of the private authority that signed the certificates of those replicas."""
    file: FileSource = FileSource()
    dns: DnsSource = DnsSource()
    kubernetes: KubernetesSource = KubernetesSource()

    @property
    def any(self) -> bool:
        """Whether some source is configured."""
        return bool(self.file.path or self.dns.names or self.kubernetes.selector)
