"""Mixed traffic of prompt families, eight of them with one leak each, and what each leak costs by construction.

50 families share nothing but the model. Each has a system prompt (and some tools, examples, turns) of its own that all
its requests repeat, and users' texts that nobody repeats. A leaky one has something at a known place of the shared part
that changes with each request; its loss is the shared text behind it, for each request but the family's first. The
same seed without leaks is the clean traffic: the places are there and hold something constant.
"""

from __future__ import annotations

import bisect
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

FAMILIES = 50
PLANTED = ("timestamp", "uuid", "user_name", "tool_order", "tool_keys", "example_order", "counter", "nonce")
SPAN_S = 3600.0
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FIRST = (
    "Anna",
    "Björn",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jamal",
    "Katya",
    "Liam",
    "Noor",
)
_LAST = (
    "Abbott",
    "Berg",
    "Costa",
    "Demir",
    "Evans",
    "Fischer",
    "Garcia",
    "Haddad",
    "Ito",
    "Jones",
    "Kowalski",
    "Moreau",
)


@dataclass(slots=True, frozen=True)
class Planted:
    """A leak as it was planted. `behind_bytes`: shared text behind it; of an order, the part that is ordered too."""

    family: int
    kind: str
    path: str
    behind_bytes: int


@dataclass(slots=True)
class Prompted:
    """One request: when, of which family, what is sent."""

    at_s: float
    family: int
    api: str
    body: dict[str, Any]


class Family:
    """One application: what its prompts share, and its leak if it has one."""

    def __init__(self, number: int, seed: int, leak: str | None, share: float) -> None:
        self.number, self.leak, self.share = number, leak, share
        self.rng = random.Random(f"{seed}/{number}")
        rng = self.rng
        self.words = ["".join(rng.choices(_LETTERS, k=rng.randint(2, 10))) for _ in range(600)]
        self.api = "chat" if leak or number % 5 else "messages"
        early = rng.randrange(2) == 0  # in the first chunk, so that not one is in common, or later
        self.before = self.text(rng.randint(20, 120) if early else rng.randint(600, 1500))
        self.behind = self.text(rng.randint(2_000, 6_000))
        self.tools = [self.tool(n) for n in range(6)] if leak in ("tool_order", "tool_keys") or number % 4 == 0 else []
        self.examples: list[str] = []
        if leak == "example_order" or number % 7 == 3:
            self.examples = [f"Input: {self.text(160)}\nOutput: {rng.choice(self.words)}\n" for _ in range(8)]
        self.count = rng.randrange(1000, 9000)

    def text(self, size: int) -> str:
        """Sentences and lines of about this many bytes."""
        rng, out, length = self.rng, [], 0
        while length < size:
            words = rng.choices(self.words, k=rng.randint(5, 14))
            sentence = " ".join(words).capitalize() + rng.choice((". ", ". ", ".\n", ", "))
            out.append(sentence)
            length += len(sentence)
        return "".join(out).rstrip(" ,\n") + ".\n"

    def tool(self, number: int) -> dict[str, Any]:
        names = self.rng.sample(self.words, 4)
        properties = {name: {"type": "string", "description": self.text(60)} for name in names}
        function = {"name": f"tool_{number}_{names[0]}", "description": self.text(200), "parameters": {
            "type": "object", "properties": properties, "required": names[:2]}}  # fmt: skip
        return {"type": "function", "function": function}

    def value(self, at_s: float, user: random.Random) -> str:
        """What stands at the leaky place of this request; something constant where there is no leak."""
        self.count += 1
        unix = 1_780_000_000 + at_s
        hour, minute, second = int(unix // 3600 % 24), int(unix // 60 % 60), unix % 60
        match self.leak:
            case "timestamp":
                return f"Current time: 2026-06-03T{hour:02}:{minute:02}:{second:06.3f}Z"
            case "uuid":
                return f"Trace {uuid.UUID(int=user.getrandbits(128), version=4)}"
            case "user_name":
                return f"You are talking to {user.choice(_FIRST)} {user.choice(_LAST)}-{user.choice(_LAST)} today"
            case "counter":
                return f"Ticket {self.count}"
            case "nonce":
                return f"Session token {user.getrandbits(80):020x}"
        return "Current time: given by the user"

    def body(self, at_s: float, user: random.Random) -> dict[str, Any]:
        examples, tools = list(self.examples), list(self.tools)
        if self.leak == "example_order":
            user.shuffle(examples)
        if self.leak == "tool_order":
            user.shuffle(tools)
        if self.leak == "tool_keys":
            tools = [{"type": "function", "function": _shuffled(tool["function"], user)} for tool in tools]
        asked = "".join(user.choices(_LETTERS + "     ", k=user.randint(60, 500)))
        system = f"{self.before}{self.value(at_s, user)}.\n{''.join(examples)}{self.behind}"
        said = [{"role": "user", "content": asked}]
        if self.number % 6 == 1 and user.random() < 0.5:
            said += [{"role": "assistant", "content": asked[::-1]}, {"role": "user", "content": asked[:40] + " more"}]
        if self.api == "messages":
            return {"model": "sim", "max_tokens": 64, "system": system, "messages": said}
        body: dict[str, Any] = {"model": "sim", "messages": [{"role": "system", "content": system}, *said]}
        return body | {"tools": tools} if tools else body

    def planted(self) -> Planted | None:
        if self.leak is None:
            return None
        behind = len(self.behind.encode())
        examples = sum(len(one) for one in self.examples)
        if self.leak.startswith("tool"):
            own = sum(len(orjson.dumps(tool)) + 1 for tool in self.tools)
            path = "tools" if self.leak == "tool_order" else "tools[0]"
            head = len(self.before.encode()) + len("Current time: given by the user.\n")
            return Planted(self.number, self.leak, path, own + head + examples + behind)
        return Planted(self.number, self.leak, "messages[0].content", examples + behind)


def lost_bytes(planted: Planted, stream: bytes, earlier: list[bytes]) -> int:
    """What a request of a leaky family loses: shared text that no request before it had in the same place.

    stream: its shared part as the engine renders it; earlier: those of the family before it, sorted; it is added.
    """
    at = bisect.bisect(earlier, stream)
    common = [_common(stream, one) for one in earlier[max(0, at - 1) : at + 1]]
    earlier.insert(at, stream)
    return min(planted.behind_bytes, len(stream) - max(common)) if common else 0


def _common(one: bytes, other: bytes) -> int:
    """Length of the part that both start with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _shuffled(value: Any, user: random.Random) -> Any:
    """The same JSON with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        user.shuffle(keys)
        return {key: _shuffled(value[key], user) for key in keys}
    return value


def families(seed: int, leaky: bool) -> list[Family]:
    """50 families with rates between 1 and 3 of a common unit, which of them leak drawn by the seed."""
    rng = random.Random(f"{seed}/families")
    holders = dict(zip(rng.sample(range(FAMILIES), len(PLANTED)), PLANTED, strict=True)) if leaky else {}
    return [Family(n, seed, holders.get(n), 1.0 + 2.0 * rng.random()) for n in range(FAMILIES)]


def traffic(made: list[Family], requests: int, seed: int) -> Iterator[Prompted]:
    """`requests` requests over an hour, families mixed at random by their rates."""
    rng = random.Random(f"{seed}/traffic")
    shares = [family.share for family in made]
    for n in range(requests):
        family = rng.choices(made, shares)[0]
        at_s = SPAN_S * n / requests
        yield Prompted(at_s, family.number, family.api, family.body(at_s, rng))
