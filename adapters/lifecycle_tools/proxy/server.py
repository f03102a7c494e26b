"""uvicorn around the proxy, with admission and a health path."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lifecycle_asgi import Admission
from lifecycle_tools.proxy.application import MAX_MESSAGE, Proxy
from lifecycle_tools.proxy.headers import ForwardedHeaders
from lifecycle_tools.proxy.responses import App, Receive, Scope, Send
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
    return _Entrance(admission, health_path)


class _Entrance:
    """Answers the health path."""

    def __init__(self, app: App, health_path: str | None) -> None:
        self._app = app
        self._health_path = health_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_health = scope["type"] == "http" and scope["path"] == self._health_path
        await (_send_health(send) if is_health else self._app(scope, receive, send))


async def _send_health(send: Send) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"3")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok\n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where and how the proxy listens.

    Attributes:
        port: Port; 0 for any that is free.
        drain_timeout: Seconds for requests under way after SIGTERM.
        keep_alive: Seconds that an unused connection of a client is kept.
        trusted_proxies: Addresses whose ``X-Forwarded-For`` names the client, separated
            by commas. Empty: the peer is the client.
        backlog: Connections that wait in the kernel.
        max_message: As for `create_app`.
        ping_timeout: Seconds in which the client of a WebSocket must answer a ping.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    uds: str | None = None
    drain_timeout: int = 30
    keep_alive: int = 5
    trusted_proxies: str = ""
    backlog: int = 2048
    max_message: int = MAX_MESSAGE
    ping_timeout: float = 300.0


def serve(app: App, settings: ListenSettings) -> None:
    """Serve *app* by uvicorn until SIGTERM or SIGINT, then drain.

    Raises:
        ModuleNotFoundError: uvicorn is not installed.
    """
    import uvicorn

    from lifecycle_asgi.uvicorn_protocol import HeadersOnly
    from lifecycle_tools.proxy.sockets import BoundedSocket

    logging.getLogger("uvicorn.error").addFilter(_hide_cut_responses)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        backlog=settings.backlog,
        http=HeadersOnly,
        ws=BoundedSocket if settings.max_message else "none",
        ws_max_size=settings.max_message,
        ws_ping_timeout=settings.ping_timeout,
        ws_per_message_deflate=False,
        lifespan="on",
        # The upstream has sent its own.
        server_header=False,
        date_header=False,
        access_log=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
        timeout_graceful_shutdown=settings.drain_timeout,
        timeout_keep_alive=settings.keep_alive,
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
