"""What every engine is that is replaced when it dies, whatever runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self

import anyio

from lifecycle_zmq import _options
from lifecycle_zmq._hand_off import Box
from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.supervision.supervisor import Health, L, Supervisor


class SupervisedEngine(Generic[L]):
    """One engine after another, each an *incarnation* with a client of its own.

    Nothing that was meant for one ever reaches another. All methods belong to the event
    loop that entered it, whose thread must outlive it; in another thread they raise
    `RuntimeError`.

    Args:
        supervisor: Starts them.
    """

    _scope: anyio.CancelScope

    def __init__(self, supervisor: Supervisor[L]) -> None:
        _options.expect(Supervisor, "supervisor must be a Supervisor", supervisor)
        self._supervisor = supervisor

    async def __aenter__(self) -> Self:
        """Begin to start the engine; `wait_ready` tells when requests are taken."""
        self._supervisor.begin()
        # Shielded: while everything around is cancelled, sessions still end in order.
        self._scope = anyio.CancelScope(shield=True)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the engine; never restart it."""
        self._supervisor.closing = True
        self._scope.cancel()
        # Not given the exception of the block, which it would wrap in a group.
        await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cut above

    def close(self) -> None:
        """Give the engine up now, without its leave: it is killed, never restarted.

        Everybody who waits for it is told ``closed``. For whoever cannot wait until
        streams have ended in order; leaving the block does the rest.
        """
        client = self._client
        self._supervisor.closing = True
        if client is not None:
            client.lose("closed")

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        return self._supervisor.takes and self.health != "stopped"

    @property
    def health(self) -> Health:
        """How the engine is doing, as of now.

        ``starting`` until it first serves; ``serving``; ``busy`` while one turn of its
        loop takes long, during which requests are taken and wait; ``stopped`` by a
        signal; ``stalled`` from the verdict until the process is gone; ``restarting``;
        ``broken`` while nothing is started after a crash loop; ``closed``.
        """
        return self._supervisor.health

    @property
    def incarnation(self) -> int:
        """The number of the last process, from 1; 0 before the first."""
        return self._supervisor.number

    @property
    def streams(self) -> int:
        """How many streams were started in the live process and are not done."""
        return self._client.streams if self._client is not None else 0

    async def wait_ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            EngineLost: The engine ended before it ever served, with its last words; or
                it is broken, or this object was closed.

        Cancellation: nothing changes.
        """
        it = self._supervisor
        it.check_entered()
        it.check_thread()
        seen = it.false_starts
        while not self.ready:
            if it.false_starts != seen:
                raise it.loss(self._last_words())
            if it.closing or it.broken:
                raise it.loss()
            await it.changed.wait()

    async def start(
        self, key: str, request: Mapping[str, Any], tensors: Box | None = None
    ) -> AsyncIterator[Any]:
        """Hand a request to the engine and return its items.

        As `EngineClient.start`; while no engine serves, the tensors are dropped and
        `EngineLost` says at once when to try again.

        Args:
            key: What the stream is called until `end`; not in use.
            request: Plain values, at most 1 MiB on the wire.
            tensors: Box of name to C-contiguous buffer, at most seven.

        Raises:
            EngineLost: No engine serves, or it died; the request may have run.
            RequestRejected: The engine, or a limit of the wire, refused it.
            ValueError: The key is in use, empty or too long.

        Cancellation: the engine may run the request; `end` of its key stops it.
        """
        client = self._client
        if client is None or not self._supervisor.takes:
            if tensors is not None:
                tensors.take()
            raise self._supervisor.loss()
        starting = client.start(key, request, tensors)
        del request, tensors
        self._look_closely()
        return await starting

    def cancel(self, key: str) -> None:
        """Ask the engine to stop a stream at its next step; unknown keys are fine."""
        if self._client is not None:
            self._client.cancel(key)

    async def end(self, key: str) -> None:
        """Make the engine forget a stream; return when it has released everything.

        As `EngineClient.end`. Streams of an incarnation that is gone are over already.

        Cancellation: END is on its way all the same; call again to wait for the rest.
        """
        client = self._client
        if client is not None:
            await client.end(key)

    async def status(self) -> dict[str, Any]:
        """Return the counters of the engine and, under ``backend``, of its backend.

        Raises:
            EngineLost: No engine serves, or it died.

        Cancellation: the answer is dropped when it comes.
        """
        client = self._client
        if client is None or not self._supervisor.takes:
            raise self._supervisor.loss()
        self._look_closely()
        return await client.status()

    def reset(self) -> None:
        """Forget all deaths: an engine that is broken, or backs off, starts now."""
        self._supervisor.reset()

    async def _run(self) -> None:
        with self._scope:
            await self._supervisor.run()

    @property
    def _client(self) -> EngineClient | None:
        return self._supervisor.client

    def _look_closely(self) -> None:
        """Be told that somebody waits for the engine from now on."""

    def _last_words(self) -> str:
        """Say what more there is to tell of an engine that never served."""
        return ""
