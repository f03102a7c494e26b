"""uvicorn around the proxy, with admission and a health path."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from lifecycle_asgi import Admission
from lifecycle_asgi.asgi_types import App, Receive, Scope, Send
from lifecycle_asgi.responses import send_response
from lifecycle_tools.proxy.application import MAX_MESSAGE, Proxy
from lifecycle_tools.proxy.headers import ForwardedHeaders
from lifecycle_tools.proxy.upstream import Upstream


def create_app(
    upstream: Upstream,
    *,
    keep_host: bool = True,
    forwarded: ForwardedHeaders = ForwardedHeaders.REPLACE,
    max_message: int = MAX_MESSAGE,
    health_path: str | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> App:
    """Return the proxy under `lifecycle_asgi.Admission`, for any ASGI server.

    Args:
        upstream: Where requests go.
        keep_host: Pass on the client's ``Host``; if not, send that of the upstream.
        forwarded: What to do about ``X-Forwarded-*``.
        max_message: Most bytes of a message of a WebSocket; 0 refuses WebSockets.
        health_path: Answered with 200 by the proxy itself, whatever the upstream does.
        environment: Of the settings of `Admission`, instead of that of the process.
        **options: Attributes of `lifecycle_asgi.AdmissionSettings`.

    Raises:
        TypeError: An option is unknown or of another type.
        ValueError: An option, or a variable of the environment, is out of range.
    """
    environment = os.environ if environment is None else environment
    if "LIFECYCLE_CANCEL_DELAY" not in environment:
        # The delay of a profile is for a server that cleans up inside this process.
        options.setdefault("cancel_delay", 0.0)
    proxy = Proxy(
        upstream, keep_host=keep_host, forwarded=forwarded, max_message=max_message
    )
    admission = Admission(proxy, environment=environment, **options)
    if "slots" not in admission.statistics():
        what = "any number of requests at a time, in the upstream's own queue"
        how = "with LIFECYCLE_SLOTS, its clients take turns at so many places"
        logging.getLogger("lifecycle").info("Admission: %s; %s", what, how)

    async def entrance(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == health_path:
            headers = [(b"content-type", b"text/plain"), (b"content-length", b"3")]
            await send_response(send, (200, headers, b"ok\n"))
        else:
            await admission(scope, receive, send)

    return entrance


def serve(
    app: App,
    *,
    host: str,
    port: int,
    uds: str | None,
    drain_timeout: int,
    trusted_proxies: str,
    max_message: int,
    ping_timeout: float,
) -> None:
    """Serve *app* by uvicorn until SIGTERM or SIGINT, then drain.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port; 0 for any that is free.
        uds: Path of a unix socket instead of these.
        drain_timeout: Seconds for requests under way after SIGTERM.
        trusted_proxies: Addresses whose ``X-Forwarded-For`` names the client, separated
            by commas. Empty: the peer is the client.
        max_message: As for `create_app`.
        ping_timeout: Seconds in which the client of a WebSocket must answer a ping.

    Raises:
        ModuleNotFoundError: uvicorn is not installed.
    """
    import uvicorn

    from lifecycle_asgi.uvicorn_protocol import HeadersOnly
    from lifecycle_tools.proxy.sockets import BoundedSocket

    logging.getLogger("uvicorn.error").addFilter(_hide_cut_responses)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        uds=uds,
        http=HeadersOnly,
        ws=BoundedSocket if max_message else "none",
        ws_max_size=max_message,
        ws_ping_timeout=ping_timeout,
        ws_per_message_deflate=False,
        lifespan="on",
        # The upstream has sent its own.
        server_header=False,
        date_header=False,
        access_log=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=trusted_proxies or None,
        timeout_graceful_shutdown=drain_timeout,
        log_config=None,
    )
    uvicorn.Server(config).run()


def _hide_cut_responses(record: logging.LogRecord) -> bool:
    """Hide what uvicorn says of a response cut on purpose, and of each WebSocket.

    The lines of the latter would show queries, in which clients send keys.
    """
    hidden = (
        *("without completing response", "upgrade request", "WebSocket library"),
        *(' - "WebSocket ', "connection open", "connection closed"),
    )
    return not any(text in record.getMessage() for text in hidden)
