"""Who may use the control plane, and under which name its changes are written down.

/admin answers bearer tokens from the environment: `admin.token_env`, named "admin", and further ones named in
`admin.tokens_env`. While none is set it answers loopback only, as "loopback": requests from this host, meant for it,
neither forwarded by a proxy here nor sent by a web page of somebody else. A wrong token and no token look alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse

from gateway.sections import Admin, Metrics
from gateway.tenants import same_secret

LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
LOCAL_NAMES = LOOPBACK | {"localhost"}


@dataclass(slots=True, frozen=True)
class Secrets:
    """Tokens from the environment: by name for /admin, one or none for /metrics."""

    admin: Mapping[str, str] = field(default_factory=dict, repr=False)
    metrics: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, admin: Admin, metrics: Metrics, environ: Mapping[str, str]) -> Secrets:
        named = {"admin": admin.token_env, **admin.tokens_env}
        tokens = {name: token for name, env in named.items() if (token := environ.get(env))}
        return cls(tokens, environ.get(metrics.token_env or "") or None)

    def administrator(self, request: Request) -> str | JSONResponse:
        """The name of whoever asks, or the refusal."""
        if not self.admin:
            if is_local(request):
                return "loopback"
            line = "without an admin token only loopback is answered; set FOREBAY_ADMIN_TOKEN at the gateway"
            return JSONResponse({"errors": [line]}, 403)
        given = _bearer(request)
        found = [name for name, token in self.admin.items() if same_secret(given, token)]  # all, in equal time
        return found[0] if found else _needed(given)

    def reader(self, request: Request) -> JSONResponse | None:
        """The refusal of /metrics, if it is one."""
        given = _bearer(request)
        return None if self.metrics is None or same_secret(given, self.metrics) else _needed(given)


def _bearer(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _needed(given: str) -> JSONResponse:
    line = "this token is not known here" if given else "a bearer token is needed: send Authorization: Bearer TOKEN"
    return JSONResponse({"errors": [line]}, 401, {"www-authenticate": "Bearer"})


def is_local(request: Request) -> bool:
    headers = request.headers
    if request.client is None or request.client.host not in LOOPBACK:
        return False
    if "x-forwarded-for" in headers or "forwarded" in headers:
        return False
    host = headers.get("host", "")
    try:
        named = urlsplit(f"//{host}").hostname
    except ValueError:  # as of "["
        return False
    if named not in LOCAL_NAMES:  # a foreign name that was made to resolve to loopback
        return False
    return headers.get("origin") in (None, f"http://{host}")
