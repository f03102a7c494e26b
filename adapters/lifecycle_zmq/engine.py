"""The engine as a server sees it: one that comes back after it died."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from lifecycle import EngineLost

from ._hand_off import Box
from ._incarnation import Incarnation, Settings
from ._memory import Kind
from .arena import Arena
from .client import EngineClient


class ZmqEngine:
    """An engine process, its client, and its replacement when it dies.

    Each process is an *incarnation* with a number, a socket in a fresh directory and a
    client of its own, so nothing that was meant for one ever reaches another. All
    methods belong to the event loop that entered it, whose thread must outlive it.

    Args:
        argv: The program and its arguments; ``--endpoint ADDRESS --incarnation N`` is
            appended.
        env: Its environment; ``None`` inherits ours.
        pass_fds: Descriptors that it inherits.
        directory: Where the socket directories are made; ``None`` is the system's
            place for temporary files.
        ready_timeout: Seconds that an incarnation may take until it serves.
        backoff: Seconds before the first restart, doubled for each further one until
            an incarnation has served for `max_backoff` seconds.
        max_backoff: Upper end of the doubling.
        stop_timeout: Seconds that the engine may take to leave when told to.
        arena_bytes: Size of the arena, one for all incarnations, so that its pages
            stay warm; 0 makes none, and payloads are sent.
        arena: How it is shared, as for `Arena`; ``None`` takes the best there is.
    """

    _scope: anyio.CancelScope
    _changed: anyio.Event

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        directory: Path | None = None,
        ready_timeout: float = 300.0,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        stop_timeout: float = 5.0,
        arena_bytes: int = 0,
        arena: Kind | None = None,
    ) -> None:
        self._settings = Settings(
            argv=tuple(argv),
            env=env,
            pass_fds=tuple(pass_fds),
            directory=directory,
            ready_timeout=ready_timeout,
            # Made on entering, and the same for every incarnation.
            arena=lambda: self._arena,
        )
        self._arena_bytes = arena_bytes
        self._arena_kind = arena
        self._arena: Arena | None = None
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._stop_timeout = stop_timeout
        self._current: Incarnation | None = None
        self._number = 0
        self._closing = False
        # For how long requests will be refused: measured, not guessed, after a start.
        self._start_seconds = 1.0
        self._expected = 0.0
        # Deaths in a row, and those of them that came before the engine ever served.
        self._deaths = 0
        self._false_starts = 0

    async def __aenter__(self) -> Self:
        """Begin to start the engine; `wait_ready` tells when requests are taken."""
        if self._arena_bytes:
            self._arena = Arena(self._arena_bytes, kind=self._arena_kind)
        self._changed = anyio.Event()
        self._expected = anyio.current_time() + self._start_seconds
        # Shielded: while everything around is cancelled, sessions still end in order.
        self._scope = anyio.CancelScope(shield=True)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._supervise)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Let the engine leave within `stop_timeout`, or kill it; never restart it."""
        self._closing = True
        client = self._client
        try:
            if client is not None and client.ready:
                client.shutdown()
                with anyio.move_on_after(self._stop_timeout, shield=True):
                    await client.wait_lost()
        finally:  # a native cancellation gets through the shield
            self._scope.cancel()
            try:
                # Not given the exception of the block, which it would wrap in a group.
                await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cut
            finally:
                if self._arena is not None:
                    self._arena.close()

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        return not self._closing and self._client is not None and self._client.ready

    @property
    def arena(self) -> Arena:
        """Where to write payloads that shall not be copied.

        Raises:
            RuntimeError: The engine has none, or was not entered yet.
        """
        if self._arena is None:
            raise RuntimeError("there is no arena; pass arena_bytes= and enter first")
        return self._arena

    @property
    def pid(self) -> int | None:
        """The process that lives now, if one does."""
        if self._current is None or self._client is None:
            return None
        return self._current.process.pid if self._current.process else None

    @property
    def incarnation(self) -> int:
        """The number of the last process, from 1; 0 before the first."""
        return self._number

    @property
    def streams(self) -> int:
        """How many streams were started in the live process and are not done."""
        return self._client.streams if self._client is not None else 0

    @property
    def output(self) -> str:
        """The end of what the last process wrote to its standard output and error."""
        if self._current is None:
            return ""
        process = self._current.process
        return self._current.output or (process.output if process else "")

    async def wait_ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            EngineLost: The engine ended before it ever served, with its last words; or
                this object was closed.

        Cancellation: nothing changes.
        """
        seen = self._false_starts
        while not self.ready:
            if self._closing:
                raise self._loss()
            if self._false_starts != seen:
                raise self._loss(
                    f"; its last words were:\n{self.output[-2000:].strip()}"
                )
            await self._changed.wait()

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
        if client is None or not self.ready:
            if tensors is not None:
                tensors.take()
            raise self._loss()
        starting = client.start(key, request, tensors)
        del request, tensors
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
        if self._client is not None:
            await self._client.end(key)

    async def status(self) -> dict[str, Any]:
        """Return the counters of the engine and, under ``backend``, of its backend.

        Raises:
            EngineLost: No engine serves, or it died.

        Cancellation: the answer is dropped when it comes.
        """
        client = self._client
        if client is None or not self.ready:
            raise self._loss()
        return await client.status()

    async def _supervise(self) -> None:
        with self._scope:
            while not self._closing:
                self._number += 1
                current = self._current = Incarnation(
                    self._number,
                    self._settings,
                    retry_after=_clamp(self._delay() + self._start_seconds),
                    changed=self._announce,
                )
                await current.run()
                await anyio.sleep(self._bury(current))

    def _bury(self, ended: Incarnation) -> float:
        """Note the end of a process; return the seconds until the next may start."""
        if ended.start_seconds is None:
            self._false_starts += 1
        else:
            self._start_seconds = ended.start_seconds
        if ended.served_seconds >= self._max_backoff:
            self._deaths = 0
        delay = self._delay()
        self._deaths += 1
        self._expected = anyio.current_time() + delay + self._start_seconds
        self._announce()
        return delay

    def _delay(self) -> float:
        # The exponent is capped, as a float is not endless: 2 ** 1024 overflows.
        return min(self._max_backoff, self._backoff * 2.0 ** min(self._deaths, 64))

    @property
    def _client(self) -> EngineClient | None:
        return self._current.client if self._current is not None else None

    def _loss(self, more: str = "") -> EngineLost:
        if self._closing:
            return EngineLost("the engine is closed", reason="closed")
        reason = self._current.why if self._current is not None else "starting"
        retry_after = _clamp(self._expected - anyio.current_time())
        return EngineLost(
            f"engine {self._number} takes no requests: {reason}; "
            f"retry in {retry_after:.0f} s{more}",
            reason=reason,
            retry_after=retry_after,
        )

    def _announce(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _clamp(seconds: float) -> float:
    return min(60.0, max(1.0, seconds))
