"""The HTTP server around an engine, as a Starlette application."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lifecycle import Gate, SessionRegistry
from lifecycle.events import Observer, combine_observers, guarded
from lifecycle_asgi import (
    Admission,
    LifecycleMiddleware,
    client_address,
)
from lifecycle_asgi.events import LiveRequests, log_failures
from lifecycle_asgi.live_view import LivePages
from lifecycle_asgi.memory_limit import default_budget
from lifecycle_asgi.refusals import ApiError, Refusal, Unauthorised, describe
from lifecycle_engine.api.anthropic_messages import ANTHROPIC
from lifecycle_engine.api.base import ApiFormat, dump
from lifecycle_engine.api.generate import PLAIN
from lifecycle_engine.api.openai_chat import OPENAI
from lifecycle_engine.api.openai_responses import RESPONSES
from lifecycle_engine.api.operations import no_such_path
from lifecycle_engine.api.request_body import RequestParser, request_id
from lifecycle_engine.errors import INTERNAL
from lifecycle_engine.events import EngineMeter, queued_in
from lifecycle_engine.multimodal.limits import MediaLimits
from lifecycle_engine.processing.processor import ChatDefaults, Processor
from lifecycle_engine.server.access import AccessControl, AccessRules
from lifecycle_engine.server.admin import CancelEndpoints, StatusEndpoints
from lifecycle_engine.server.admission import FairAcceptMiddleware, operation_of
from lifecycle_engine.server.generate import (
    GenerateEndpoint,
    end_refused,
    price_body,
    serve_admitted,
)
from lifecycle_engine.server.remote_images import HttpsGet, RemoteImages
from lifecycle_engine.server.service import Deadlines, Engine, Service

if TYPE_CHECKING:
    from lifecycle_asgi.prometheus import Metrics


# Bytes read ahead per request still waiting for admission; bounds memory under a
# connection flood.
_READ_AHEAD = 8192
# Of the kernel's memory, beside all bytes, for bodies that wait unread: one in so many.
_ROOM = 32
# Paths that only the operator's application has.
_OPERATORS = ("/_lifecycle", "/metrics")


async def _measure(
    service: Service, observer: Observer | None, live: LiveRequests, every: float
) -> None:
    """Report the counters of the engine each *every* seconds, while there are requests.

    Also tells *live* which requests the engine has not begun to work on. Without an
    *observer*, the engine is not polled.
    """
    if observer is None:
        return
    measures, seen = EngineMeter(), -1
    try:
        while True:
            now = service.sessions.statistics()
            if not now.live and now.opened == seen:
                measures.idle(anyio.current_time())
            elif (status := await service.engine_status(every)) is not None:
                for event in measures.events(status, anyio.current_time()):
                    observer(event)
                live.queued = queued_in(status)
                # One more poll after the last request reports the idle engine.
                seen = -1 if now.live else now.opened
            await anyio.sleep(every)
    except Exception:
        # Requests are served without measurements, too.
        log = logging.getLogger("lifecycle")
        log.exception("polling the engine failed; its metrics stop until a restart")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Settings of the application.

    Attributes:
        model: Model name for clients.
        total_bytes: As *bytes* of `Admission`.
        body_bytes: Maximum size of a request body.
        body_timeout: Maximum seconds for a request body.
        max_waiting: Maximum number of bodies that wait in each lane.
        max_wait: Maximum seconds that a body waits.
        order: In which order bodies are admitted: ``"fair"`` lets clients take turns.
        shadow: Whether slots and bodies are only counted, and no request is refused.
        text_chars: Maximum text of one request.
        media: Limits on images.
        defaults: Sampling defaults of requests.
        deadlines: Timeouts for the engine.
        threads: Maximum number of requests of text preprocessed concurrently, and of
            those with images. One thread parses large bodies.
        end_timeout: Seconds that the END of one request may take.
        per_client: Maximum concurrent requests of one client; ``None`` is unlimited.
        client: Returns the client identity of an ASGI scope.
        access: Which requests may do what.
        fetch: Fetches images by https URL; ``None`` refuses them.
        measured_every: Seconds from one `EngineMeasured` event to the next.
    """

    model: str = "lifecycle"
    total_bytes: int = field(default_factory=default_budget)
    body_bytes: int = 64 * 2**20
    body_timeout: float = 60.0
    max_waiting: int = 1024
    max_wait: float = 60.0
    order: Literal["fair", "fifo", "adaptive"] = "fair"
    shadow: bool = False
    text_chars: int = 2**20
    media: MediaLimits = field(default_factory=MediaLimits)
    defaults: ChatDefaults = field(default_factory=ChatDefaults)
    deadlines: Deadlines = field(default_factory=Deadlines)
    threads: int = 2
    end_timeout: float = 10.0
    per_client: int | None = None
    client: Callable[[Any], bytes] = client_address
    access: AccessRules = field(default_factory=AccessRules)
    fetch: HttpsGet | None = None
    measured_every: float = 1.0


def create_app(
    engine: Engine,
    processor: Processor,
    *,
    gate: Gate,
    in_flight: Gate | None = None,
    settings: AppSettings | None = None,
    observer: Observer | None = None,
    metrics: Metrics | None = None,
    log: Observer = log_failures,
) -> Starlette:
    """Create the application; its lifespan runs the engine and the sessions.

    Args:
        engine: Not entered yet; started and stopped by the lifespan.
        processor: Processor for the engine's model.
        gate: Gate over the bytes of payloads, until the engine has read them. Text
            requests do not pass it.
        in_flight: Gate over all requests, until they end. Default: no limit.
        settings: All other settings.
        observer: Receives the events of requests, sessions, starts, payloads, drains
            and the engine, for example *metrics*.
        metrics: Serves ``/metrics``; watches the gates and the sessions.
        log: Also receives the events of requests. Default: logs failed requests.

    Returns:
        The application; ``app.state.service`` is its `Service`, and
        ``app.state.operator`` another application, of ``/_lifecycle`` and ``/metrics``,
        to be served where only the operator connects.
    """
    settings = settings or AppSettings()
    in_flight = in_flight or Gate(slots=None, name="in_flight")
    gates = {"requests": gate, "slots": in_flight}
    service = _service(
        engine,
        processor,
        gate=gate,
        in_flight=in_flight,
        admission=_admission(settings, gates, observer),
        settings=settings,
        observer=observer,
    )
    endpoints = {path: GenerateEndpoint(service, api) for path, api in _FORMATS.items()}
    live = LiveRequests(service.gates, settings.client)
    every = settings.measured_every
    measure = partial(_measure, service, guarded(observer), live, every)
    app = Starlette(
        routes=[
            *(Route(path, each, methods=["POST"]) for path, each in endpoints.items()),
            *_routes(service),
        ],
        lifespan=lambda _: _running(service, metrics, measure),
        middleware=_middleware(settings, observer, log, live),
        exception_handlers=_ERRORS,
    )
    # A redirect would contain the scheme and host as this process sees them.
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.operator = _operator(service, settings, metrics, live)
    return app


def _service(
    engine: Engine,
    processor: Processor,
    *,
    gate: Gate,
    in_flight: Gate,
    admission: Admission,
    settings: AppSettings,
    observer: Observer | None,
) -> Service:
    # Parsers hold the interpreter's lock, so that a second one only delays the loop.
    threads, text_threads, parsers = (
        anyio.CapacityLimiter(each) for each in (settings.threads, settings.threads, 1)
    )
    return Service(
        model=settings.model,
        engine=engine,
        processor=processor,
        parser=RequestParser(
            settings.model,
            limits=settings.media,
            defaults=settings.defaults,
            limiter=parsers,
            small_limiter=text_threads,
            text_chars=settings.text_chars,
            remote_images=settings.fetch is not None,
        ),
        admission=admission,
        payloads=gate,
        in_flight=in_flight,
        threads=threads,
        text_threads=text_threads,
        deadlines=settings.deadlines,
        new_sessions=partial(
            SessionRegistry, end_timeout=settings.end_timeout, observer=observer
        ),
        client=settings.client,
        remote=_remote(settings, threads),
    )


def _middleware(
    settings: AppSettings,
    observer: Observer | None,
    log: Observer,
    live: LiveRequests,
) -> list[Middleware]:
    """Return the middleware, outermost first."""
    return [
        *_cross_origin(settings.access),
        Middleware(AccessControl, rules=settings.access, answer=_response),
        Middleware(FairAcceptMiddleware),
        Middleware(
            LifecycleMiddleware,
            read_ahead=_READ_AHEAD,
            room=settings.total_bytes // _ROOM,
            observer=combine_observers(observer, log),
            operation=operation_of,
            live=live,
        ),
    ]


def _cross_origin(rules: AccessRules) -> list[Middleware]:
    """Return what lets pages of the permitted origins read answers."""
    if not rules.origins:
        return []
    cors = Middleware(
        CORSMiddleware,
        allow_origins=rules.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after", "retry-after-ms"],
    )
    return [cors]


def _operator(
    service: Service,
    settings: AppSettings,
    metrics: Metrics | None,
    live: LiveRequests,
) -> Starlette:
    def engine() -> Mapping[str, Any]:
        now = service.engine
        health = getattr(now, "health", "ready" if now.ready else "unavailable")
        health = "draining" if service.sessions.draining else health
        return {"health": health, "incarnation": now.incarnation, "pid": now.pid}

    pages = LivePages(live, engine=engine, allow=lambda _: True, cancel=True)
    status = StatusEndpoints(service, metrics, live)
    cancels = CancelEndpoints(service, live)
    cancel = "/_lifecycle/requests/{id}/cancel"
    app = Starlette(
        routes=[
            Route("/metrics", status.metrics),
            Route("/_lifecycle/status", status.status),
            Route("/_lifecycle/requests", status.requests),
            Route(cancel, cancels.any_request, methods=["POST"]),
            *(Route(path, pages) for path in sorted(pages.paths)),
        ],
        middleware=[
            Middleware(
                AccessControl, rules=settings.access, answer=_response, operator=True
            )
        ],
        exception_handlers={**_ERRORS, HTTPException: _operators_error},
    )
    app.router.redirect_slashes = False
    return app


def _admission(
    settings: AppSettings,
    gates: Mapping[str, Gate],
    observer: Observer | None,
) -> Admission:
    return Admission(
        serve_admitted,
        client=settings.client,
        price=price_body,
        answer=_not_admitted,
        gates=gates,
        observer=observer,
        environment={},
        bytes=settings.total_bytes,
        max_body=settings.body_bytes,
        body_timeout=settings.body_timeout,
        max_waiting=settings.max_waiting,
        max_wait=settings.max_wait,
        per_client=settings.per_client,
        order=settings.order,
        shadow=settings.shadow,
    )


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
    measure: Callable[[], Coroutine[Any, Any, None]],
) -> AsyncIterator[None]:
    async with service.running():
        if metrics is not None:
            # Lanes count refusals that their gates do not know.
            fetched = [] if service.remote is None else [service.remote.gate]
            metrics.watch(*service.admission.lanes, *fetched, service.sessions)
        failure: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(measure)
            try:
                yield
            except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure  # in the task group, it would become a group


def _routes(service: Service) -> list[Route]:
    live, cancels = StatusEndpoints(service), CancelEndpoints(service)
    response, stored = "/v1/responses/{id}", ["GET", "DELETE"]
    return [
        Route(f"{response}/cancel", cancels.response, methods=["POST"]),
        Route(response, cancels.stored, methods=stored),
        Route("/v1/requests/{id}/cancel", cancels.request, methods=["POST"]),
        Route("/openapi.json", live.openapi),
        Route("/docs", live.docs),
        Route("/v1/models", live.models),
        Route("/v1/models/{model:path}", live.model),  # as of a hub: owner/name
        Route("/health", live.health),
        Route("/ready", live.ready),
    ]


_FORMATS = {
    "/v1/chat/completions": OPENAI,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/generate": PLAIN,
}


def _format_of(path: str) -> ApiFormat:
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI


def _not_admitted(
    scope: Any, refusal: Refusal | Unauthorised
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """End the session of a request that is refused; what it is answered."""
    response = _response(scope, describe(refusal))
    end_refused(scope, response.status_code)
    return response.status_code, response.raw_headers, bytes(response.body)


async def _http_error(request: Request, error: Exception) -> Response:
    missing = no_such_path(request.url.path)
    if request.url.path.startswith(_OPERATORS):
        missing = "The operator's paths are served at --admin-listen alone"
    return _problem(request, error, missing)


async def _operators_error(request: Request, error: Exception) -> Response:
    paths = "/_lifecycle, /_lifecycle/status, /_lifecycle/requests and /metrics"
    missing = f"There is no such path for the operator; there are {paths}"
    return _problem(request, error, missing)


def _problem(request: Request, error: Exception, missing: str) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
    message = missing if error.status_code == 404 else error.detail
    problem = ApiError(error.status_code, message, code=code)
    response = _response(request.scope, problem)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    del error  # logged by the server; a client learns nothing of it
    return _response(request.scope, INTERNAL)


def _response(scope: Any, error: ApiError) -> Response:
    """What a refused request is answered, in the form of the API that was asked."""
    api, id_ = _format_of(scope["path"]), None
    with suppress(ApiError):  # of one that may not come back
        id_ = request_id(scope)
    status, document = api.error(error, id_)
    response = Response(dump(document), status, media_type="application/json")
    response.raw_headers += error.headers
    if id_ is not None:
        response.raw_headers.append((api.id_header, id_.encode()))
    if status == 401:
        # A browser asks for a password where it shows a page.
        admin = scope["path"].startswith(_OPERATORS)
        scheme = b'Basic realm="lifecycle"' if admin else b"Bearer"
        response.raw_headers.append((b"www-authenticate", scheme))
    return response


_ERRORS = {HTTPException: _http_error, Exception: _internal_error}
