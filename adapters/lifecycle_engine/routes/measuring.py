"""Asks the engine now and then what it did, and tells the observer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from lifecycle.events import Observer, guarded
from lifecycle_engine.events import Measures
from lifecycle_engine.service import Service


@asynccontextmanager
async def measured(
    service: Service, observer: Observer | None, every: float
) -> AsyncIterator[None]:
    """Tell *observer* of the engine every so many seconds, while there are requests.

    Cancellation:
        At any time.
    """
    if observer is None:
        yield
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_measure, service, observer, every)
        yield
        tasks.cancel_scope.cancel()


async def _measure(service: Service, observer: Observer, every: float) -> None:
    try:
        await _ask_for_ever(service, observer, every)
    except Exception:
        # Requests are served all the same.
        logging.getLogger("lifecycle").exception("the engine is not measured any more")


async def _ask_for_ever(service: Service, observer: Observer, every: float) -> None:
    tell, measures = guarded(observer), Measures()
    assert tell is not None
    seen: int | None = None
    while True:
        now = service.sessions.statistics()
        if not now.live and now.opened == seen:
            measures.idle(anyio.current_time())
        elif (status := await service.engine_status(patience=every)) is not None:
            for event in measures.events(status, anyio.current_time()):
                tell(event)
            # It is asked once more when the last request has left, to tell that.
            seen = None if now.live else now.opened
        await anyio.sleep(every)
