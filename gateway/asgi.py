"""The proxy as an ASGI application: whatever does not come whole over a connection of our own server.

Any HTTP scope is answered: paths outside the allow table with 404, wrong methods with 405, the list of models from what
the fleet told; every other request becomes an exchange, as a coroutine of the task that the server made for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway import endpoints, errors, headers, waits
from gateway.client import SPLICE, Client, Receive, Scope, Send, SendClient
from gateway.errors import Code, GatewayError
from gateway.exchange import Exchange

if TYPE_CHECKING:
    from gateway.proxy import Proxy


async def serve(proxy: Proxy, scope: Scope, receive: Receive, send: Send) -> None:
    """One request. Raises what breaks the connection off (`SendClient.run`)."""
    splice: Client | None = (scope.get("extensions") or {}).get(SPLICE)
    if splice is not None:
        await _answer(proxy, scope, splice)
        return
    client = SendClient(scope, receive, send)
    try:
        await _answer(proxy, scope, client)
        if client.gone:
            client.close()
        else:
            await client.run()
    except BaseException:
        client.close()
        raise


async def _answer(proxy: Proxy, scope: Scope, client: Client) -> None:
    endpoint = endpoints.find(scope["path"])
    method = scope["method"]
    if endpoint is None:
        message = "no such path is proxied here; see /dashboard, /docs for all paths, and /v1/... for models"
        _plain(proxy, scope, client, GatewayError(Code.UNKNOWN_PATH, message))
    elif method not in endpoint.methods and method != "OPTIONS":
        message = f"{method} is not possible here; use {endpoint.allow}"
        _plain(proxy, scope, client, GatewayError(Code.METHOD_NOT_ALLOWED, message, allow=endpoint.allow))
    elif proxy.draining:
        _plain(proxy, scope, client, GatewayError(Code.DRAINING, "the gateway is shutting down", 1.0))
    elif endpoint is endpoints.MODELS and method != "OPTIONS":
        _models(proxy, scope, client)
    elif method == "OPTIONS":
        await waits.run(Exchange(proxy, scope, client, endpoints.PREFLIGHT))
    else:
        await waits.run(Exchange(proxy, scope, client, endpoint))


def _plain(proxy: Proxy, scope: Scope, client: Client, error: GatewayError) -> None:
    """A refusal that needs no request to be read."""
    endpoint = endpoints.find(scope["path"])
    request_id = headers.request_id(dict(scope["headers"]).get(b"x-request-id"))
    lines = [*errors.headers(error, proxy.rng), (b"x-request-id", request_id)]
    api = errors.Api.OTHER if endpoint is None else endpoint.api
    client.respond(error.status, lines, errors.body(error, api, request_id.decode("latin-1")))


def _models(proxy: Proxy, scope: Scope, client: Client) -> None:
    """GET /v1/models, merged over the fleet."""
    try:
        proxy.authenticate(dict(reversed(scope["headers"])))
    except GatewayError as error:
        _plain(proxy, scope, client, error)
        return
    request_id = headers.request_id(dict(scope["headers"]).get(b"x-request-id"))
    client.respond(200, [errors.JSON_TYPE, (b"x-request-id", request_id)], proxy.fleet.models_document())
