"""An approximate radix tree of prompts per replica: what SGLang, SMG, vllm-router and Ray Serve keep for cache
affinity.

Nodes are stretches of characters; each names the replicas (tenants) whose prompts passed through it with the time
of the last one. Matching walks as deep as the prompt agrees with any prompt seen; the deepest node's latest tenant
is the answer. Eviction removes a tenant from its least recently used leaves until it owns few enough characters.
Prompts without text are walked by chunk key, each counting as 256 characters. Trade-off: characters are not tokens,
and a tenant that shares only a part of the deepest edge counts as a holder of all that matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from policies.model import Request

Prompt: TypeAlias = "str | tuple[int, ...]"
CHUNK_CHARACTERS = 256


def prompt_of(request: Request) -> Prompt:
    return request.chain if request.text is None else request.text()


def characters(prompt: Prompt, length: int | None = None) -> int:
    units = len(prompt) if length is None else length
    return units if isinstance(prompt, str) else units * CHUNK_CHARACTERS


class _Node:
    __slots__ = ("children", "edge", "parent", "tenants")

    def __init__(self, edge: Prompt, parent: _Node | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[str | int, _Node] = {}
        self.tenants: dict[str, int] = {}  # replica -> epoch of its last prompt through here


class TextTree:
    """One per model; not shared between them."""

    def __init__(self) -> None:
        self._root = _Node("", None)
        self._epoch = 0
        self._owned: dict[str, int] = {}

    def owned(self, replica_id: str) -> int:
        """Characters held by one replica."""
        return self._owned.get(replica_id, 0)

    def match(self, prompt: Prompt) -> tuple[int, frozenset[str], str | None]:
        """Units matched, the tenants of the deepest node reached, and the latest of them."""
        node, at = self._root, 0
        while at < len(prompt):
            child = node.children.get(prompt[at])
            if child is None or not child.tenants:
                break
            same = _common(child.edge, prompt, at)
            node, at = child, at + same
            if same < len(child.edge):
                break
        if node is self._root:
            return 0, frozenset(), None
        latest = max(node.tenants, key=lambda tenant: node.tenants[tenant])
        return at, frozenset(node.tenants), latest

    def insert(self, prompt: Prompt, replica_id: str) -> None:
        self._epoch += 1
        node, at = self._root, 0
        while at < len(prompt):
            child = node.children.get(prompt[at])
            if child is None:
                child = node.children[prompt[at]] = _Node(prompt[at:], node)
            else:
                same = _common(child.edge, prompt, at)
                if same < len(child.edge):
                    child = self._split(child, same)
            if replica_id not in child.tenants:
                self._owned[replica_id] = self.owned(replica_id) + characters(child.edge)
            child.tenants[replica_id] = self._epoch
            node, at = child, at + len(child.edge)

    def evict(self, most_characters: int) -> None:
        """Each tenant keeps at most so many characters; its least recently used leaves go first."""
        for replica_id in [r for r, owned in self._owned.items() if owned > most_characters]:
            while self._owned[replica_id] > most_characters:
                leaves = [n for n in self._nodes() if self._is_leaf_of(n, replica_id)]
                for node in sorted(leaves, key=lambda n: n.tenants[replica_id]):
                    if self._owned[replica_id] <= most_characters:
                        break
                    self._leave(node, replica_id)

    def remove(self, replica_id: str) -> None:
        for node in self._nodes():
            if replica_id in node.tenants:
                self._leave(node, replica_id)
        self._owned.pop(replica_id, None)

    def _split(self, node: _Node, at: int) -> _Node:
        front = _Node(node.edge[:at], node.parent)
        front.tenants = dict(node.tenants)
        front.children[node.edge[at]] = node
        assert node.parent is not None
        node.parent.children[node.edge[0]] = front
        node.edge, node.parent = node.edge[at:], front
        return front

    def _nodes(self) -> list[_Node]:
        found, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def _is_leaf_of(self, node: _Node, replica_id: str) -> bool:
        return replica_id in node.tenants and not any(replica_id in c.tenants for c in node.children.values())

    def _leave(self, node: _Node, replica_id: str) -> None:
        del node.tenants[replica_id]
        self._owned[replica_id] -= characters(node.edge)
        while node.parent is not None and not node.tenants and not node.children:
            del node.parent.children[node.edge[0]]
            node = node.parent


def _common(edge: Prompt, prompt: Prompt, at: int) -> int:
    """Units of the edge that equal the prompt from `at` on."""
    most = min(len(edge), len(prompt) - at)
    if _equal(edge, prompt, at, 0, most):
        return most
    low, high = 0, most  # agreement up to low; a difference before high
    while high - low > 1:
        middle = (low + high) // 2
        if _equal(edge, prompt, at, low, middle):
            low = middle
        else:
            high = middle
    return low


def _equal(edge: Sequence[object], prompt: Sequence[object], at: int, low: int, high: int) -> bool:
    return edge[low:high] == prompt[at + low : at + high]
