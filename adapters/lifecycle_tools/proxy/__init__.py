"""``lifecycle proxy``: admission control beside a server that is not Python.

A reverse proxy for one upstream, as an ASGI application under
`lifecycle_asgi.Admission`. Needs the extra ``tools``.

Modules::

    headers       what passes between the two connections, and what is refused
    connection    one connection to the upstream
    upstream      its address, and the bounded pool of connections
    exchange      one request and its response
    tunnel        one WebSocket
    application   the ASGI application
    sockets       WebSockets of uvicorn, bounded
    server        uvicorn around it, with admission and a health path
    command       the options of the command
"""

from __future__ import annotations

try:
    import h11  # noqa: F401 - only its absence matters here
    import websockets  # noqa: F401 - likewise
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lifecycle proxy needs {error.name}; pip install "anyio-lifecycle[tools]"',
        name=error.name,
    ) from None

from lifecycle_tools.proxy.application import Proxy
from lifecycle_tools.proxy.headers import ForwardedHeaders
from lifecycle_tools.proxy.server import create_app
from lifecycle_tools.proxy.upstream import ProxyTimeouts, Upstream

__all__ = ("ForwardedHeaders", "Proxy", "ProxyTimeouts", "Upstream", "create_app")
