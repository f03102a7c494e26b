"""Ending a running request by its id, and what else is asked about responses."""

from __future__ import annotations

import time

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lifecycle import Session, SessionNotFound
from lifecycle_engine.api_errors import ApiError
from lifecycle_engine.dialects.responses_wire import empty_response
from lifecycle_engine.service import Service

_RESPONSE = "resp_"


class Cancels:
    """The endpoints that end requests of a `Service`, whichever API they came by.

    Args:
        service: Whose requests they end.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def request(self, request: Request) -> Response:
        """``POST /_lifecycle/requests/{id}/cancel``; answers when the engine is quiet.

        Cancellation:
            The request is ended all the same; only the waiting stops.
        """
        id_ = request.path_params["id"]
        if await self._cancel(id_) is None:
            return _unknown("No request with this id is running")
        return JSONResponse({"id": id_, "status": "cancelled"})

    async def response(self, request: Request) -> Response:
        """``POST /v1/responses/{id}/cancel``, for the SDK's ``responses.cancel``.

        Cancellation:
            As for `request`.
        """
        id_ = request.path_params["id"]
        session = None
        if id_.startswith(_RESPONSE):
            session = await self._cancel(id_.removeprefix(_RESPONSE))
        if session is None:
            return _unknown("No response with this id is running; none are stored")
        age = anyio.current_time() - session.opened_at
        created, model = int(time.time() - age), self._service.model
        return JSONResponse(empty_response(session.id, model, created, "cancelled"))

    async def stored(self, _: Request) -> Response:
        """``GET`` and ``DELETE`` of ``/v1/responses/{id}``: there are none."""
        return _unknown("This server stores no responses; keep what you were sent")

    async def _cancel(self, id_: str) -> Session | None:
        sessions = self._service.sessions
        try:
            session = sessions.get(id_)
            await sessions.cancel(id_)
        except SessionNotFound:
            return None
        return session


def _unknown(message: str) -> Response:
    error = ApiError(404, message, code="not_found", param="id")
    return JSONResponse({"error": error.fields}, error.status)
