"""Replicas from DNS: A and AAAA records of a name, or the targets of its SRV records, looked up again when they expire.

The time to the next look-up is the smallest TTL of the answer, between `ttl_min_s` and `ttl_max_s`; a failure is tried
again after `ttl_min_s`, doubling. A name that answers with nobody keeps its last replicas: a resolver that hiccups must
not empty a fleet, and replicas that are gone are out by their health. Identity: an address is all that is known of an
A record, so another address is another replica; an SRV record names its target, which stays itself when it moves.
With `families = "first"` IPv6 is used where there is no IPv4, since both families of a name are one set of replicas.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.rdtypes.IN.SRV
import dns.resolver
from pydantic import ValidationError

from gateway.discovery.membership import Member
from gateway.discovery.report import Report, SourceError
from gateway.discovery.tables import SRV, DnsSource, server
from gateway.lost_cancel import told_to_end
from gateway.sections import Replica

NOBODY = (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer)


@dataclass(slots=True)
class Known:
    """What a name last said."""

    members: tuple[Member, ...] = ()
    by_type: dict[str, tuple[str, ...]] = field(default_factory=dict)
    due: float = 0.0
    pause_s: float = 0.0  # after a failure
    heard: bool = False


class Names:
    def __init__(
        self,
        settings: DnsSource,
        key_env: str | None = None,
        ca_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.key_env, self.ca_file = key_env, ca_file
        self._clock = clock
        self._known = {name: Known() for name in settings.names}

    async def run(self, report: Report) -> None:
        while not told_to_end():
            now = self._clock()
            due = [name for name, known in self._known.items() if known.due <= now]
            troubles = [t for t in await asyncio.gather(*(self._look_up(name) for name in due)) if t]
            heard = [known for known in self._known.values() if known.heard]
            if heard:
                members = {member.table.name: member for known in heard for member in known.members}
                report.told(members.values(), whole=len(heard) == len(self._known))
            if troubles:
                report.failed("; ".join(troubles))
            elif not any(known.pause_s for known in self._known.values()):
                report.fine()
            await asyncio.sleep(max(0.0, min(known.due for known in self._known.values()) - self._clock()))

    async def _look_up(self, name: str) -> str | None:
        """Answers what went wrong."""
        s, known = self.settings, self._known[name]
        try:
            members, ttl_s = await (self._services(name) if name.startswith(SRV) else self._addresses(name, known))
        except SourceError as e:
            known.pause_s = min(s.ttl_max_s, max(s.ttl_min_s, 2.0 * known.pause_s))
            known.due = self._clock() + known.pause_s
            return str(e)
        known.members, known.heard, known.pause_s = tuple(members), True, 0.0
        known.due = self._clock() + min(max(ttl_s, s.ttl_min_s), s.ttl_max_s)
        return None

    async def _addresses(self, name: str, known: Known) -> tuple[list[Member], float]:
        parts = urlsplit(name)
        host = parts.hostname or ""
        types = ("A", "AAAA")
        answers = await asyncio.gather(*(self._ask(host, kind) for kind in types), return_exceptions=True)
        ttls: list[float] = []
        for kind, answer in zip(types, answers, strict=True):
            if isinstance(answer, dns.resolver.Answer):
                known.by_type[kind] = tuple(sorted(record.address for record in answer))
                ttls.append(float(answer.chaining_result.minimum_ttl))
            elif isinstance(answer, NOBODY):
                known.by_type[kind] = ()
            elif not isinstance(answer, dns.exception.DNSException | OSError):
                raise answer
        if not ttls:
            raise SourceError(f"{host}: {_why(answers[0])}")
        found = {kind: known.by_type.get(kind, ()) for kind in types}
        if self.settings.families == "first" and found["A"]:
            found["AAAA"] = ()
        addresses = [address for kind in types for address in found[kind]]
        netlocs = (f"[{a}]" if ipaddress.ip_address(a).version == 6 else a for a in addresses)
        port = "" if parts.port is None else f":{parts.port}"
        return [self._member(urlunsplit((parts.scheme, f"{n}{port}", parts.path, "", ""))) for n in netlocs], min(ttls)

    async def _services(self, name: str) -> tuple[list[Member], float]:
        parts = urlsplit(name.removeprefix(SRV))
        host = parts.hostname or ""
        try:
            answer = await self._ask(host, "SRV")
        except (dns.exception.DNSException, OSError) as e:
            raise SourceError(f"{host}: {_why(e)}") from None
        records = [r for r in answer if isinstance(r, dns.rdtypes.IN.SRV.SRV) and r.target.to_text() != "."]
        if not records:
            raise SourceError(f"{host}: names nobody")
        best = min(r.priority for r in records)
        used = [r for r in records if r.priority == best]  # the others are for when all of these are gone
        most = max(r.weight for r in used)
        members = [
            self._member(
                urlunsplit((parts.scheme, f"{r.target.to_text(omit_final_dot=True)}:{r.port}", parts.path, "", "")),
                r.weight / most if r.weight else 1.0,
            )
            for r in sorted(used, key=lambda r: (r.target.to_text(), r.port))
        ]
        return members, float(answer.chaining_result.minimum_ttl)

    def _member(self, url: str, weight: float = 1.0) -> Member:
        try:
            return Member(Replica(url=url, weight=weight, key_env=self.key_env, ca_file=self.ca_file))
        except ValidationError:
            raise SourceError(f"{url}: is no address of a replica") from None

    async def _ask(self, host: str, kind: str) -> dns.resolver.Answer:
        """Made anew each time: the system's configuration may have changed."""
        resolver = dns.asyncresolver.Resolver(configure=not self.settings.servers)
        if self.settings.servers:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(*server(one)) for one in self.settings.servers]
        return await resolver.resolve(host, kind, lifetime=self.settings.timeout_s, search=True)


def _why(error: object) -> str:
    if isinstance(error, NOBODY):
        return "names nobody"
    if isinstance(error, dns.exception.Timeout):
        return "the name server does not answer"
    return str(error) or type(error).__name__
