"""How the engine of one process is doing: its page, looked at, and its death."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Literal, Self

import anyio

from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.process import locks, pages
from lifecycle_zmq.process.engine_process import EngineProcess
from lifecycle_zmq.process.pages import Page
from lifecycle_zmq.process.watch import Limits, Watch

# While somebody waits for the engine, and while nobody does.
_LOOK_SECONDS = 0.08
_IDLE_LOOK_SECONDS = 1.0
# What the engine sent before it died is handed over by a thread of libzmq.
_LAST_WORDS_SECONDS = 0.002
_LOOKS_AT_DEATH = 5

LiveHealth = Literal["serving", "busy", "stopped", "stalled"]


class Liveness:
    """Makes the page that an engine inherits, and tells its waiters what it shows.

    Args:
        limits: How long is too long.

    Attributes:
        process: Set as soon as it was spawned.
        watch: What the looks add up to.

    Raises:
        OSError: The system is out of descriptors or memory.
    """

    def __init__(self, limits: Limits) -> None:
        self.process: EngineProcess | None = None
        self.watch = Watch(limits)
        self._descriptor = pages.make_file()
        try:
            self._page = Page(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._needed = anyio.Event()

    def __enter__(self) -> Self:
        """Do nothing; the page is there."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close our end."""
        self._page.close()
        os.close(self._descriptor)

    @property
    def inherited(self) -> dict[str, int]:
        """The descriptors that the engine has to inherit, by name."""
        return {"liveness": self._descriptor}

    def needed(self) -> None:
        """Look closely from now on: somebody waits for the engine."""
        self._needed.set()

    def word(self) -> LiveHealth:
        """Look now; ``serving``, ``busy`` or ``stopped``."""
        self._look()  # a verdict is for the next look to repeat
        if self.watch.stops:
            return "stopped"
        return "busy" if self.watch.busy else "serving"

    async def look_after(self, client: EngineClient) -> None:
        """Look again and again; give the engine up when it is silent for too long.

        Cancellation: the ordinary way to stop.
        """
        while (verdict := self._look()) is None:
            await self._pause(client)
        # A loop may not tell again of a link that was cut with something in it.
        client.drain()
        client.lose(verdict)

    async def tell_death(self, client: EngineClient) -> None:
        """Give the engine up the moment that it dies, where the system tells of it.

        Otherwise, and where the reason is not known yet, nothing is told here: the
        end of the process tells, once its memory is gone.

        Cancellation: the ordinary way to stop.
        """
        death = locks.watch(self._page, self._descriptor)
        if death is None:
            return
        try:
            await anyio.wait_readable(death.notice)
        finally:
            death.close()
        await anyio.sleep(_LAST_WORDS_SECONDS)
        client.drain()
        code = await self._exit_code()
        if code is not None and self.process is not None:
            client.lose(*self.process.reason_of(code))

    def _look(self) -> str | None:
        assert self.process is not None
        page = self._page
        return self.watch.look(
            anyio.current_time(), self.process.look(), page.phase, page.turns
        )

    async def _pause(self, client: EngineClient) -> None:
        if client.waiters or self.watch.suspicious:
            await anyio.sleep(_LOOK_SECONDS)
            return
        self._needed = anyio.Event()
        with anyio.move_on_after(_IDLE_LOOK_SECONDS):
            await self._needed.wait()

    async def _exit_code(self) -> int | None:
        # The thread that held the lock may be gone a moment before its process is.
        assert self.process is not None
        for _ in range(_LOOKS_AT_DEATH):
            state = self.process.look()
            if state.exiting:
                return state.code
            await anyio.sleep(_LAST_WORDS_SECONDS)
        return None
