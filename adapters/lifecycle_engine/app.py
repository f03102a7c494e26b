"""The HTTP server around an engine, as a Starlette application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from . import http  # noqa: F401 - says first what is missing

# isort: split
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lifecycle import Gate, Refused, SessionRegistry
from lifecycle.events import Observer
from lifecycle_asgi import (
    BodyLimit,
    BodyTooLarge,
    BodyTooSlow,
    ClientLimit,
    LifecycleMiddleware,
    client_address,
)

from .api_errors import INTERNAL, ApiError, describe
from .defaults import ChatDefaults
from .dialects.dialect import Dialect, dump
from .dialects.generate_dialect import PLAIN
from .dialects.messages_wire import ANTHROPIC
from .dialects.openai_dialect import OPENAI
from .dialects.responses_dialect import RESPONSES
from .http.https_get import HttpsGet
from .images.media import MediaLimits
from .images.remote_images import RemoteImages
from .incoming import Intake, request_id
from .processor import Processor
from .routes.bodies import BodyReader
from .routes.cancels import Cancels
from .routes.early import Early
from .routes.generate import Generate
from .routes.live import LiveView
from .routes.measuring import Measuring
from .routes.observing import log_failures, operation_of, together
from .routes.turns import Turns
from .service import Deadlines, Engine, Service

if TYPE_CHECKING:
    from lifecycle_metrics import Metrics

# Of a body that waits to be let in. It is what many clients cost that wait at a time.
_READ_AHEAD = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What an application is told beside its engine.

    Attributes:
        model: The name that clients ask for.
        body_bytes: The largest request body.
        body_idle: Seconds that a body may stand still, or take for 64 KiB.
        body_patience: Seconds that a body may take while others wait for its room.
        text_chars: The most text of one request.
        media: Limits on images.
        defaults: For requests that do not say.
        deadlines: For the engine.
        threads: Requests that are preprocessed at a time, and parsed at a time.
        end_timeout: Seconds that the END of one request may take.
        per_client: Requests of one client at a time; ``None`` is unbounded.
        client: Whose a request is: whose share, and whose conversations.
        fetch: Brings images that requests name by https URLs; ``None`` refuses them.
        measured_every: Seconds from one `events.EngineMeasured` to the next.
    """

    model: str = "lifecycle"
    body_bytes: int = 64 * 2**20
    body_idle: float = 10.0
    body_patience: float = 30.0
    text_chars: int = 2**20
    media: MediaLimits = field(default_factory=MediaLimits)
    defaults: ChatDefaults = field(default_factory=ChatDefaults)
    deadlines: Deadlines = field(default_factory=Deadlines)
    threads: int = 2
    end_timeout: float = 10.0
    per_client: int | None = None
    client: Callable[[Any], bytes] = client_address
    fetch: HttpsGet | None = None
    measured_every: float = 1.0


def create_app(
    engine: Engine,
    processor: Processor,
    *,
    gate: Gate,
    in_flight: Gate | None = None,
    bodies: Gate | None = None,
    settings: AppSettings | None = None,
    observer: Observer | None = None,
    metrics: Metrics | None = None,
    log: Observer = log_failures,
) -> Starlette:
    """Make the application; its lifespan runs the engine and the sessions.

    Args:
        engine: Not entered yet; started and stopped by the lifespan.
        processor: For the engine's model.
        gate: Over the bytes of payloads, until the engine has read them. Requests
            of text alone do not pass it.
        in_flight: Over all requests, until their end; unbounded if left out.
        bodies: Over the bytes of bodies, until hand-off; by default room for eight of
            the largest.
        settings: The rest.
        observer: Told of requests, sessions, starts, payloads and drains, and of what
            the engine does; *metrics* for one.
        metrics: What ``/metrics`` tells; it is made to watch gates and sessions.
        log: Told of requests, too. By default it logs those that failed.

    Returns:
        The application; ``app.state.service`` is its `Service`.
    """
    settings = settings or AppSettings()
    threads = anyio.CapacityLimiter(settings.threads)
    bodies = bodies or Gate(bytes=8 * settings.body_bytes, name="bodies")
    service = Service(
        model=settings.model,
        engine=engine,
        processor=processor,
        intake=Intake(
            settings.model,
            limits=settings.media,
            defaults=settings.defaults,
            limiter=anyio.CapacityLimiter(settings.threads),
            text_chars=settings.text_chars,
            bodies=_reader(settings, bodies),
            remote_images=settings.fetch is not None,
        ),
        bodies=bodies,
        payloads=gate,
        in_flight=in_flight or Gate(name="in_flight"),
        threads=threads,
        deadlines=settings.deadlines,
        new_sessions=partial(
            SessionRegistry, end_timeout=settings.end_timeout, observer=observer
        ),
        client=settings.client,
        remote=_remote(settings, threads),
    )
    told = together(observer, log)
    early = Early(
        service.places, _DIALECTS, body_bytes=settings.body_bytes, observer=told
    )
    app = Starlette(
        routes=_routes(service, metrics),
        lifespan=lambda _: _running(
            service,
            metrics,
            Measuring(service, observer, every=settings.measured_every),
        ),
        middleware=[
            Middleware(Turns, refuse=early),
            Middleware(
                LifecycleMiddleware,
                read_ahead=_READ_AHEAD,
                observer=told,
                operation=operation_of,
            ),
            *_per_client(settings, observer),
            Middleware(
                BodyLimit,
                max_bytes=settings.body_bytes,
                gate=service.bodies,
                answer=_refusal,
            ),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )
    # A redirect would name the scheme and the host that this process sees.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _reader(settings: AppSettings, gate: Gate) -> BodyReader:
    return BodyReader(
        idle=settings.body_idle,
        patience=settings.body_patience,
        awaited=lambda: gate.statistics().waiting > 0,
    )


def _per_client(settings: AppSettings, observer: Observer | None) -> list[Middleware]:
    if settings.per_client is None:
        return []

    def client(scope: Any) -> bytes | None:
        """Whose a request is; what only looks at the server is nobody's."""
        return settings.client(scope) if operation_of(scope) else None

    limit = Middleware(
        ClientLimit,
        slots=settings.per_client,
        key=client,
        answer=_refusal,
        observer=observer,
    )
    return [limit]


def _remote(
    settings: AppSettings, threads: anyio.CapacityLimiter
) -> RemoteImages | None:
    if settings.fetch is None:
        return None
    get, media = settings.fetch, settings.media
    gate = Gate(bytes=get.limits.bytes, name="fetched")
    return RemoteImages(get=get, media=media, gate=gate, threads=threads)


@asynccontextmanager
async def _running(
    service: Service,
    metrics: Metrics | None,
    measuring: Measuring,
) -> AsyncIterator[None]:
    async with service.running():
        if metrics is not None:
            metrics.watch(*service.gates, service.sessions)
        async with measuring:
            yield


def _routes(service: Service, metrics: Metrics | None) -> list[Route]:
    live, cancels = LiveView(service, metrics), Cancels(service)
    response, stored = "/v1/responses/{id}", ["GET", "DELETE"]
    cancel = "/_lifecycle/requests/{id}/cancel"
    return [
        *(
            Route(path, Generate(service, dialect), methods=["POST"])
            for path, dialect in _DIALECTS.items()
        ),
        Route(f"{response}/cancel", cancels.response, methods=["POST"]),
        Route(response, cancels.stored, methods=stored),
        Route(cancel, cancels.request, methods=["POST"]),
        Route("/openapi.json", live.openapi),
        Route("/v1/models", live.models),
        Route("/v1/models/{model:path}", live.model),  # as of a hub: owner/name
        Route("/health", live.health),
        Route("/ready", live.ready),
        Route("/metrics", live.metrics),
        Route("/_lifecycle/status", live.status),
        Route("/_lifecycle/requests", live.requests),
    ]


_DIALECTS = {
    "/v1/chat/completions": OPENAI,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/generate": PLAIN,
}


def _dialect(path: str) -> Dialect:
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI


def _refusal(
    scope: Any, refusal: BodyTooLarge | BodyTooSlow | Refused
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """What `BodyLimit` answers, in the form of the API that was asked."""
    response = _response(scope, describe(refusal) or INTERNAL)
    return response.status_code, response.raw_headers, bytes(response.body)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
    problem = ApiError(error.status_code, error.detail, code=code)
    response = _response(request.scope, problem)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    del error  # logged by the server; a client learns nothing of it
    return _response(request.scope, INTERNAL)


def _response(scope: Any, error: ApiError) -> Response:
    dialect, id_ = _dialect(scope["path"]), None
    with suppress(ApiError):  # of one that may not come back
        id_ = request_id(scope)
    status, document = dialect.error(error, id_)
    response = Response(dump(document), status, media_type="application/json")
    response.raw_headers += error.headers
    if id_ is not None:
        response.raw_headers.append((dialect.id_header, id_.encode()))
    return response
