"""The [redis] table of the configuration."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from gateway.sections import Seconds, Table


class RedisTable(Table):
    url: str | None = None
    """Redis or Valkey that several gateways share, as redis://10.0.0.5:6379/0 or rediss:// for TLS; left out: none."""
    user_env: str | None = None
    """Environment variable with its user name; left out: none."""
    password_env: str | None = None
    """Environment variable with its password; left out: none."""
    key_prefix: str = Field(default="forebay", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """All keys begin with it; gateways with the same prefix share a fleet."""
    gateway_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,64}$")
    """Name of this gateway among them; left out: host name and a random part, new at each start."""
    lookup_s: Seconds = 0.002
    """A request waits at most this long for what Redis knows of it, then goes on without."""
    call_s: Seconds = 0.25
    """Any call that takes longer has failed; Redis then counts as away until a call in the background succeeds."""
    register_s: Seconds = 0.1
    """Time between two exchanges of load with the other gateways."""
    expiry_s: Seconds = 1.0
    """A gateway that has not been heard of for this long counts as gone."""
    index_ttl_s: Seconds = 180.0
    """Prefixes that nobody sent anywhere for this long are forgotten."""

    @field_validator("url")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError("must begin with redis:// or rediss:// and name a host, as redis://10.0.0.5:6379/0")
        if parts.username or parts.password:
            raise ValueError("must not hold a user or password; name variables in user_env and password_env")
        _ = parts.port
        number = parts.path.strip("/")
        if number and not (number.isascii() and number.isdigit()):
            raise ValueError(f'must end with the number of a database, as /0; "{number}" is none')
        return value
