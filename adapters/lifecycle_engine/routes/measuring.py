"""Asks the engine now and then what it did, and tells the observer."""

from __future__ import annotations

import logging
from typing import Self

import anyio
from anyio.abc import TaskGroup

from lifecycle.events import Observer, guarded
from lifecycle_engine.events import Measures
from lifecycle_engine.service import Service


class Measuring:
    """Tells an observer of the engine for as long as it is entered.

    Args:
        service: Whose engine; it runs.
        observer: ``None``: nobody is told, and nothing asked.
        every: Seconds from one event to the next, while there are requests.
    """

    def __init__(
        self, service: Service, observer: Observer | None, *, every: float
    ) -> None:
        self._service, self._every = service, every
        self._tell = guarded(observer)
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        if self._tell is not None:
            self._tasks = await anyio.create_task_group().__aenter__()
            self._tasks.start_soon(self._measure)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cut above

    async def _measure(self) -> None:
        try:
            await self._ask_for_ever()
        except Exception:
            # Requests are served all the same.
            log = logging.getLogger("lifecycle")
            log.exception("the engine is not measured any more")

    async def _ask_for_ever(self) -> None:
        service, measures = self._service, Measures()
        assert self._tell is not None
        seen: int | None = None
        while True:
            now = service.sessions.statistics()
            if not now.live and now.opened == seen:
                measures.idle(anyio.current_time())
            elif (status := await service.engine_status(self._every)) is not None:
                for event in measures.events(status, anyio.current_time()):
                    self._tell(event)
                # It is asked once more when the last request has left, to tell that.
                seen = None if now.live else now.opened
            await anyio.sleep(self._every)
