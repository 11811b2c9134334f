"""Which replica holds a response of /v1/responses: its state lives in the process that made it and nowhere else.

Asked anywhere else, vLLM answers `previous_response_id`, GET and cancel with 404. So a request that refers to a
response is pinned to its maker, whatever the load. An id that was not seen being made goes to the replica that must
have made it where there is only one, and is 404 where there are several: asking one at random would be right once
in N, and a client could not tell a typing error from bad luck. A maker that has restarted answers for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import Code, GatewayError

if TYPE_CHECKING:
    from gateway.proxy import Proxy


def holder(proxy: Proxy, response_id: str, name: str = "") -> str:
    """Id of the replica that holds a response; `name`: the model or adapter that is asked for now, if any.

    Raises GatewayError: 404 for a response nobody here can have, 400 where its replica does not serve the model.
    """
    shown = repr(response_id[:200])
    param = "previous_response_id" if name else "response_id"
    maker = proxy.maker(response_id)
    if maker is None:
        able = proxy.fleet.serving(name) if name else list(proxy.fleet.replicas.values())
        if not able:
            raise GatewayError(Code.NO_REPLICA, "no replica is there that could hold it", 1.0)
        if len(able) > 1:
            message = f"the response {shown} was not made through this gateway, or too long ago; send its content again"
            raise GatewayError(Code.UNKNOWN_RESPONSE, message, param=param)
        return able[0].id
    replica = proxy.fleet.get(maker)
    if replica is None:
        message = f"the replica that held the response {shown} is gone; send its content again"
        raise GatewayError(Code.UNKNOWN_RESPONSE, message, param=param)
    if name and name not in replica.models:
        message = f"the response {shown} is held by a replica that does not serve the model {name[:200]!r}"
        raise GatewayError(Code.MALFORMED, message, param=param)
    return maker
