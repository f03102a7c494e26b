"""What can be seen of a running server: models, health, and the live view."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lifecycle_engine.dialects.messages_wire import ANTHROPIC
from lifecycle_engine.dialects.openai_dialect import OPENAI
from lifecycle_engine.dialects.openai_schema import unknown_model
from lifecycle_engine.dialects.openapi import describe
from lifecycle_engine.service import Service

if TYPE_CHECKING:
    from lifecycle_metrics import Metrics

_ANTHROPIC = "anthropic-version"  # a header that each request of that SDK has
_METRIC = re.compile("[a-z_][a-z0-9_]*")


class LiveView:
    """The read-only endpoints of a `Service`.

    Args:
        service: What they show.
        metrics: What ``/metrics`` tells, if anything.
    """

    def __init__(self, service: Service, metrics: Metrics | None = None) -> None:
        self._service = service
        self._metrics = metrics
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``, in the form of the SDK that asks."""
        if _ANTHROPIC not in request.headers:
            return JSONResponse({"object": "list", "data": [self._model()]})
        name = self._service.model
        page = {"has_more": False, "first_id": name, "last_id": name}
        return JSONResponse({"data": [self._model_info()], **page})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{model}``, in the form of the SDK that asks."""
        anthropic = _ANTHROPIC in request.headers
        if request.path_params["model"] == self._service.model:
            return JSONResponse(self._model_info() if anthropic else self._model())
        dialect = ANTHROPIC if anthropic else OPENAI
        status, told = dialect.error(unknown_model(self._service.model), None)
        return JSONResponse(told, status)

    async def openapi(self, _: Request) -> Response:
        """``GET /openapi.json``: all that this server has, described for programs."""
        return JSONResponse(describe(self._service.model))

    async def health(self, _: Request) -> Response:
        """``GET /health``: this process answers, and says how its engine gets on."""
        return JSONResponse({"status": "ok", "engine": self._health})

    async def ready(self, _: Request) -> Response:
        """``GET /ready``: 200 if a request would be served now, else 503."""
        if self._service.ready:
            return JSONResponse({"status": "ready"})
        draining = self._service.sessions.draining
        why = "draining" if draining else f"engine {self._health}"
        return JSONResponse({"status": why}, 503, {"retry-after": "1"})

    async def status(self, _: Request) -> Response:
        """``GET /_lifecycle/status``: every counter there is."""
        return JSONResponse(await snapshot(self._service))

    async def requests(self, _: Request) -> Response:
        """``GET /_lifecycle/requests``: every live request, the oldest first."""
        now = anyio.current_time()
        rows = [
            {
                "id": session.id,
                "phase": session.phase,
                "age_s": round(now - session.opened_at, 3),
            }
            for session in self._service.sessions.live()
        ]
        return JSONResponse({"requests": rows})

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``: gates and sessions, and the engine's own numbers."""
        if self._metrics is None:
            told = "metrics need prometheus-client on the server\n"
            return Response(told, 404, media_type="text/plain")
        status = await self._service.engine_status() or {}
        text = self._metrics.text() + engine_numbers(status).encode()
        text += _ratios(self._service.correction.ratios).encode()
        return Response(text, media_type="text/plain; version=0.0.4")

    @property
    def _health(self) -> str:
        return str(getattr(self._service.engine, "health", "not there"))

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


def _ratios(ratios: Mapping[int, float]) -> str:
    name = "lifecycle_estimate_ratio"
    lines = [
        f'{name}{{below_bytes="{size}"}} {each}\n' for size, each in ratios.items()
    ]
    return "".join([f"# TYPE {name} gauge\n", *lines])


def engine_numbers(status: Mapping[str, Any], path: str = "lifecycle_engine") -> str:
    """The numbers of an engine's status, nested ones too, as Prometheus gauges.

    Args:
        status: What the engine told of itself.
        path: What the names begin with.
    """
    lines = []
    for name, value in status.items():
        inner = f"{path}_{name}"
        if isinstance(value, Mapping):
            lines.append(engine_numbers(value, inner))
        elif isinstance(value, int | float) and _METRIC.fullmatch(inner):
            lines.append(f"# TYPE {inner} gauge\n{inner} {float(value)}\n")
    return "".join(lines)


async def snapshot(service: Service) -> dict[str, Any]:
    """Gates, sessions and both processes as they are now; counts only, no ids.

    Cancellation:
        At any time.
    """
    engine = service.engine
    pid, ready = engine.pid, engine.ready
    phases: dict[str, int] = {}
    for session in service.sessions.live():
        phases[session.phase] = phases.get(session.phase, 0) + 1
    return {
        "ready": service.ready,
        "bodies": asdict(service.bodies.statistics()),
        "payloads": asdict(service.payloads.statistics()),
        "in_flight": asdict(service.in_flight.statistics()),
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
    """The books of an engine's arena, where it is one that has one."""
    try:
        return asdict(engine.arena.statistics())
    except (AttributeError, RuntimeError):
        return None


def resident_bytes(pid: int | str | None) -> int | None:
    """Resident memory of a process, or ``None`` where the system does not tell."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
