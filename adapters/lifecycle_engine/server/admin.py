"""Administration: models, health, cancel by id, and the live view."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from lifecycle import Session, SessionNotFound
from lifecycle_asgi.events import LiveRequests
from lifecycle_asgi.live_snapshot import cancel, find, is_cancellable, request_rows
from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.api.anthropic_messages import ANTHROPIC
from lifecycle_engine.api.chat_request import unknown_model
from lifecycle_engine.api.openai_chat import OPENAI
from lifecycle_engine.api.openai_responses import empty_response
from lifecycle_engine.api.openapi import openapi_document
from lifecycle_engine.api.operations import page
from lifecycle_engine.server.service import ID_IS_SECRET, Service

if TYPE_CHECKING:
    from lifecycle_asgi.prometheus import Metrics
    from lifecycle_engine.server.metrics import EngineReport


_RESPONSE = "resp_"


class CancelEndpoints:
    """Endpoints that cancel requests of a `Service`, of any API format.

    They wait for the engine. If they are cancelled, only that wait ends.
    """

    def __init__(self, service: Service, live: LiveRequests | None = None) -> None:
        self._service = service
        self._live = live

    async def request(self, request: Request) -> Response:
        """``POST /v1/requests/{id}/cancel``, for its client."""
        id_ = request.path_params["id"]
        if await self._cancel(id_, request.scope) is None:
            return _not_found("This client runs no request with this id")
        return JSONResponse({"id": id_, "status": "cancelled"})

    async def any_request(self, request: Request) -> Response:
        """``POST /_lifecycle/requests/{id}/cancel``, for the operator."""
        id_ = request.path_params["id"]
        if await self._cancel(id_) is None:
            found = None if self._live is None else find(self._live, id_)
            if found is None or not is_cancellable(found):
                return _not_found("No request with this id is running")
            cancel(found)
        return JSONResponse({"id": id_, "status": "cancelled"})

    async def response(self, request: Request) -> Response:
        """``POST /v1/responses/{id}/cancel``, for the SDK's ``responses.cancel``."""
        id_ = request.path_params["id"]
        session = None
        if id_.startswith(_RESPONSE):
            session = await self._cancel(id_.removeprefix(_RESPONSE), request.scope)
        if session is None:
            return _not_found(
                "This client runs no response with this id, and none are stored"
            )
        age = anyio.current_time() - session.opened_at
        created, model = int(time.time() - age), self._service.model
        return JSONResponse(empty_response(session.id, model, created, "cancelled"))

    async def stored(self, _: Request) -> Response:
        """``GET`` and ``DELETE`` of ``/v1/responses/{id}``: none are stored."""
        return _not_found("This server does not store responses; keep your own copy")

    async def _cancel(self, id_: str, scope: Any = None) -> Session | None:
        """Cancel a session that the client of *scope* may cancel; any, without one."""
        sessions = self._service.sessions
        try:
            session = sessions.get(id_)
            owner = self._service.owners.get(session)
            right = (ID_IS_SECRET, scope and self._service.client(scope))
            if scope is not None and (owner is None or owner not in right):
                return None
            await sessions.cancel(id_)
        except SessionNotFound:
            return None
        return session


def _not_found(message: str) -> Response:
    error = ApiError(404, message, code="not_found", param="id")
    return JSONResponse({"error": error.fields}, error.status)


# A header of each request of the Anthropic SDK.
_ANTHROPIC_HEADER = "anthropic-version"
_NO_SCRIPT = "default-src 'none'; style-src 'unsafe-inline'"
# Of a request, beside its id.
_SHOWN = ("what", "client", "phase", "session_phase", "waits_for", "age_s")


class StatusEndpoints:
    """Read-only endpoints of a `Service`: models, health, status and metrics."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics | None = None,
        live: LiveRequests | None = None,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._live = live
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``, in the format of the SDK that asks."""
        if _ANTHROPIC_HEADER not in request.headers:
            return JSONResponse({"object": "list", "data": [self._model()]})
        name = self._service.model
        page = {"has_more": False, "first_id": name, "last_id": name}
        return JSONResponse({"data": [self._model_info()], **page})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{model}``, in the format of the SDK that asks."""
        anthropic = _ANTHROPIC_HEADER in request.headers
        if request.path_params["model"] == self._service.model:
            return JSONResponse(self._model_info() if anthropic else self._model())
        api = ANTHROPIC if anthropic else OPENAI
        status, document = api.error(unknown_model(self._service.model), None)
        return JSONResponse(document, status)

    async def openapi(self, _: Request) -> Response:
        """``GET /openapi.json``: the description of all endpoints."""
        return JSONResponse(openapi_document(self._service.model))

    async def docs(self, request: Request) -> Response:
        """``GET /docs``: the same for people."""
        text = page(self._service.model, str(request.base_url).rstrip("/"))
        return HTMLResponse(text, headers={"content-security-policy": _NO_SCRIPT})

    async def health(self, _: Request) -> Response:
        """``GET /health``: this process is alive; includes the health of the engine."""
        return JSONResponse({"status": "ok", "engine": self._health})

    async def ready(self, _: Request) -> Response:
        """``GET /ready``: 200 if a request would be served now, else 503."""
        if self._service.ready:
            return JSONResponse({"status": "ready"})
        why = f"engine {self._health}"
        if self._service.sessions.draining:
            why = "draining"
        elif not self._service.started:
            why = "not started; serve with lifespan on"
        return JSONResponse({"status": why}, 503, {"retry-after": "1"})

    async def status(self, _: Request) -> Response:
        """``GET /_lifecycle/status``: all counters."""
        return JSONResponse(await snapshot(self._service))

    async def requests(self, _: Request) -> Response:
        """``GET /_lifecycle/requests``: the number of requests, and the oldest."""
        total, found = (0, []) if self._live is None else request_rows(self._live)
        rows = [
            {"id": each["session"] or each["id"]}
            | {name: each[name] for name in _SHOWN}
            for each in found
        ]
        return JSONResponse({"total": total, "requests": rows})

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``: gates, sessions and the engine's counters."""
        if self._metrics is None:
            message = "install prometheus-client on the server to get metrics\n"
            return Response(message, 404, media_type="text/plain")
        text = self._metrics.text() + (await self._engine_report()).text()
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _engine_report(self) -> EngineReport:
        # Imported here, as prometheus-client may not be installed.
        from lifecycle_engine.server.metrics import EngineReport

        service, engine = self._service, self._service.engine
        return EngineReport(
            model=service.model,
            up=engine.ready,
            incarnation=engine.incarnation,
            status=await service.engine_status() or {},
            memory={
                "server": resident_bytes("self"),
                "engine": resident_bytes(engine.pid),
            },
            ratios=service.admission.ratios,
        )

    @property
    def _health(self) -> str:
        return str(getattr(self._service.engine, "health", "unavailable"))

    def _model_info(self) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._created, UTC)
        return {
            "id": self._service.model,
            "type": "model",
            "created_at": created.isoformat(),
            "display_name": self._service.model,
            "lifecycle": "active",
        }

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.model,
            "object": "model",
            "created": self._created,
            "owned_by": "lifecycle",
        }


async def snapshot(service: Service) -> dict[str, Any]:
    """Return the state of gates, sessions and both processes; counts only, no ids.

    Cancellation:
        At any time.
    """
    engine, lanes = service.engine, service.admission.statistics()
    pid, ready = engine.pid, engine.ready
    phases: dict[str, int] = {}
    for session in service.sessions.live():
        phases[session.phase] = phases.get(session.phase, 0) + 1
    return {
        "ready": service.ready,
        "bodies": {name: asdict(lanes[name]) for name in ("small", "bodies")},
        "payloads": asdict(lanes["requests"]),
        "in_flight": asdict(lanes["slots"]),
        "sessions": {**asdict(service.sessions.statistics()), "phases": phases},
        "engine": {
            "ready": ready,
            "pid": pid,
            "incarnation": engine.incarnation,
            "status": await service.engine_status() if ready else None,
            "rss_bytes": resident_bytes(pid),
        },
        "arena": _arena(engine),
        "process": {"pid": os.getpid(), "rss_bytes": resident_bytes("self")},
    }


def _arena(engine: Any) -> dict[str, Any] | None:
    try:
        return asdict(engine.arena.statistics())
    except (AttributeError, RuntimeError):
        return None


def resident_bytes(pid: int | str | None) -> int | None:
    """Return the resident memory of a process; ``None`` where it is not available."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
