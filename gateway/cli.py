"""`forebay serve` and `forebay check`."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway import banner, plain_lines, sockets
from gateway.config import Config, ConfigError, load
from gateway.surroundings import lacking, no_place

app = typer.Typer(no_args_is_help=True, add_completion=False)
ONLY_CHECK = "FOREBAY_ONLY_CHECK"  # set where a running supervisor asks whether this program could take its place


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file (TOML).")] = None,
    replica: Annotated[
        list[str] | None, typer.Option("--replica", "-r", help="Base URL of a vLLM replica; repeat it for each.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Routing policy, as NAME or NAME+admission+pacing.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 8080, 0 for any.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that carry requests, beside one that decides; default 1.")
    ] = None,
) -> None:
    """Run the gateway in front of vLLM replicas.

    Example: forebay serve --replica http://10.0.0.7:8000 --replica http://10.0.0.8:8000

    Example: forebay serve --config gateway.toml --workers 4

    Options on the command line win over the file, also when it is read again (kill -HUP).
    """
    overrides: dict[str, Any] = {}
    if replica:
        overrides["replicas"] = [{"url": one} for one in replica]
    if policy is not None:
        overrides["policy"] = {"name": policy}
    if host is not None or port is not None:
        overrides["listen"] = {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    if workers is not None:
        overrides["workers"] = {"count": workers}
    plain_lines.begin()
    sockets.ask_for_more()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        settings = load(config, overrides)
        if config is None and not settings.replicas:
            raise ConfigError(["there is no replica: give --replica URL, or --config FILE with a [[replicas]] table"])
    except ConfigError as e:
        _mistakes(e)
    for said in no_place(settings):
        _fail(said)
    if settings.workers.count > 1:
        _several(settings, config, overrides)
    if os.environ.get(ONLY_CHECK):
        _fail("workers.count = 1: one process cannot take over from several; stop this gateway and start it again")
    _one(settings, config, overrides)


def _one(settings: Config, config: Path | None, overrides: dict[str, Any]) -> None:
    """Everything in this process."""
    from gateway.app import Gateway  # late, so that --help and check are quick
    from gateway.server import Server, listen, url

    try:
        gateway = Gateway(settings, config, overrides)
    except ConfigError as e:
        _mistakes(e)
    except OSError as e:
        _fail(f"{e.filename or 'journal'}: {e.strerror}")
    try:
        sock = listen(settings)
    except OSError as e:
        _fail(_no_port(settings, e))
    server = Server(gateway)

    async def run() -> None:
        greeting = asyncio.create_task(banner.greet(gateway, url(sock)))
        await server.serve(sockets=[sock])
        greeting.cancel()

    import uvloop

    uvloop.run(run())


def _several(settings: Config, config: Path | None, overrides: dict[str, Any]) -> NoReturn:
    """A core and its hands, in processes of their own."""
    from gateway import supervisor
    from gateway.tenants import Tenants

    try:
        Tenants.of(settings)
    except ConfigError as e:
        _mistakes(e)
    if os.environ.get(ONLY_CHECK):
        raise typer.Exit(0)
    try:
        run = supervisor.supervise(settings, config, overrides)
    except OSError as e:
        _fail(_no_port(settings, e))
    raise typer.Exit(run())


def _no_port(settings: Config, error: OSError) -> str:
    where = f"{settings.listen.host}:{settings.listen.port}"
    return f"cannot listen on {where}: {error.strerror or error}; choose another with --host and --port"


@app.command()
def check(
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration file (TOML).")],
) -> None:
    """Check a configuration file: one line per mistake and exit status 2, or what it would do.

    Environment variables that it names have to be set here too, as they will be for the gateway.

    Example: forebay check --config gateway.toml
    """
    try:
        settings = load(config)
        if lines := lacking(settings):
            raise ConfigError(lines)
    except ConfigError as e:
        _mistakes(e)
    banner.show(banner.settings(settings, f"{settings.listen.host}:{settings.listen.port}"))


def _mistakes(error: ConfigError) -> NoReturn:
    for line in error.lines:
        typer.echo(line, err=True)
    raise typer.Exit(error.exit_status)


def _fail(line: str) -> NoReturn:
    typer.echo(line, err=True)
    raise typer.Exit(1)
