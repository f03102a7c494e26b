"""The options of ``lifecycle proxy``."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from lifecycle_tools.proxy.application import MAX_MESSAGE
from lifecycle_tools.proxy.headers import ForwardedHeaders
from lifecycle_tools.proxy.server import create_app, serve
from lifecycle_tools.proxy.upstream import ProxyTimeouts, Upstream

_upstream = partial(typer.Option, rich_help_panel="Upstream")
_listen = partial(typer.Option, rich_help_panel="Listen")
_timeout = partial(typer.Option, rich_help_panel="Timeouts, in seconds")
_headers = partial(typer.Option, rich_help_panel="Headers")

# Options, apart from the function that is short without them.
UpstreamUrl = Annotated[
    str, _upstream(help="http://HOST:PORT, https://HOST or unix:PATH.")
]
MaxConnectionsOption = Annotated[
    int,
    _upstream(
        min=1, help="Connections to the upstream at a time; as many requests wait."
    ),
]
HostOption = Annotated[str, _listen(help="Address.")]
PortOption = Annotated[int, _listen(min=0, max=65535, help="Port.")]
UdsOption = Annotated[str | None, _listen(help="Path of a unix socket instead.")]
HealthPathOption = Annotated[
    str | None, _listen(help="A path that the proxy answers itself, with 200.")
]
MaxMessageOption = Annotated[
    int,
    _listen(
        min=0,
        help="Bytes of a message of a WebSocket, in both directions; 0 refuses "
        "WebSockets.",
    ),
]
ConnectTimeoutOption = Annotated[
    float, _timeout(help="For a connection to the upstream.")
]
HeadTimeoutOption = Annotated[
    float, _timeout(help="From a request to the head of its response.")
]
IdleTimeoutOption = Annotated[
    float,
    _timeout(
        help="Between two pieces of a response, or of a body; and for each message of "
        "a WebSocket to be taken, and each ping to be answered."
    ),
]
UpstreamKeepAliveOption = Annotated[
    float,
    _timeout(
        help="An unused connection is kept for so long; 0 keeps none. Less than "
        "the upstream keeps it."
    ),
]
DrainTimeoutOption = Annotated[
    int, _timeout(min=0, help="For requests under way after SIGTERM.")
]
KeepHostOption = Annotated[
    bool,
    _headers(
        "--keep-host/--rewrite-host",
        help="Pass on the client's Host, or send that of the upstream.",
    ),
]
ForwardedOption = Annotated[
    ForwardedHeaders,
    _headers(
        help="Replace X-Forwarded-* of clients, add to them, or pass them on, behind "
        "another proxy."
    ),
]
TrustedProxiesOption = Annotated[
    str,
    _headers(
        help="Addresses, separated by commas, whose X-Forwarded-For names the client."
    ),
]


def proxy(
    *,
    upstream: UpstreamUrl,
    max_connections: MaxConnectionsOption = 1000,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    uds: UdsOption = None,
    health_path: HealthPathOption = None,
    max_message: MaxMessageOption = MAX_MESSAGE,
    connect_timeout: ConnectTimeoutOption = 5.0,
    head_timeout: HeadTimeoutOption = 600.0,
    idle_timeout: IdleTimeoutOption = 300.0,
    upstream_keep_alive: UpstreamKeepAliveOption = 3.0,
    drain_timeout: DrainTimeoutOption = 30,
    keep_host: KeepHostOption = True,
    forwarded: ForwardedOption = ForwardedHeaders.REPLACE,
    trusted_proxies: TrustedProxiesOption = "",
) -> None:
    """Admit requests in front of a server of any kind, and end what clients leave.

    The limits are those of lifecycle_asgi.Admission, from LIFECYCLE_* in the
    environment: LIFECYCLE_BYTES=8GiB, LIFECYCLE_MAX_BODY, LIFECYCLE_MAX_WAITING,
    LIFECYCLE_MAX_WAIT, LIFECYCLE_BODY_TIMEOUT, LIFECYCLE_SLOW_AFTER,
    LIFECYCLE_PROFILE, LIFECYCLE_TENSOR_PIXELS, LIFECYCLE_CANCEL_DELAY,
    LIFECYCLE_PER_CLIENT, LIFECYCLE_METRICS=9400, LIFECYCLE_API_KEYS and
    LIFECYCLE_GUARDED_PREFIXES.
    """
    try:
        if os.environ.get("LIFECYCLE_METRICS") == "server":  # it would show nothing
            what = "the proxy has no /metrics of its own"
            raise ValueError(f"LIFECYCLE_METRICS must be a port: {what}")
        timeouts = ProxyTimeouts(
            connect=connect_timeout,
            head=head_timeout,
            idle=idle_timeout,
            keep_alive=upstream_keep_alive,
        )
        _check_listener(host, port, uds)
        app = create_app(
            Upstream(upstream, timeouts=timeouts, max_connections=max_connections),
            keep_host=keep_host,
            forwarded=forwarded,
            max_message=max_message,
            health_path=health_path,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    serve(
        app,
        host=host,
        port=port,
        uds=uds,
        drain_timeout=drain_timeout,
        trusted_proxies=trusted_proxies,
        max_message=max_message,
        ping_timeout=idle_timeout,
    )


def _check_listener(host: str, port: int, uds: str | None) -> None:
    """Raise `ValueError` for a host without address, or the socket of another server.

    uvicorn takes the path away from a server that listens there, which then runs on
    without clients, and of a host it shows no name.
    """
    try:
        if uds is None:
            socket.getaddrinfo(host or None, port, flags=socket.AI_PASSIVE)
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # the server may accept no one
            taken = probe.connect_ex(uds) in (0, errno.EAGAIN)
    except OSError as error:
        what = f"--host {host}" if uds is None else f"--uds {uds}"
        why = error.strerror or str(error)
        raise ValueError(f"{what}: {why}; give another") from None
    if taken:
        raise ValueError(f"--uds {uds}: a server listens there; stop it first")


def run(arguments: Sequence[str]) -> None:
    """Run ``lifecycle proxy`` with *arguments*."""
    # What is missing is one line, so this comes before anything is logged.
    import lifecycle_asgi.uvicorn_protocol  # noqa: F401

    # Before there is an `Admission`, which logs its budget.
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    command = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    command.command()(proxy)
    command(list(arguments), prog_name="lifecycle proxy")
