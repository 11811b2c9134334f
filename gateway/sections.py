"""The tables of the configuration file, one class each: name, unit, default and meaning of every key.

This file is the reference: `deploy/gateway.toml` and the error messages are checked against it. Values are strict
(no number in quotes), unknown keys are errors, and where TOML has no null the word "none" switches a bound off.
Reading and checking across tables is in `config.py`; what only the decision core needs is in `tuning.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from ipaddress import ip_address
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from policies.classes import DEFAULT_CLASSES
from policies.model import ServiceClass


def _none(value: Any) -> Any:
    return None if value == "none" else value


def _address(value: str) -> str:
    """As a peer's address is spelled. Raises ValueError."""
    try:
        return str(ip_address(value))
    except ValueError:
        raise ValueError("must be one IP address, as 10.0.0.4; no name, port or network") from None


Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
SecondsOrNone = Annotated[Seconds | None, BeforeValidator(_none)]
RateOrNone = SecondsOrNone
CountOrNone = Annotated[Count | None, BeforeValidator(_none)]
Share = Annotated[float, Field(ge=0, le=1)]
Address = Annotated[str, AfterValidator(_address)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]


class Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Listen(Table):
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; "0.0.0.0" for all of IPv4, "::" for all of IPv6."""
    port: int = Field(default=8080, ge=0, le=65535)
    """TCP port; 0 takes any free one."""
    backlog_connections: int = Field(default=2048, gt=0, le=65535)
    """Connections the kernel may queue before they are accepted."""
    keep_alive_s: float = Field(default=75.0, ge=1)
    """Idle time after which a client's connection is closed, whole seconds; also one that never sends anything."""
    trusted_proxies: list[Address] = []
    """Addresses whose x-forwarded-* and forwarded headers are kept and extended; from others they are replaced."""
    drain_s: Seconds = 30.0
    """Longest time that open streams may take to finish after SIGTERM."""


class Workers(Table):
    count: int = Field(default=1, ge=1, le=256)
    """Processes that carry requests; above 1 they share one core process that decides. 1: everything in one process."""
    answer_s: Seconds = 0.5
    """A core that answers nothing for this long counts as dead: workers decide by themselves until it is back."""
    hang_s: Seconds = 10.0
    """A process whose event loop stands still for this long is killed and replaced."""


class Limits(Table):
    max_body_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    """Largest request body; beyond it 413."""
    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    """Largest sum of request headers; beyond it 431."""
    body_timeout_s: Seconds = 60.0
    """Longest time for a request body to arrive; beyond it 408."""
    held_requests: int = Field(default=4000, gt=0)
    """Most requests held for dispatch; beyond it 429 queue_full."""
    held_bytes: int = Field(default=512 * 1024 * 1024, gt=0)
    """Most bytes of bodies of held requests; beyond it 429 queue_full."""
    receiving_bytes: int = Field(default=256 * 1024 * 1024, gt=0)
    """Most bytes of bodies that are on their way in at once; beyond it 429 queue_full."""
    loop_lag_s: SecondsOrNone = 0.25
    """Smoothed lag of the event loop above which sheddable requests get 429 queue_full, until half of it; or "none"."""


class Timeouts(Table):
    connect_s: Seconds = 2.0
    """Connecting to a replica."""
    first_event_s: Seconds = 120.0
    """From dispatch to the first event of a stream; beyond it the attempt counts as failed."""
    idle_s: Seconds = 60.0
    """Between two events of a stream; keep-alive comments do not count."""
    answer_s: SecondsOrNone = 600.0
    """From dispatch to the headers of an answer that is not streamed; "none" leaves it to the request's deadline."""
    pool_idle_s: Seconds = 3.5
    """Idle upstream connections are closed after this; vLLM closes them after 5 s."""
    client_stall_s: SecondsOrNone = 120.0
    """A client that takes nothing of its answer for this long is closed and its replica freed; "none" waits for it."""


class Stream(Table):
    commit_after_s: Seconds = 15.0
    """A stream without content for this long is answered with 200 and comments, so that proxies keep it open."""
    keep_alive_comment_s: Seconds = 10.0
    """Time between our own comments after that."""
    usage: Literal["ask", "off"] = "ask"
    """"ask" adds include_usage to streams of one answer and keeps the extra event back; "off" changes no byte."""


class Retry(Table):
    budget_share: Share = 0.1
    """Retries allowed as a share of requests."""
    budget_per_s: float = Field(default=1.0, ge=0)
    """Retries allowed per second on top of that."""
    max_attempts: int = Field(default=3, ge=1, le=10)
    """Most attempts of one request, the first included."""


class Replica(Table):
    url: str
    """Base URL, as http://10.0.0.7:8000; may have a path prefix."""
    id: Name | None = None
    """Name in metrics, headers and the admin API; host:port by default."""
    models: list[str] = []
    """Models it serves; empty asks its /v1/models and keeps asking."""
    weight: float = Field(default=1.0, gt=0)
    """Relative size, for policies that cannot measure it."""
    role: Literal["both", "prefill", "decode"] = "both"
    """Part it plays where prefill and decode are separate."""
    key_env: str | None = None
    """Environment variable with the replica's own API key."""
    ca_file: str | None = None
    """PEM file of the private authority that signed its certificate."""

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not (value.isascii() and value.isprintable()) or " " in value:  # it goes into the head of every request
            raise ValueError("must be plain ASCII without spaces; write others as %XX, or xn-- in a host")
        parts = urlsplit(value)
        if any(not 0 < len(label) < 64 for label in (parts.hostname or "x").rstrip(".").split(".")):
            raise ValueError("must name a host whose parts have 1 to 63 characters")
        if parts.username or parts.password:
            raise ValueError("must not hold a user or password; use key_env")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a base URL, as http://10.0.0.7:8000")
        if parts.query or parts.fragment:
            raise ValueError("must end at the path; leave out ? and #")
        if parts.port == 0:  # asking raises ValueError when it is not a number up to 65535
            raise ValueError("must name a port from 1 to 65535")
        return value.rstrip("/")

    @property
    def name(self) -> str:
        if self.id:
            return self.id
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}" + parts.path


class ClassTable(Table):
    ttft_s: SecondsOrNone = 10.0
    """Objective for the time to first token; "none" for no objective."""
    ttft_s_per_token: float = Field(default=0.0005, ge=0)
    """Added to ttft_s per prompt token."""
    tpot_s: SecondsOrNone = 0.2
    """Objective for the mean time per token after the first; "none" for no objective."""
    itl_s: SecondsOrNone = None
    """Objective for the longest gap between content events; "none" for no objective."""
    e2e_s: SecondsOrNone = None
    """Deadline of the whole request; past it the request is cancelled. "none" for no deadline."""
    weight: float = Field(default=1.0, gt=0)
    """Value of a good request, and the share between classes."""
    floor_share: Share = 0.0
    """Share of prefill time it keeps whatever the others do."""
    sheddable: bool = True
    """Whether admission may refuse its requests."""
    max_wait_s: SecondsOrNone = None
    """Longest hold in the gateway; "none" holds until the latest start."""
    fill_only: bool = False
    """Runs only in spare pacing and KV headroom."""
    engine_priority: Annotated[int | None, BeforeValidator(_none)] = None
    """Priority forwarded to replicas that schedule by it (lower first); "none" sends none."""

    def build(self, name: str) -> ServiceClass:
        return ServiceClass(name=name, **self.model_dump())


CLASSES = {
    known.name: ClassTable(**{key: value for key, value in asdict(known).items() if key != "name"})
    for known in DEFAULT_CLASSES
}


class Tenant(Table):
    keys_sha256: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = []
    """SHA-256 of each API key in lower-case hex: printf %s "$KEY" | sha256sum."""
    keys_env: list[str] = []
    """Environment variables that hold its API keys."""
    classes: list[str] = []
    """Service classes it may ask for; empty: all."""
    default_class: str | None = None
    """Class of its requests without the x-service-class header; the gateway's default_class otherwise."""
    weight: float = Field(default=1.0, gt=0)
    """Share against other tenants of the same class."""
    requests_per_s: RateOrNone = None
    """Rate limit in requests; "none" for no limit."""
    request_burst: int = Field(default=20, gt=0)
    """Requests that may come at once on top of the rate."""
    tokens_per_s: RateOrNone = None
    """Rate limit in prompt plus output tokens, charged by estimate and settled by usage; "none" for no limit."""
    token_burst: int = Field(default=200_000, gt=0)
    """Tokens that may come at once on top of the rate."""
    concurrency: CountOrNone = None
    """Most requests open at once; "none" for no limit."""


class PolicyTable(Table):
    name: str = "forebay"
    """Routing policy, as NAME or NAME+admission+pacing; see admission.enabled and pacing.enabled."""
    settings: dict[str, Any] = {}
    """Settings of that policy, as its documentation names them."""
    seed: int | None = None
    """Seed of its randomness, for runs that must be repeatable; left out: a new one each start."""
    alternatives: int = Field(default=3, ge=0, le=64)
    """Replicas not chosen that are recorded with each decision."""


class Scrape(Table):
    interval_s: Seconds = 1.0
    """Time between two reads of a replica's /metrics."""
    jitter_share: Share = 0.1
    """Random part of that time, so that gateways do not scrape in step."""
    timeout_s: Seconds = 2.0
    """Longest time for one read."""
    models_refresh_s: Seconds = 30.0
    """Time between two reads of a replica's /v1/models."""


class Health(Table):
    probe_interval_s: Seconds = 2.0
    """Time between two reads of a replica's /health."""
    probe_timeout_s: Seconds = 2.0
    """Longest time for one probe."""
    probe_failures: int = Field(default=2, ge=1)
    """Failed probes in a row that eject a replica; one refused connect does, late ones only if nothing else came."""
    canary: bool = True
    """Asks an ejected replica for one token before it returns, since /health stays 200 while an engine hangs."""
    canary_timeout_s: Seconds = 10.0
    """Longest time for that token."""
    failures_in_row: int = Field(default=3, ge=1)
    """Failed attempts in a row (5xx, resets, timeouts, error events) that eject a replica."""
    failure_share: Share = 0.5
    """Share of failed attempts in the window that ejects a replica."""
    failure_window_s: Seconds = 30.0
    """Length of that window."""
    failure_min_attempts: int = Field(default=10, ge=1)
    """Attempts in the window below which the share is not judged."""
    hang_s: Seconds = 10.0
    """In flight and no engine step, or a port shut, for so long: what has no content yet is tried elsewhere."""
    backoff_s: Seconds = 2.0
    """First time out of rotation; doubles with each ejection in a row."""
    backoff_max_s: Seconds = 60.0
    """Longest time out of rotation."""
    half_open_requests: int = Field(default=3, ge=1)
    """Successful attempts after a return that clear its record."""
    panic_share: Share = 0.5
    """Ejection by failed attempts stops once fewer than this share of the fleet would be left."""
    slow_start_s: float = Field(default=10.0, ge=0)
    """Time over which a new or returned replica is eased in."""


class Journal(Table):
    path: str | None = None
    """File of one JSON line per request; left out: no journal."""
    max_bytes: int = Field(default=100 * 1024 * 1024, gt=0)
    """Size at which the file is rotated."""
    files: int = Field(default=5, ge=1)
    """Rotated files that are kept."""
    queue_lines: int = Field(default=10_000, gt=0)
    """Lines that may wait for the disk; more are dropped and counted."""
    secret_env: str = "FOREBAY_JOURNAL_SECRET"
    """Environment variable whose value keys the hashes; without it a new key is drawn at each start."""
    prompt_samples: bool = False
    """Writes prompt text into the journal; off unless its readers may see what users write."""


class Prefixes(Table):
    enabled: bool = True
    """Finds prompt families and what keeps their prompts from being shared; sees what has a prefix chain."""
    cpu_share: Annotated[float, Field(gt=0, le=0.5)] = 0.01
    """Most of one core that looking into prompts may take; of more only a sample is looked at."""
    families: int = Field(default=200, ge=1, le=10_000)
    """Families kept."""
    samples: bool = False
    """Shows 80 bytes of prompt around each split; off unless its readers may see what users write."""


class Metrics(Table):
    token_env: str | None = None
    """Environment variable with the bearer token for /metrics; left out: open."""


class Admin(Table):
    token_env: str = "FOREBAY_ADMIN_TOKEN"
    """Environment variable with the bearer token for /admin; when it is unset only loopback is answered."""
    tokens_env: dict[Name, str] = Field(default={})
    """Variables with further tokens by the name that audit lines give, as {"deployer" = "DEPLOYER_TOKEN"}."""
    versions: int = Field(default=10, ge=1)
    """Configurations kept for rollback."""
