"""The running configuration: changed whole or not at all, kept in versions, told to every part that lives by it.

Whatever can fail (reading, checking, keys, building the policy) is done first; what follows only assigns, between two
events of the loop, so no request sees half of a configuration; should a step fail all the same, all are taken back.
Affinity, ledgers, tenants' levels and open streams stay. A change through the admin API and a reload of the file are
the same step; the file wins when it is read again.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config import Config, ConfigError, build, load, merged
from gateway.discovery.membership import CONFIGURATION, Member, Membership
from gateway.discovery.sources import Sources
from gateway.experiment import Experiments
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.proxy import Proxy
from gateway.replica import key_mistakes
from gateway.scheduler import Scheduler
from gateway.sections import Replica as ReplicaTable
from gateway.shadows import Shadows
from gateway.tenants import Tenants
from gateway.watch import Watch
from policies import make
from policies.model import Restarted
from policies.policy import RoutingPolicy

log = logging.getLogger("forebay.control")
AT_START = ("listen", "workers", "redis", "journal", "prefixes", "metrics", "admin")  # tables that are read once

AT_ONCE = ("listen.trusted_proxies", "listen.drain_s", "workers.answer_s", "admin.versions")  # of these tables


@dataclass(slots=True, frozen=True)
class Version:
    number: int
    at_unix: float
    why: str
    config: Config


@dataclass(slots=True, frozen=True)
class Refused:
    """A file that was read again and not taken."""

    at_unix: float
    why: str
    errors: list[str]


@dataclass(slots=True)
class Control:
    """Owner of the versions. `path` and `overrides` are what the gateway was started with."""

    proxy: Proxy
    scheduler: Scheduler
    fleet: Fleet
    watch: Watch
    members: Membership
    sources: Sources
    metrics: Metrics
    experiments: Experiments
    shadows: Shadows
    path: Path | None
    overrides: Mapping[str, Any]
    versions: list[Version]
    environ: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    refused: Refused | None = None  # the last one; None once a file was taken again
    refusals: int = 0
    announce: Callable[..., None] | None = None  # told of what was changed here and not in the file

    @property
    def config(self) -> Config:
        return self.versions[-1].config

    def reload(self, why: str) -> list[str]:
        """Reads the file again. Raises ConfigError and changes nothing when it has a mistake."""
        if self.path is None:
            raise ConfigError(["there is no file to read again: the gateway was started without --config"])
        try:
            lines = self.apply(load(self.path, self.overrides), why)
        except ConfigError as e:
            self.refused, self.refusals = Refused(time.time(), why, e.lines), self.refusals + 1
            raise
        self.refused = None
        return lines

    def change(self, patch: Mapping[str, Any], why: str) -> list[str]:
        """Lays tables over the running configuration; lists are replaced. Raises ConfigError, changing nothing."""
        lines = self.apply(build(merged(self.config.model_dump(), patch)), why)
        if self.announce is not None:
            self.announce("patch", tables=patch)
        return lines

    def has(self, patch: Mapping[str, Any]) -> bool:
        """Whether it would change nothing. Raises ConfigError."""
        return build(merged(self.config.model_dump(), patch)) == self.config

    def drain(self, replica_id: str, draining: bool) -> None:
        """Nothing new for a replica, or something again. Raises KeyError for an unknown one."""
        self.fleet.drain(replica_id, draining)
        if self.announce is not None:
            self.announce("drain", replica=replica_id, draining=draining)

    def rollback(self, why: str) -> list[str]:
        """Returns to the version before; again: to the one before that. Raises ConfigError when there is none."""
        if len(self.versions) < 2:
            raise ConfigError(["there is no earlier configuration to return to"])
        current, before = self.versions[-1], self.versions[-2]
        told = self.apply(before.config, why)
        self.versions[-3:] = [Version(current.number + 1, time.time(), why, before.config)]
        if self.announce is not None:
            self.announce("patch", tables=before.config.model_dump(mode="json"))
        return told

    def forget_prefixes(self) -> None:
        """Takes every replica's cache as empty: the index of cached prefixes is learnt anew."""
        for replica_id in self.fleet.replicas:
            self.scheduler.fleet_event(Restarted(replica_id))

    def apply(self, config: Config, why: str) -> list[str]:
        """Makes `config` the running one; answers what changed, one `key: old -> new` per line.

        What waits for the next start stands first and says so."""
        before = self.config
        refused = self.experiments.refuses(before, config)
        if refused:
            raise ConfigError(refused)
        changes = list(differences(before.model_dump(), config.model_dump()))
        later = [f"{line} (at the next start, if the file has it)" for line in changes if _at_start(line)]
        now = [line for line in changes if not _at_start(line)]
        if mistakes := key_mistakes(config.replicas, self.environ):
            raise ConfigError(mistakes)
        tenants = Tenants.of(config, self.environ)
        config.arm()  # raises for one that cannot be
        policy = None if config.policy == before.policy else routing_policy(config)
        old_policy = self.scheduler.balancer.policy
        if policy is None and config.shadow != before.shadow:
            policy = old_policy
        try:
            for step in self._steps(before, config, tenants, policy):
                step()
        except Exception:
            log.exception("a change failed half-way (%s); what was changed is taken back", why)
            back = None if policy is None else old_policy
            for step in self._steps(config, before, Tenants.of(before, self.environ), back):
                with contextlib.suppress(Exception):  # the part that failed may fail again; the others go back
                    step()
            raise
        number = self.versions[-1].number + 1
        self.versions.append(Version(number, time.time(), why, config))
        del self.versions[: -config.admin.versions]
        if later:
            log.warning("not in effect yet: %s", "; ".join(later))
        nothing = "nothing else changed" if later else "nothing changed"
        log.info("configuration %d applied (%s): %s", number, why, "; ".join(now) or nothing)
        return [*later, *now]

    def _steps(
        self, before: Config, config: Config, tenants: Tenants, policy: RoutingPolicy | None
    ) -> Iterator[Callable[[], object]]:
        """What makes `config` the running one, each part by itself. Nothing of it should fail."""
        yield lambda: tenants.adopt(self.proxy.tenants)
        yield lambda: self.proxy.configure(config, tenants)
        yield lambda: setattr(self.fleet.health, "settings", config.health)
        yield lambda: setattr(self.members, "slow_start_s", config.health.slow_start_s)
        yield lambda: self.members.told(CONFIGURATION, [Member(table) for table in config.replicas])
        yield lambda: self.sources.configure(config.discovery)
        yield lambda: self.watch.configure(config.health, config.scrape)
        yield lambda: self.metrics.configure(config.classes, config.tenants)
        yield lambda: self.experiments.leave(before, config)
        yield lambda: self.scheduler.reclass(config.service_classes())
        yield lambda: self.shadows.configure(config.shadow)
        if policy is not None:
            yield lambda: self.scheduler.use(self.shadows.wrap(policy))
            yield self.proxy.policy_changed
        yield lambda: None if self.experiments.running else self.scheduler.configure(config.arm().settings)
        yield lambda: self.experiments.enter(before, config)


def _at_start(line: str) -> bool:
    key = line.split(":")[0]
    return key.split(".")[0] in AT_START and key not in AT_ONCE


def first(config: Config, why: str) -> Version:
    return Version(1, time.time(), why, config)


def routing_policy(config: Config) -> RoutingPolicy:
    seed = config.policy.seed
    return make(config.arm().policy, config.policy.settings, random.Random(seed))


def differences(before: Any, after: Any, key: str = "") -> Iterator[str]:
    """One line per value that differs; a list is one value, but that of the replicas."""
    if key == "replicas" and isinstance(before, list) and isinstance(after, list):
        yield from _replicas_that_differ(before, after)
    elif isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            inner = f"{key}.{name}".lstrip(".")
            if name not in before:
                yield f"{inner}: added"
            elif name not in after:
                yield f"{inner}: removed"
            else:
                yield from differences(before[name], after[name], inner)
    elif before != after:
        short = isinstance(before, list) or isinstance(after, list)
        yield f"{key}: changed" if short else f"{key}: {_spelled(before)} -> {_spelled(after)}"


def _replicas_that_differ(before: list[Any], after: list[Any]) -> Iterator[str]:
    """By name, with where a new one is: this line is all that the log and the audit keep of it."""
    old, new = ({ReplicaTable(**row).name: row for row in rows} for rows in (before, after))
    for name, row in new.items():
        if name not in old:
            yield f"replicas.{name}: added at {row['url']}"
        else:
            yield from differences(old[name], row, f"replicas.{name}")
    yield from (f"replicas.{name}: removed" for name in old if name not in new)
    if not (old.keys() ^ new.keys()) and list(old) != list(new):
        yield "replicas: in another order"


def _spelled(value: Any) -> Any:
    """As a configuration file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else value
