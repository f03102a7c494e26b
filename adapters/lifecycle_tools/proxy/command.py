"""The options of ``lifecycle proxy``."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from lifecycle_tools.proxy.headers import ForwardedHeaders
from lifecycle_tools.proxy.server import ListenSettings, create_app, serve
from lifecycle_tools.proxy.upstream import ProxyTimeouts, Upstream

_UPSTREAM = "Upstream"
_LISTEN = "Listen"
_TIMEOUTS = "Timeouts, in seconds"
_HEADERS = "Headers"


# Options, apart from the function that is short without them.
UpstreamUrl = Annotated[
    str,
    typer.Option(
        help="http://HOST:PORT, https://HOST or unix:PATH.",
        rich_help_panel=_UPSTREAM,
    ),
]
MaxConnectionsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Connections to the upstream at a time; as many requests wait.",
        rich_help_panel=_UPSTREAM,
    ),
]
HostOption = Annotated[str, typer.Option(help="Address.", rich_help_panel=_LISTEN)]
PortOption = Annotated[int, typer.Option(help="Port.", rich_help_panel=_LISTEN)]
UdsOption = Annotated[
    str | None,
    typer.Option(help="Path of a unix socket instead.", rich_help_panel=_LISTEN),
]
HealthPathOption = Annotated[
    str | None,
    typer.Option(
        help="A path that the proxy answers itself, with 200.",
        rich_help_panel=_LISTEN,
    ),
]
ConnectTimeoutOption = Annotated[
    float,
    typer.Option(help="For a connection to the upstream.", rich_help_panel=_TIMEOUTS),
]
HeadTimeoutOption = Annotated[
    float,
    typer.Option(
        help="From a request to the head of its response.",
        rich_help_panel=_TIMEOUTS,
    ),
]
IdleTimeoutOption = Annotated[
    float,
    typer.Option(
        help="Between two pieces of a response, or of a body.",
        rich_help_panel=_TIMEOUTS,
    ),
]
UpstreamKeepAliveOption = Annotated[
    float,
    typer.Option(
        help="An unused connection is kept for so long; 0 keeps none. Less than "
        "the upstream keeps it.",
        rich_help_panel=_TIMEOUTS,
    ),
]
DrainTimeoutOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="For requests under way after SIGTERM.",
        rich_help_panel=_TIMEOUTS,
    ),
]
KeepHostOption = Annotated[
    bool,
    typer.Option(
        "--keep-host/--rewrite-host",
        help="Pass on the client's Host, or send that of the upstream.",
        rich_help_panel=_HEADERS,
    ),
]
ForwardedOption = Annotated[
    ForwardedHeaders,
    typer.Option(
        help="Pass X-Forwarded-* on, add to them, or replace them.",
        rich_help_panel=_HEADERS,
    ),
]
TrustedProxiesOption = Annotated[
    str,
    typer.Option(
        help="Addresses, separated by commas, whose X-Forwarded-For names the client.",
        rich_help_panel=_HEADERS,
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
    connect_timeout: ConnectTimeoutOption = 5.0,
    head_timeout: HeadTimeoutOption = 600.0,
    idle_timeout: IdleTimeoutOption = 300.0,
    upstream_keep_alive: UpstreamKeepAliveOption = 3.0,
    drain_timeout: DrainTimeoutOption = 30,
    keep_host: KeepHostOption = True,
    forwarded: ForwardedOption = ForwardedHeaders.KEEP,
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
        app = create_app(
            Upstream(upstream, timeouts=timeouts, max_connections=max_connections),
            keep_host=keep_host,
            forwarded=forwarded,
            health_path=health_path,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    listen = ListenSettings(
        host=host,
        port=port,
        uds=uds,
        drain_timeout=drain_timeout,
        trusted_proxies=trusted_proxies,
    )
    serve(app, listen)


def run(arguments: Sequence[str]) -> None:
    """Run ``lifecycle proxy`` with *arguments*."""
    command = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    command.command()(proxy)
    command(list(arguments), prog_name="lifecycle proxy")
