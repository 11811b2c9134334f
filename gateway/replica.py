"""One configured or added replica: where it is, how to speak to it, and which models it said it serves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gateway.sections import Replica as ReplicaTable

MOST_LEVELS = 16  # of what is kept of a row of /v1/models; vLLM's have three


def key_mistakes(tables: Iterable[ReplicaTable], environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line per replica whose key would break the head of every request to it (a newline from a file, mostly)."""
    return [f"replicas[{i}].{line}" for i, table in enumerate(tables) if (line := key_mistake(table, environ))]


def key_mistake(table: ReplicaTable, environ: Mapping[str, str]) -> str | None:
    """What is wrong with the key of one of them; never the key itself."""
    key = environ.get(table.key_env, "") if table.key_env else ""
    if key.isascii() and key.isprintable() and key == key.strip():
        return None
    said = "the value of this variable must be plain text on one line, without spaces or a newline at its ends"
    return f'key_env = "{table.key_env}": {said}'


def _flat(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Whether it holds no deeper lists and objects; orjson reads a thousand, and writes a quarter of that."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_flat(one, levels - 1) for one in inside)
    return True


@dataclass(slots=True)
class Model:
    """One row of a replica's /v1/models."""

    id: str
    parent: str | None = None  # base model of a LoRA adapter
    max_model_len: int | None = None
    document: Mapping[str, Any] = field(default_factory=dict)  # as the replica gave it


@dataclass(slots=True)
class Replica:
    id: str
    url: str  # without a trailing slash
    key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    weight: float = 1.0
    role: str = "both"
    fixed_models: tuple[str, ...] = ()  # from the configuration; empty: asked for
    models: dict[str, Model] = field(default_factory=dict)
    learnt: bool = False  # its models are known
    drained_by: set[str] = field(default_factory=set)  # reasons for which it gets nothing new
    slow_start_s: float = 0.0  # eased in over this time; zero for a replica that was there at start

    @classmethod
    def of(cls, table: ReplicaTable, environ: Mapping[str, str] = os.environ) -> Replica:
        fixed = tuple(table.models)
        return cls(
            id=table.name,
            url=table.url,
            key=environ.get(table.key_env) if table.key_env else None,
            ca_file=table.ca_file,
            weight=table.weight,
            role=table.role,
            fixed_models=fixed,
            models={name: Model(name) for name in fixed},
            learnt=bool(fixed),
        )

    @property
    def draining(self) -> bool:
        return bool(self.drained_by)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def tls(self) -> bool:
        return self.url.startswith("https:")

    @property
    def path_prefix(self) -> str:
        return urlsplit(self.url).path.rstrip("/")

    @property
    def base_models(self) -> frozenset[str]:
        return frozenset(m.id for m in self.models.values() if m.parent is None)

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(m.id for m in self.models.values() if m.parent is not None)

    def learn(self, rows: list[Mapping[str, Any]]) -> bool:
        """Takes the `data` of /v1/models; True when the set of models or adapters changed.

        vLLM names a parent on adapters; a base model's parent is null. Adapters of a configured base model are
        learnt too, other models of a replica with configured models are not.
        """
        before = (self.base_models, self.adapters, self.learnt)
        models: dict[str, Model] = {}
        for row in rows:
            name, parent = row.get("id"), row.get("parent")
            if not isinstance(name, str) or not name:
                continue
            if not isinstance(parent, str) or parent == name:
                parent = None
            if self.fixed_models and name not in self.fixed_models and parent not in self.fixed_models:
                continue
            length = row.get("max_model_len")
            models[name] = Model(name, parent, length if isinstance(length, int) else None, row if _flat(row) else {})
        for name in self.fixed_models:
            models.setdefault(name, Model(name))
        self.models, self.learnt = models, True
        return before != (self.base_models, self.adapters, self.learnt)
