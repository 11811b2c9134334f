"""`forebay serve` and `forebay check`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from gateway import banner
from gateway.config import ConfigError, load

if TYPE_CHECKING:
    from gateway.app import Gateway

app = typer.Typer(no_args_is_help=True, add_completion=False)
FIRST_PROBES_S = 3.0  # the banner waits this long for replicas to answer


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file (TOML).")] = None,
    replica: Annotated[
        list[str] | None, typer.Option("--replica", "-r", help="Base URL of a vLLM replica; repeat it for each.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Routing policy, as NAME or NAME+admission+pacing.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 8080, 0 for any.")] = None,
) -> None:
    """Run the gateway in front of vLLM replicas.

    Example: forebay serve --replica http://10.0.0.7:8000 --replica http://10.0.0.8:8000

    Example: forebay serve --config gateway.toml

    Options on the command line win over the file, also when it is read again (kill -HUP).
    """
    from gateway.app import Gateway  # late, so that --help and check are quick
    from gateway.server import Server, listen, url

    overrides: dict[str, Any] = {}
    if replica:
        overrides["replicas"] = [{"url": one} for one in replica]
    if policy is not None:
        overrides["policy"] = {"name": policy}
    if host is not None or port is not None:
        overrides["listen"] = {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        settings = load(config, overrides)
        if config is None and not settings.replicas:
            raise ConfigError(["there is no replica: give --replica URL, or --config FILE with a [[replicas]] table"])
        gateway = Gateway(settings, config, overrides)
    except ConfigError as e:
        _mistakes(e)
    except OSError as e:
        _fail(f"{e.filename or 'journal'}: {e.strerror}")
    try:
        sock = listen(settings)
    except OSError as e:
        where = f"{settings.listen.host}:{settings.listen.port}"
        _fail(f"cannot listen on {where}: {e.strerror or e}; choose another with --host and --port")
    server = Server(gateway)

    async def run() -> None:
        greeting = asyncio.create_task(_greet(gateway, url(sock)))
        await server.serve(sockets=[sock])
        greeting.cancel()

    import uvloop

    uvloop.run(run())


@app.command()
def check(
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration file (TOML).")],
) -> None:
    """Check a configuration file: one line per mistake and exit status 2, or what it would do.

    Example: forebay check --config gateway.toml
    """
    try:
        settings = load(config)
    except ConfigError as e:
        _mistakes(e)
    Console().print(banner.settings(settings))


async def _greet(gateway: Gateway, address: str) -> None:
    """The banner, once the replicas have had time to answer their first probe."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(gateway.watch.settled.wait(), FIRST_PROBES_S)
    console = Console()
    console.print(banner.greeting(gateway, address))
    console.print(banner.example(gateway, address), markup=False, highlight=False, soft_wrap=True)


def _mistakes(error: ConfigError) -> NoReturn:
    for line in error.lines:
        typer.echo(line, err=True)
    raise typer.Exit(error.exit_status)


def _fail(line: str) -> NoReturn:
    typer.echo(line, err=True)
    raise typer.Exit(1)
