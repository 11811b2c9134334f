"""`forebay experiment`: start, read, weigh and stop an experiment on running gateways; how long one must run.

Several --url are several gateways of one experiment: what is started or stopped goes to each, and status adds their
counts up. Exit status 1 when a gateway refuses or cannot be reached, 2 on bad usage.
"""

from __future__ import annotations

import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any, NoReturn

import orjson
import typer
from rich.console import Console

from gateway import experiment_view, trial
from gateway.config import ConfigError, checked
from gateway.experiment_merge import merged
from gateway.experiment_results import results
from gateway.experiment_table import Experiment, mistakes
from policies.designs import Design
from policies.power import Traffic, measured, needs
from policies.settings import Settings

experiment = typer.Typer(
    no_args_is_help=True,
    help="Compare policies on live traffic. Example: forebay experiment start --file experiment.toml",
)
Urls = Annotated[list[str] | None, typer.Option("--url", help="Gateway, default http://127.0.0.1:8080; repeatable.")]
TokenEnv = Annotated[str, typer.Option("--token-env", help="Environment variable with the admin token.")]
HERE = "http://127.0.0.1:8080"
TOKEN = "FOREBAY_ADMIN_TOKEN"  # a name, no secret


@experiment.command()
def start(
    file: Annotated[Path, typer.Option("--file", "-f", help="TOML file with a table named experiment.")],
    url: Urls = None,
    token_env: TokenEnv = TOKEN,
) -> None:
    """Start an experiment on every gateway given.

    Example: forebay experiment start --file experiment.toml --url http://gateway-1:8080 --url http://gateway-2:8080
    """
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        _bad_usage(f"--file {file}: file not found")
    except OSError as e:
        _bad_usage(f"--file {file}: cannot be read: {e.strerror}")
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        _bad_usage(f"--file {file}: not valid TOML: {e}")
    table = document.get("experiment")
    if not isinstance(table, dict):
        _bad_usage(f"--file {file}: has no [experiment] table")
    try:
        wrong = mistakes(checked(Experiment, table, "experiment"), Settings())  # before any gateway hears of it
    except ConfigError as e:
        wrong = e.lines
    if wrong:
        _bad_usage("\n".join(f"--file {file}: {line}" for line in wrong))
    for one in url or [HERE]:
        _print_changed(one, _call("POST", one, "/admin/experiment", token_env, table))


@experiment.command()
def stop(
    arm: Annotated[str | None, typer.Option(help="Only this arm; its traffic returns to the control.")] = None,
    why: Annotated[str, typer.Option(help="Reason, kept with the results.")] = "stopped by an operator",
    url: Urls = None,
    token_env: TokenEnv = TOKEN,
) -> None:
    """End an experiment, or take one arm out of it. Results stay readable.

    Example: forebay experiment stop --arm candidate --why "too slow for batch"
    """
    asked = {"why": why} | ({} if arm is None else {"arm": arm})
    for one in url or [HERE]:
        _print_changed(one, _call("POST", one, "/admin/experiment/stop", token_env, None, asked))


@experiment.command()
def weights(
    weight: Annotated[list[str], typer.Argument(help="NAME=WEIGHT for each arm that changes.")],
    url: Urls = None,
    token_env: TokenEnv = TOKEN,
) -> None:
    """Change the shares of arms. As few sessions as possible move; counting begins anew.

    Example: forebay experiment weights control=3 candidate=1
    """
    asked: dict[str, float] = {}
    for text in weight:
        name, _, value = text.partition("=")
        try:
            asked[name] = float(value)
        except ValueError:
            _bad_usage(f"{text!r}: NAME=WEIGHT, like candidate=0.5, would be right")
    for one in url or [HERE]:
        _print_changed(one, _call("PUT", one, "/admin/experiment/weights", token_env, asked))


@experiment.command()
def status(
    url: Urls = None,
    token_env: TokenEnv = TOKEN,
    as_json: Annotated[bool, typer.Option("--json", help="The whole document, as the admin API has it.")] = False,
) -> None:
    """What an experiment says so far, with intervals that may be looked at any time.

    Example: forebay experiment status --url http://gateway-1:8080 --url http://gateway-2:8080
    """
    urls = url or [HERE]
    shared = _call("GET", urls[0], "/admin/experiment", token_env)
    if shared.get("gateways") is not None:  # over Redis each knows what all counted
        _show(shared, as_json)
        return
    counted = [_call("GET", one, "/admin/experiment/counts", token_env) for one in urls]
    known = [trial.read(document) for document in counted if document]
    if not known:
        typer.echo("no experiment has run here")
        return
    if len(known) < len(urls):
        typer.echo(f"{len(urls) - len(known)} of {len(urls)} gateways run none", err=True)
    try:
        told = results(merged(known), time.time())
    except ValueError as e:
        typer.echo(f"cannot be added up: {e}", err=True)
        raise typer.Exit(1) from None
    _show(told, as_json)


def _show(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
    else:
        experiment_view.show(_console(), told)


@experiment.command()
def power(
    difference: Annotated[float, typer.Option(help="Difference in attainment to find, as 0.02.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second.")] = None,
    attainment: Annotated[float | None, typer.Option(help="Attainment now, as 0.93.")] = None,
    journal: Annotated[Path | None, typer.Option(help="Journal of a gateway to read all that from.")] = None,
    turns: Annotated[float, typer.Option(help="Requests of a session, without --journal.", min=1.0)] = 5.0,
    share: Annotated[float, typer.Option(help="Share of the traffic for the other arm.")] = 0.5,
    slice_s: Annotated[float, typer.Option(help="Length of a slice in seconds.")] = 120.0,
    wash_s: Annotated[float, typer.Option(help="Seconds at its beginning that are not counted.")] = 20.0,
) -> None:
    """How long each design must run until a difference of this size is found, in four runs of five.

    Example: forebay experiment power --difference 0.02 --journal /var/log/forebay/journal.jsonl

    Example: forebay experiment power --difference 0.02 --rate 20 --attainment 0.93
    """
    try:
        if journal is not None:
            traffic = _of_journal(journal, slice_s)
        elif rate is None or attainment is None:
            raise ValueError("give --journal, or --rate and --attainment")
        else:
            traffic = Traffic(rate, attainment, turns)
        if not 0.0 < share < 1.0:
            raise ValueError(f"--share {share:g}: above 0 and below 1 would be right")
        if not 0.0 <= wash_s < slice_s:
            raise ValueError(
                f"--wash-s {wash_s:g}: 0 or more and below --slice-s, which is {slice_s:g}, would be right"
            )
        split = (1.0 - share, share)
        rows = [("split, side by side", needs(Design.SPLIT, traffic, difference, split, slice_s, wash_s, 0.0))]
        rows.append(("split, swinging", needs(Design.SPLIT, traffic, difference, split, slice_s, wash_s)))
        rows += [
            (design.value, needs(design, traffic, difference, (1.0, 1.0), slice_s, wash_s))
            for design in (Design.PARTITION, Design.SWITCHBACK)
        ]
    except ValueError as e:
        _bad_usage(str(e))
    experiment_view.show_power(_console(), traffic, difference, rows)


def _of_journal(path: Path, slice_s: float) -> Traffic:
    """Lines that are none of a journal are passed over: a process that was killed may leave half of one."""
    rows: list[tuple[float, str | None, bool]] = []
    known = 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    told = orjson.loads(line)
                    counts = told["kind"] == "generate" and told["outcome"] != "client_error"
                    row = (float(told["received_unix"]), told.get("session"), told["partition"] == "good")
                except (KeyError, TypeError, ValueError):
                    continue
                known += 1
                if counts:
                    rows.append(row)
    except OSError as e:
        raise ValueError(f"--journal {path}: cannot be read: {e.strerror}") from None
    if not known:
        raise ValueError(f"--journal {path}: is no journal of a gateway: no line of it tells a request")
    try:
        return measured(rows, slice_s)
    except ValueError as e:
        raise ValueError(f"--journal {path}: {e}; --slice-s is their length") from None


def _call(
    method: str, url: str, path: str, token_env: str, body: Any = None, query: dict[str, str] | None = None
) -> dict[str, Any]:
    import httpx

    if not url.startswith(("http://", "https://")):
        _bad_usage(f"--url {url}: an address begins with http://, as {HERE}")
    token = os.environ.get(token_env)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    tried = url.rstrip("/") + path
    try:
        answer = httpx.request(method, tried, json=body, params=query, headers=headers, timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        _failed(f"--url {url}: no gateway answers: {e}")
    try:
        document: dict[str, Any] = answer.json()
    except ValueError:
        _failed(f"{url}: answered {answer.status_code}, not as a gateway does")
    if answer.status_code != 200:
        for line in document.get("errors") or [f"answered {answer.status_code}"]:
            typer.echo(f"{url}: {line}", err=True)
        raise typer.Exit(1)
    return document


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 150)


def _print_changed(url: str, answer: dict[str, Any]) -> None:
    for line in answer.get("changed", []):
        typer.echo(f"{url}: {line}")


def _failed(line: str) -> NoReturn:
    typer.echo(line, err=True)
    raise typer.Exit(1)


def _bad_usage(line: str) -> NoReturn:
    typer.echo(line, err=True)
    raise typer.Exit(2)
