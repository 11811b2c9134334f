"""What a journal says happened, beside what the simulator says would have: the bridge, and where it does not hold.

A replay of a journal answers "what would other policies have done with this traffic" on simulated replicas. Whether
that is worth anything shows in the one policy that is known both ways: the one that ran. Its attainment as recorded
stands beside its attainment as simulated; a gap there is the size below which differences between the others mean
nothing. Everything else that is assumed is printed, each with its number from the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtests.traces.file import open_trace
from loadtests.traces.journal import count
from policies.statistics import Interval, wilson


@dataclass(slots=True)
class Told:
    """Requests of one policy, as they ended."""

    requests: int = 0
    good: int = 0
    shed: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def attainment(self) -> Interval:
        return wilson(self.good, self.requests)


@dataclass(slots=True)
class Recorded:
    """What the generating requests of a journal say together."""

    policies: dict[str, Told]
    replicas: int
    span_s: float
    requests: int
    retries: int  # of clients, left out of the replay
    unanswered: int  # their output length is a guess
    estimated: int  # prompt length from bytes
    sessions: int  # requests with one: their turns came after answers
    truncated: int  # prompts longer than their chain: what lies behind is taken as not shared


def recorded(path: Path) -> Recorded:
    """Raises ScheduleError for a file that cannot be read."""
    out = Recorded({}, 0, 0.0, 0, 0, 0, 0, 0, 0)
    replicas: set[str] = set()
    times: list[float] = []
    for _, value in open_trace(path).objects():
        if value.get("kind", "generate") != "generate":
            continue
        if value.get("client_retry"):
            out.retries += 1
            continue
        out.requests += 1
        times.append(float(value.get("received_unix") or 0.0))
        told = out.policies.setdefault(str(value.get("policy") or "?"), Told())
        told.requests += 1
        told.good += value.get("partition") == "good"
        told.shed += value.get("outcome") == "shed"
        if value.get("ttft_s") is not None:
            told.ttft_s.append(float(value["ttft_s"]))
        replicas |= {a["replica_id"] for a in value.get("attempts") or ()}
        out.unanswered += not count(value.get("completion_tokens"))
        prompt = value.get("prompt_tokens")
        out.estimated += not (isinstance(prompt, list) and len(prompt) == 2 and prompt[1] == "usage")
        out.sessions += value.get("session") is not None
        chain = value.get("chain") or ()
        out.truncated += int(value.get("prompt_bytes") or 0) > 256 * (len(chain) + 1)
    out.replicas = len(replicas)
    out.span_s = max(times) - min(times) if times else 0.0
    return out


def caveats(found: Recorded, replicas: int, load: Sequence[float]) -> list[str]:
    """One sentence each, only those that apply to this journal and this replay."""
    n = max(1, found.requests)
    lines = [
        "arrivals are those of the journal: faster answers would have brought follow-up turns sooner, refusals retries"
        + (f" ({found.sessions / n:.0%} of requests belong to a session)" if found.sessions else ""),
        "replicas are simulated from a profile; fit one to yours with `forebay calibrate URL` and give it as --profile",
        "caches start empty: leave the first minutes out with a long window, or read differences only",
    ]
    if found.replicas != replicas:
        lines.append(f"the journal names {found.replicas} replicas, simulated are {replicas} (--replicas)")
    if list(load) != [1.0]:
        lines.append("at another load than 1 nothing recorded can be compared with")
    if found.unanswered:
        lines.append(f"{found.unanswered / n:.1%} had no answer; the length it would have had is the median of others")
    if found.estimated:
        lines.append(f"{found.estimated / n:.1%} of prompt lengths are estimates from bytes")
    if found.truncated:
        lines.append(f"{found.truncated / n:.1%} of prompts are longer than their chain: the rest counts as unshared")
    if found.retries:
        lines.append(f"{found.retries} retries of clients are left out; other refusals would have brought others")
    if len(found.policies) > 1:
        lines.append("several policies ran: each met queues and caches that the others made")
    return lines


def show(console: Console, found: Recorded, entries: Sequence[Mapping[str, Any]], replicas: int) -> None:
    """The bridge table and the caveats."""
    loads = list(dict.fromkeys(float(e["load"]) for e in entries))
    table = Table(title=f"as recorded, {found.span_s / 60:.0f} minutes, and as simulated")
    for column in ("policy that ran", "requests", "recorded attainment", "shed", "simulated at load 1", "apart"):
        table.add_column(column, justify="right")
    for name, told in found.policies.items():
        same = [e for e in entries if e["load"] == 1.0 and str(e["policy"]).split("+")[0] == name.split("+")[0]]
        interval = told.attainment
        cells = ("not simulated: add --policy " + name, "")
        if same:
            simulated = sum(e["attainment"] for e in same) / len(same)
            cells = (f"{simulated:.1%}", f"{simulated - interval.estimate:+.1%}")
        span = f"{interval.estimate:.1%} ({interval.low:.1%} to {interval.high:.1%})"
        table.add_row(name, f"{told.requests}", span, f"{told.shed}", *cells)
    console.print(table)
    console.print("Differences between simulated policies smaller than what is apart here mean nothing. Assumed:")
    for line in caveats(found, replicas, loads):
        console.print(f"- {line}", highlight=False)
