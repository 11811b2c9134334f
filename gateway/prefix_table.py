"""`forebay prefixes`: which prompts share less than they could, and why, as a running gateway sees it.

Reads /admin/prefixes and prints it, or adds up a journal (`prefix_journal.py`). Lost tokens are of the last hour
(fading), estimated from samples; reuse is what the replicas said was cached, the ceiling what one endless cache would
have had.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import orjson
import typer
from rich.console import Console
from rich.table import Table

from gateway import prefix_journal

MOST_FAMILIES = 20
OF_JOURNAL = (
    "A journal holds no prompt families: a line names one only beside a leak, and only where the prompt was looked "
    "into before its answer ended. For families and their ceilings ask the gateway: forebay prefixes http://127.0.0.1:8080"
)


def prefixes(
    source: Annotated[
        str, typer.Argument(help="Address of a running gateway, or a journal it wrote.")
    ] = "http://127.0.0.1:8080",
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as JSON.")] = False,
    token_env: Annotated[str, typer.Option(help="Environment variable with the admin token.")] = "FOREBAY_ADMIN_TOKEN",
) -> None:
    """Which prompt families share less than they could, what stands where they split, and what it costs.

    Example: forebay prefixes http://127.0.0.1:8080

    Example: forebay prefixes --json | jq '.leaks[0]'

    Example: forebay prefixes /var/log/forebay/journal.jsonl
    """
    of_journal = Path(source).is_file()
    if of_journal:
        told = prefix_journal.read(Path(source))
        if told["passed_over"] and not told["lines"]:
            _fail(f"{source}: is no journal of a gateway: none of its {told['passed_over']} lines tells a request")
    elif source.startswith(("http://", "https://")):
        told = fetch(source.rstrip("/"), os.environ.get(token_env, ""), token_env)
    else:
        _fail(f"{source}: is no file, and an address begins with http://")
    if as_json:
        typer.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
        return
    show(told, Console(highlight=False), of_journal)


def fetch(url: str, token: str, token_env: str) -> dict[str, Any]:
    """The report. Ends the command with one line where there is none."""
    import httpx

    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{url}/admin/prefixes", headers=headers, timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        _fail(f"{url}: no gateway answers: {e}")
    if answer.status_code in (401, 403):
        _fail(f"{url}: needs the admin token; put it into the environment variable {token_env}")
    if answer.status_code != 200:
        try:
            said = "; ".join(answer.json()["errors"])
        except (ValueError, KeyError, TypeError):
            said = "is that a Forebay gateway?"
        _fail(f"{url}: answered {answer.status_code}: {said}")
    told: dict[str, Any] = answer.json()
    return told


def _fail(line: str) -> NoReturn:
    typer.echo(f"forebay prefixes: {line}", err=True)
    raise typer.Exit(1)


def show(told: Mapping[str, Any], console: Console, of_journal: bool = False) -> None:
    for what in ("models", "tenants"):
        if told[what] and (what == "models" or set(told[what]) != {"-"}):
            console.print(_totals(what, told[what]))
    if of_journal:
        console.print(OF_JOURNAL, soft_wrap=True)
    if not told["families"] and not told["leaks"]:
        if of_journal:
            console.print("No leak in this journal.")
            return
        seen = sum(row["requests"] for row in told["models"].values())
        console.print(f"No prompt family yet: {seen} requests with a prefix chain ended so far.")
        return
    if told["families"]:
        console.print(_families(told["families"]))
    if not told["leaks"]:
        console.print("No leak: no family is kept from sharing by something that changes in front of its shared text.")
        return
    console.print(_leaks(told["leaks"]))
    for row in told["leaks"]:
        console.print(f"{row['family']} {row['path']}: {row['advice']}.", soft_wrap=True, markup=False)
        if "sample" in row:
            console.print(f"    ...{row['sample']!r}...", soft_wrap=True, markup=False)


def _totals(what: str, rows: Mapping[str, Any]) -> Table:
    table = Table(title=f"Prompt tokens by {what[:-1]}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in (what[:-1], "requests", "prompt", "cached", "predicted", "cacheable", "reuse", "ceiling"):
        table.add_column(name, justify="left" if name == what[:-1] else "right")
    for name, row in rows.items():
        counts = (f"{row[key]:,}" for key in ("requests", "prompt_tokens", "cached_tokens", "predicted_tokens"))
        table.add_row(name, *counts, f"{row['cacheable_tokens']:,}", _share(row["reuse"]), _share(row["ceiling"]))
    return table


def _families(rows: list[dict[str, Any]]) -> Table:
    title = f"Prompt families ({len(rows)}), tokens per hour"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("family", "model", "tenant"):
        table.add_column(name)
    for name in ("requests/h", "prompt/h", "in common", "reuse", "ceiling", "without leaks", "lost/h"):
        table.add_column(name, justify="right")
    for row in rows[:MOST_FAMILIES]:
        table.add_row(
            row["id"],
            row["model"],
            row["tenant"] or "-",
            f"{row['requests_per_hour']:,.0f}",
            f"{row['prompt_tokens_per_hour']:,}",
            f"{row['common_tokens']:,}",
            _share(row["reuse"]),
            _share(row["ceiling"]),
            _share(row["ceiling_without_leaks"]),
            f"{row['lost_tokens_per_hour']:,}" if row["lost_tokens_per_hour"] else "-",
        )
    if len(rows) > MOST_FAMILIES:
        table.caption = f"{len(rows) - MOST_FAMILIES} more with --json"
    return table


def _leaks(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="What keeps prompts from being shared", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("family", "what", "where"):
        table.add_column(name, overflow="fold")
    for name in ("at byte", "requests/h", "lost per request", "lost tokens/h", "±"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["family"],
            row["kind"].replace("_", " "),
            row["path"],
            f"{row['offset']:,}",
            f"{row['requests_per_hour']:,.0f}",
            f"{row['lost_tokens_per_request']:,}",
            f"{row['lost_tokens_per_hour']:,}",
            f"{200 * row['lost_error']:.0f} %",  # two standard errors
        )
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
