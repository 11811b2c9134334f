"""One TOML file becomes one immutable `Config`, or a list of mistakes with one line each.

A line names the key, the value and what would be right: `limits.max_body_bytes = "32MB": must be a whole number`.
Unknown keys are mistakes and name the nearest valid one. A file with a mistake is refused whole, at start, on
SIGHUP and through the admin API alike. Secrets come from environment variables; key hashes may stand in the file.
"""

from __future__ import annotations

import random
import ssl
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from gateway import experiment_table, tuning
from gateway import sections as s
from gateway.discovery.tables import Discovery
from gateway.mistakes import line_of, lines_of, without
from gateway.shared.table import RedisTable
from policies import POLICIES, arms
from policies.arms import Arm
from policies.model import ServiceClass

TableT = TypeVar("TableT", bound=BaseModel)


class ConfigError(Exception):
    """The configuration cannot be used; `lines` has one sentence per mistake."""

    exit_status = 2

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class Config(s.Table):
    default_class: str = "standard"
    """Service class of a request without key or header."""
    model_classes: dict[str, str] = Field(default={})
    """Service class by model name, as {"llama-batch" = "batch"}; a header may override it."""
    listen: s.Listen = s.Listen()
    workers: s.Workers = s.Workers()
    redis: RedisTable = RedisTable()
    limits: s.Limits = s.Limits()
    timeouts: s.Timeouts = s.Timeouts()
    stream: s.Stream = s.Stream()
    retry: s.Retry = s.Retry()
    replicas: list[s.Replica] = Field(default=[])
    discovery: Discovery = Discovery()
    policy: s.PolicyTable = s.PolicyTable()
    admission: tuning.Admission = tuning.Admission()
    pacing: tuning.Pacing = tuning.Pacing()
    working_set: tuning.WorkingSet = tuning.WorkingSet()
    kv: tuning.Kv = tuning.Kv()
    priors: tuning.Priors = tuning.Priors()
    experiment: experiment_table.Experiment | None = None
    shadow: experiment_table.Shadow = experiment_table.Shadow()
    classes: dict[s.Name, s.ClassTable] = Field(default=s.CLASSES, validate_default=False)
    tenants: dict[s.Name, s.Tenant] = Field(default={})
    scrape: s.Scrape = s.Scrape()
    health: s.Health = s.Health()
    journal: s.Journal = s.Journal()
    prefixes: s.Prefixes = s.Prefixes()
    metrics: s.Metrics = s.Metrics()
    admin: s.Admin = s.Admin()

    @field_validator("classes", mode="before")
    @classmethod
    def _over_defaults(cls, value: Any) -> Any:
        """A table for a built-in class changes only the keys it names; the built-in classes always exist."""
        if not isinstance(value, dict):
            return value
        merged: dict[str, Any] = dict(s.CLASSES)
        for name, table in value.items():
            known = s.CLASSES.get(name)
            merged[name] = {**known.model_dump(), **table} if known and isinstance(table, dict) else table
        return merged

    def service_classes(self) -> dict[str, ServiceClass]:
        return {name: table.build(name) for name, table in self.classes.items()}

    def arm(self) -> Arm:
        """The routing policy's name and the core's settings. Raises ValueError for an unknown arm."""
        switches = (self.admission.enabled, self.pacing.enabled, self.working_set.enabled)
        base = tuning.settings(
            self.admission,
            self.pacing,
            self.working_set,
            self.kv,
            self.priors,
            max_attempts=self.retry.max_attempts,
            alternatives=self.policy.alternatives,
            panic_share=self.health.panic_share,
            max_held=self.limits.held_requests,
            max_held_bytes=self.limits.held_bytes,
        )
        arm = arms.parse(self.policy.name, base)
        found = arm.settings
        on = [
            has and wanted
            for has, wanted in zip((found.admission, found.pacing, found.working_set), switches, strict=True)
        ]
        return replace(arm, settings=replace(found, admission=on[0], pacing=on[1], working_set=on[2]))


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Reads the file (None: defaults alone) with `overrides` laid over its tables. Raises ConfigError."""
    if path is None:
        return build(overrides or {})
    try:
        return build(merged(_toml(path.read_text(encoding="utf-8"), f"--config {path}: "), overrides or {}))
    except OSError as e:
        raise ConfigError([f"--config {path}: cannot be read: {e.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"--config {path}: must be UTF-8 text"]) from None


def parse(text: str, overrides: Mapping[str, Any] | None = None) -> Config:
    return build(merged(_toml(text), overrides or {}))


def _toml(text: str, where: str = "") -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # also a number of thousands of digits, and tables without a bottom
        raise ConfigError([f"{where}not valid TOML: {e}"]) from None


def merged(document: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `document`: tables key by key, everything else replaced."""
    result = dict(document)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def build(document: Mapping[str, Any]) -> Config:
    """Checks a document as TOML or JSON gives it. Raises ConfigError with every mistake."""
    if too_long := list(_too_long(document, "")):
        raise ConfigError(too_long)
    try:
        config = Config.model_validate(document)
    except ValidationError as e:
        raise ConfigError([*lines_of(e, Config), *_across_the_rest(document, e)]) from None
    mistakes = list(_across(config))
    if mistakes:
        raise ConfigError(mistakes)
    return config


def _across_the_rest(document: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Mistakes across the tables of a document that has others as well, as far as they can be told now."""
    rest, taken = without(document, error)
    try:
        return [line for line in _across(Config.model_validate(rest)) if not taken.hides(line)]
    except ValidationError:
        return []


def checked(table: type[TableT], document: Mapping[str, Any], key: str) -> TableT:
    """One table that does not come from a file. Raises ConfigError with every mistake."""
    if too_long := list(_too_long(document, key)):
        raise ConfigError(too_long)
    try:
        return table.model_validate(document)
    except ValidationError as e:
        raise ConfigError([line_of({**one, "loc": (key, *one["loc"])}, Config) for one in e.errors()]) from None


def _too_long(document: Mapping[str, Any], key: str) -> Iterator[str]:
    """Numbers and text that no journal, message between processes or call of the system could carry."""
    left: list[tuple[str, Any]] = [(key, document)]
    while left:
        at, value = left.pop()
        if isinstance(value, Mapping):
            left += [(f"{at}.{name}".lstrip("."), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(f"{at}[{i}]", inner) for i, inner in enumerate(value)]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            yield f"{at}: must be a whole number of at most 64 bits"
        elif isinstance(value, str) and "\0" in value:  # no path, host or name of a variable may hold one
            yield f"{at}: must not hold a zero byte"


def _across(config: Config) -> list[str]:
    """Mistakes that no single table can see."""
    lines = []
    classes = ", ".join(config.classes)
    wanted = [("default_class", config.default_class)]
    wanted += [(f"model_classes.{model}", name) for model, name in config.model_classes.items()]
    for tenant, table in config.tenants.items():
        wanted += [(f"tenants.{tenant}.classes[{i}]", name) for i, name in enumerate(table.classes)]
        if table.default_class:
            wanted.append((f"tenants.{tenant}.default_class", table.default_class))
            if table.classes and table.default_class not in table.classes:
                lines.append(
                    f'tenants.{tenant}.default_class = "{table.default_class}": '
                    f"must be one of its classes: {', '.join(table.classes)}"
                )
        if not table.keys_sha256 and not table.keys_env:
            lines.append(f"tenants.{tenant}: has no key; give keys_sha256 or keys_env")
    lines += [
        f'{key} = "{name}": must be one of the classes: {classes}' for key, name in wanted if name not in config.classes
    ]
    owner: dict[str, str] = {}
    for tenant, table in config.tenants.items():
        for i, key in enumerate(table.keys_sha256):
            if (other := owner.setdefault(key, tenant)) != tenant:
                lines.append(
                    f"tenants.{tenant}.keys_sha256[{i}]: is also a key of tenant {other}; a key has one tenant"
                )
    seen: dict[str, int] = {}
    for i, replica in enumerate(config.replicas):
        if (first := seen.setdefault(replica.name, i)) != i:
            lines.append(f'replicas[{i}].id = "{replica.name}": is taken by replicas[{first}]; give it another id')
        if replica.ca_file is not None and not is_pem(replica.ca_file):
            lines.append(f'replicas[{i}].ca_file = "{replica.ca_file}": must be a readable PEM file')
    shared = config.discovery.ca_file
    if shared is not None and not is_pem(shared):
        lines.append(f'discovery.ca_file = "{shared}": must be a readable PEM file')
    limits = config.limits
    if limits.receiving_bytes < limits.max_body_bytes:
        lines.append(
            f"limits.receiving_bytes = {limits.receiving_bytes}: "
            f"must be at least limits.max_body_bytes, which is {limits.max_body_bytes}"
        )
    lines += (wrong := _policy(config)) + experiment_table.shadow_mistakes(config.shadow)
    if config.experiment is not None and not wrong:
        lines += experiment_table.mistakes(config.experiment, config.arm().settings)
    floors = sum(table.floor_share for table in config.classes.values())
    if floors > 1:
        lines.append(f"classes: the sum of floor_share is {floors:g}; it must be at most 1")
    if config.health.backoff_max_s < config.health.backoff_s:
        lines.append(
            f"health.backoff_max_s = {config.health.backoff_max_s:g}: "
            f"must be at least health.backoff_s, which is {config.health.backoff_s:g}"
        )
    return lines


def is_pem(path: str) -> bool:
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError):  # a zero byte in the path is the second
        return False
    return True


def _policy(config: Config) -> list[str]:
    table = config.policy
    try:
        name = config.arm().policy
    except ValueError as e:
        return [f'policy.name = "{table.name}": {e}']
    if name not in POLICIES:
        return [f'policy.name = "{table.name}": must be one of {", ".join(POLICIES)}']
    try:
        POLICIES[name].make(table.settings, random.Random(0))
    except ValueError as e:
        return [f"policy.settings: {e}"]
    return []
