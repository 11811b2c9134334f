"""What `forebay serve` says once it listens, and `forebay check` about a valid file. For people; nothing parses it."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.table import Table

from gateway.config import Config

if TYPE_CHECKING:
    from gateway.app import Gateway


LOG_COLUMNS = 100_000  # a row is as wide as it is
FIRST_PROBES_S = 3.0  # the banner waits this long for replicas to answer


async def greet(gateway: Gateway, address: str) -> None:
    """The banner, once the replicas have had time to answer their first probe."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_PROBES_S):
            await gateway.watch.settled.wait()
    show(greeting(gateway, address))
    Console().print(example(gateway, address), markup=False, highlight=False, soft_wrap=True)


def show(table: Table) -> None:
    """On a terminal as wide as it is; in a log, where nobody wraps lines, a row is one line that ends with its text."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    console.width = LOG_COLUMNS
    with console.capture() as caught:
        console.print(table)
    console.print("\n".join(map(str.rstrip, caught.get().splitlines())), markup=False, highlight=False, soft_wrap=True)


def greeting(gateway: Gateway, address: str) -> Table:
    """Where it listens and which replicas it sees."""
    config = gateway.control.config
    table = settings(config)
    table.title = f"Forebay listens on {address}"
    for replica in gateway.fleet.replicas.values():
        record = gateway.fleet.health.records[replica.id]
        models = ", ".join(sorted(replica.models)) or "models not known yet"
        state = "ready" if gateway.fleet.available(replica.id) else f"not ready: {record.reason or record.phase.value}"
        table.add_row("replica", f"{replica.url}  {state}  [dim]{models}[/dim]")
    if not gateway.fleet.replicas:
        table.add_row("replica", "none; add one with POST /admin/fleet")
    if not gateway.secrets.admin:
        table.add_row("admin", f"{address}/admin, loopback only; set {config.admin.token_env} to open it to others")
    else:
        table.add_row("admin", f"{address}/admin, with the token of {config.admin.token_env}")
    table.add_row("dashboard", f"{address}/dashboard")
    table.add_row("more", f"{address}/docs  {address}/metrics  {address}/ready")
    return table


def example(gateway: Gateway, address: str) -> str:
    """A line to try it with."""
    served = (m.id for r in gateway.fleet.replicas.values() for m in r.models.values() if m.parent is None)
    body = {"model": next(served, "MODEL"), "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    quoted = shlex.quote(orjson.dumps(body).decode())
    key = "-H 'authorization: Bearer KEY' " if gateway.control.config.tenants else ""
    return f"curl -N {address}/v1/chat/completions {key}-H 'content-type: application/json' -d {quoted}"


def settings(config: Config, address: str = "") -> Table:
    """What a configuration means, in a few lines; with `address` also where it would listen."""
    table = Table(show_header=False, box=None, padding=(0, 2), title="Configuration is valid", title_justify="left")
    if address:
        table.add_row("listens on", address)
    arm = config.arm()
    parts = [
        name
        for name, on in (
            ("admission", arm.settings.admission),
            ("pacing", arm.settings.pacing),
            ("working set", arm.settings.working_set),
        )
        if on
    ]
    table.add_row("policy", f"{arm.policy}, with {', '.join(parts)}" if parts else f"{arm.policy}, dispatched at once")
    classes = (f"{name} (default)" if name == config.default_class else name for name in config.classes)
    table.add_row("classes", ", ".join(classes))
    table.add_row("replicas", replicas(config))
    table.add_row("clients", _clients(len(config.tenants)))
    count = config.workers.count
    table.add_row("workers", f"{count}, and a core that decides" if count > 1 else "1; everything in one process")
    table.add_row("journal", config.journal.path or "none")
    if config.redis.url:
        table.add_row("redis", f"{config.redis.url}, shared by all gateways with the prefix {config.redis.key_prefix}")
    return table


def _clients(tenants: int) -> str:
    if not tenants:
        return "no key needed"
    return "1 tenant with keys" if tenants == 1 else f"{tenants} tenants with keys"


def replicas(config: Config) -> str:
    """How many are configured, and where others come from."""
    d = config.discovery
    sources = (
        (f"{len(config.replicas)} configured", bool(config.replicas)),
        (f"those of {d.file.path}", d.file.path is not None),
        (f"those of {', '.join(d.dns.names)}", bool(d.dns.names)),
        (f"EndpointSlices with {d.kubernetes.selector}", d.kubernetes.selector is not None),
    )
    return "; ".join(text for text, there in sources if there) or "none"
