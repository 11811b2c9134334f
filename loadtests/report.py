"""`forebay report DIR`: one self-contained page and PNGs from the files of a run, and the JSON beside them.

Everything shown comes from summary.json and requests.jsonl; nothing is computed here that a reader could not compute
again from them. Percentiles are of the pooled answers of an arm at one load, with their number; goodput is the mean
over seeds. Invalid runs are shown as invalid and have no goodput. Trade-off: the page holds its images and weighs
about a megabyte, so that it can be mailed.
"""

from __future__ import annotations

import base64
import html
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any

import orjson
import typer

from loadtests import plots, results, terminal
from loadtests.pairing import RefusedError, compare_all
from loadtests.screen import number, seconds, share
from policies.statistics import bootstrap_mean, percentiles

PAGE = Path(__file__).with_name("report.html")
Run = Mapping[str, Any]


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with summary.json, as replay, compare or simulate wrote it.")],
    load: Annotated[
        float | None, typer.Option(help="Load of the detailed figures; default: where arms differ most.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
) -> None:
    """Draw the figures of a result folder and write report.html, which needs no other file.

    Example: forebay report runs/chat
    """
    try:
        with terminal.console().status(f"reading {folder} and drawing its figures"):
            page = build(folder, load, title)
    except ValueError as error:
        typer.echo(f"forebay report: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{page}: {page.stat().st_size / 1e6:.1f} MB, figures in {folder / 'plots'}")


def build(folder: Path, load: float | None = None, title: str | None = None) -> Path:
    """Writes report.html and plots/*.png. Raises ValueError when the folder holds no results of ours."""
    summary = results.read(folder)
    runs: list[Run] = summary["runs"]
    if not runs:
        raise ValueError(f"{folder / 'summary.json'}: holds no runs")
    loads = sorted({float(r["load"]) for r in runs})
    at = telling_load(runs) if load is None else load
    if at not in loads:
        raise ValueError(f"--load {at:g}: one of {', '.join(f'{x:g}' for x in loads)} would be right")
    here = [r for r in runs if float(r["load"]) == at]
    records = read_records(folder, at)
    figures = draw(runs, here, records)
    (folder / "plots").mkdir(exist_ok=True)
    for name, (image, _, _) in figures.items():
        (folder / "plots" / f"{name}.png").write_bytes(image)
    shown = html.escape(title or f"Forebay: {workload_of(summary, runs)}")
    page = Template(PAGE.read_text()).substitute(
        title=shown,
        lede=html.escape(lede(runs, loads, at)),
        verdicts=verdicts(runs),
        claims=claims(summary, runs),
        sections="\n".join(sections(runs, here, records, figures, at)),
        provenance=definition_list(flat(summary.get("provenance", {}))),
        json=html.escape(json.dumps(summary, indent=1)),
    )
    path = folder / "report.html"
    path.write_text(page)
    return path


def telling_load(runs: Sequence[Run]) -> float:
    """The load at which the arms' goodputs lie furthest apart."""
    spread: dict[float, float] = {}
    for load in sorted({float(r["load"]) for r in runs}):
        means = []
        for arm in plots.arms_of(runs):
            values = [
                r["goodput_rps"] for r in runs
                if r["policy"] == arm and float(r["load"]) == load and r["goodput_rps"] is not None
            ]  # fmt: skip
            if values:
                means.append(sum(values) / len(values))
        spread[load] = max(means) - min(means) if means else -1.0
    return max(spread, key=lambda at: (spread[at], at))


def read_records(folder: Path, load: float) -> dict[str, list[dict[str, Any]]]:
    """Complete, counted requests of each arm at one load with what the figures need."""
    path = folder / "requests.jsonl"
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    if not path.is_file():
        return {}
    with path.open("rb") as lines:
        for line in lines:
            row = orjson.loads(line)
            if row["load"] != load or not row["counted"] or not row.get("complete"):
                continue
            first, last, n = row.get("first_s"), row.get("last_s"), row.get("completion_tokens") or 0
            found[row["policy"]].append({
                "bucket": results.bucket(row["prompt_tokens"]),
                "ttft_s": None if first is None else first - row["scheduled_s"],
                "tpot_s": (last - first) / (n - 1) if first is not None and last is not None and n > 1 else None,
            })  # fmt: skip
    return dict(found)


def draw(
    runs: Sequence[Run], here: Sequence[Run], records: Mapping[str, list[dict[str, Any]]]
) -> dict[str, tuple[bytes, str, str]]:
    """name -> (PNG, heading, caption), in the order of the page."""
    wanted = {
        "goodput": (plots.goodput_against_load(runs), "Goodput against load",
                    "Mean over seeds, shaded: 95 % bootstrap interval over seeds. The oracle is an achievable "
                    "reference, not a bound."),
        "goodput-bars": (plots.goodput_bars(here), "Goodput", "Mean over seeds; dots are single runs."),
        "attainment": (plots.goodput_against_load(runs, "attainment"), "Attainment against load",
                       "Share of everything offered that met all its objectives."),
        "outcomes": (plots.outcomes(here), "What became of every request",
                     "All offered requests, pooled over seeds; the parts sum to 100 %."),
        "ttft": (plots.latency_by_bucket(records, "ttft_s", "Time to first token"), "Time to first token",
                 "Complete answers only, pooled over seeds, from the scheduled time; n is their number. "
                 "An arm that sheds has fewer."),
        "tpot": (plots.latency_by_bucket(records, "tpot_s", "Time per output token"), "Time per output token",
                 "Complete answers of two tokens or more, pooled over seeds."),
        "timeline": (plots.timelines(here), "Over time",
                     "First seed. Requests are counted where they were scheduled; dashed: open at once."),
        "reuse": (plots.reuse(here), "Cache reuse against its ceiling",
                  "As the replicas report it in cached_tokens, an external cache included. A bar beyond the ceiling "
                  "would be a fault of the measurement, except for blocks finer than the schedule's."),
        "balance": (plots.balance(here), "Balance over replicas",
                    "First seed. Work is prompt tokens that had to be computed."),
    }  # fmt: skip
    if wanted["goodput"][0] is not None:
        del wanted["goodput-bars"]
    return {
        name: (plots.png(figure), heading, caption)
        for name, (figure, heading, caption) in wanted.items()
        if figure is not None
    }


def sections(
    runs: Sequence[Run],
    here: Sequence[Run],
    records: Mapping[str, list[dict[str, Any]]],
    figures: Mapping[str, tuple[bytes, str, str]],
    at: float,
) -> Iterable[str]:
    for name, (image, heading, caption) in figures.items():
        where = "" if name in ("goodput", "attainment") else f" at load {at:g}"
        alt = html.escape(f"{heading}{where}. {caption}")
        data = base64.b64encode(image).decode()
        yield (
            f'<h2>{html.escape(heading + where)}</h2><figure><img alt="{alt}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    yield "<h2>Numbers</h2>" + table(*arm_rows(runs))
    yield f"<h2>Latency at load {at:g}</h2>" + table(*latency_rows(records))
    yield f"<h2>By prompt length at load {at:g}</h2>" + table(*bucket_rows(here))


def arm_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    head = ["arm", "load", "seeds", "valid", "offered/s", "goodput/s", "attainment", "shed", "late", "errors",
            "completed/s", "output tokens/s", "cached", "external", "preempted", "attempts"]  # fmt: skip
    rows = []
    for load in sorted({float(r["load"]) for r in runs}):
        for arm in dict.fromkeys(str(r["policy"]) for r in runs):
            mine = [r for r in runs if r["policy"] == arm and float(r["load"]) == load]
            if not mine:
                continue
            goodputs = [r["goodput_rps"] for r in mine if r["goodput_rps"] is not None]
            interval = bootstrap_mean(goodputs) if goodputs else None
            shown = number(interval.estimate, 3) if interval else plain(None)
            if interval and interval.n > 1:
                shown += f" [{interval.low:.3f}, {interval.high:.3f}]"
            offered = sum(r["offered"] for r in mine)
            rows.append([
                arm, f"{load:g}", str(len(mine)), str(sum(r["verdict"] == "valid" for r in mine)),
                number(mean(r["offered_rps"] for r in mine)), shown, share(mean(r["attainment"] for r in mine)),
                share(sum(r["shed"] for r in mine) / offered if offered else None),
                share(sum(r["late_complete"] for r in mine) / offered if offered else None),
                share(mean(r.get("error_rate") for r in mine)), number(mean(r["complete_rps"] for r in mine)),
                number(mean(r["output_tokens_per_s"] for r in mine), 0),
                *(share(mean((r.get("reuse") or {}).get(of) for r in mine)) for of in ("achieved", "external_cache")),
                plain(mean(r.get("preemptions") for r in mine)),
                number(mean((r.get("attempts") or {}).get("amplification") for r in mine)),
            ])  # fmt: skip
    return head, rows


def latency_rows(records: Mapping[str, list[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for arm, found in records.items():
        ttft = percentiles(r["ttft_s"] for r in found if r["ttft_s"] is not None)
        tpot = percentiles(r["tpot_s"] for r in found if r["tpot_s"] is not None)
        rows.append([
            arm, *(seconds(v) for v in (ttft.p50, ttft.p90, ttft.p99)), str(ttft.n),
            *(seconds(v) for v in (tpot.p50, tpot.p90, tpot.p99)), str(tpot.n),
        ])  # fmt: skip
    return ["arm", "TTFT p50", "p90", "p99", "answers", "TPOT p50", "p90", "p99", "answers"], rows


def bucket_rows(here: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    rows = []
    buckets = [b for b, _ in results.BUCKETS] + [results.LAST_BUCKET]
    for arm in plots.arms_of(here):
        mine = [r["by_bucket"] for r in here if r["policy"] == arm]
        for b in buckets:
            parts = [m[b] for m in mine if b in m]
            offered = sum(p["offered"] for p in parts)
            if offered:
                good, shed, late = (sum(p[k] for p in parts) for k in ("good", "shed", "late_complete"))
                rows.append([
                    arm, plots.BUCKET_NAMES[b], str(offered), share(good / offered), share(shed / offered),
                    share(late / offered),
                ])  # fmt: skip
    return ["arm", "prompt tokens", "offered", "attainment", "shed", "late but complete"], rows


def claims(summary: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """What may be said, one sentence each; runs that must not be compared say why."""
    items = []
    try:
        found = summary.get("comparisons") or compare_all(runs)
        items += [("", f"Load {c['load']:g}: {c['statement']}") for c in found if "statement" in c]
    except RefusedError as error:
        items.append(("warn", f"Not compared: {error}"))
    for run in runs:
        items += [("warn", f"{run['policy']}, seed {run['seed']}: {reason}") for reason in run["reasons"]]
    return "".join(f'<li class="{kind}">{html.escape(text)}</li>' for kind, text in items)


def verdicts(runs: Sequence[Run]) -> str:
    valid = sum(r["verdict"] == "valid" for r in runs)
    word, kind = ("VALID", "valid") if valid == len(runs) else ("INVALID", "invalid")
    text = f"{valid} of {len(runs)} runs kept their schedule and count."
    return f'<span class="verdict {kind}">{word}</span> {html.escape(text)}'


def lede(runs: Sequence[Run], loads: Sequence[float], at: float) -> str:
    seeds = sorted({r["seed"] for r in runs})
    first = runs[0]
    text = (
        f"{len(plots.arms_of(runs))} arms, {len(seeds)} seeds, window {first['window_s']:g} s, "
        f"drain {first['drain_s']:g} s, load {', '.join(f'{x:g}' for x in loads)}."
    )
    return text + (f" Detailed figures at load {at:g}, where the arms differ most." if len(loads) > 1 else "")


def workload_of(summary: Mapping[str, Any], runs: Sequence[Run]) -> str:
    said = summary.get("provenance", {}).get("workload") or summary.get("workload")
    return str(said or f"{len(runs)} runs")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def flat(value: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested facts as `a.b: value` lines."""
    out: list[tuple[str, str]] = []
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            out += flat(inner, f"{before}{key}.")
        elif inner not in (None, [], ""):
            out.append((before + key, ", ".join(map(str, inner)) if isinstance(inner, list) else str(inner)))
    return out


def definition_list(items: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in items) + "</dl>"


def mean(values: Iterable[Any]) -> float | None:
    known = [float(v) for v in values if v is not None]
    return sum(known) / len(known) if known else None


def plain(value: float | None) -> str:
    return number(value, 0)
