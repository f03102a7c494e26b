"""An engine in a thread of this process: for tests, and for what needs no process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from lifecycle_zmq import _options
from lifecycle_zmq._hand_off import complain
from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.protocol.wire import Buffer
from lifecycle_zmq.server.backend import Backend
from lifecycle_zmq.server.loop import EngineLoop
from lifecycle_zmq.supervision.life import Life
from lifecycle_zmq.supervision.restarts import Restarts
from lifecycle_zmq.supervision.supervised import SupervisedEngine
from lifecycle_zmq.supervision.supervisor import Supervisor
from lifecycle_zmq.transport import Handle
from lifecycle_zmq.transport.bell import Bell
from lifecycle_zmq.transport.queued import QueuedTransport

_ADDRESS = b"owner"
_BURST = 256


class ThreadEngine(SupervisedEngine["Thread"]):
    """Runs a backend in a thread, and another one when that has failed.

    The same promises as a process gives, but for what only a process can: a crash of C
    code takes the server with it, a step that hangs cannot be killed, and what is
    handed over is the caller's own memory, not copied, until the backend lets go.

    Args:
        factory: Makes the backend, in its thread.
        hold: As for `EngineServer`.
        stall: As for `EngineServer`.
        stop_timeout: Seconds that a step may take to end when the engine is to; then
            its thread is left to itself.
        restarts: When another backend is made; ``None``: after half a second, doubled
            up to thirty, and not after four ends in a minute.

    Raises:
        TypeError: One of these is of another kind than it is to be.
        ValueError: A number is less than 0.
    """

    def __init__(
        self,
        factory: Callable[[], Backend],
        *,
        hold: int = 128 * 2**10,
        stall: float = 30.0,
        stop_timeout: float = 5.0,
        restarts: Restarts | None = None,
    ) -> None:
        given: Any = factory
        if not callable(given):
            kind = type(given).__name__
            raise TypeError(f"factory must make a backend, not be one: give {kind}")
        _options.whole(hold=hold)
        _options.seconds(stall=stall, stop_timeout=stop_timeout)
        _options.expect(Restarts | None, "restarts must be Restarts or None", restarts)

        def spawn(
            number: int, retry_after: float, changed: Callable[[], None]
        ) -> Thread:
            loop = _Loop(factory, number, hold, stall)
            return Thread(loop, number, retry_after, changed, stop_timeout)

        super().__init__(Supervisor(spawn, restarts or Restarts()))


class _Loop:
    """The thread, and what it ended with."""

    def __init__(
        self, factory: Callable[[], Backend], number: int, hold: int, stall: float
    ) -> None:
        self._factory = factory
        self._number = number
        self._hold = hold
        self._stall = stall
        self._loop: EngineLoop | None = None
        self._stopped = False
        self.transport = QueuedTransport()
        self.failure: BaseException | None = None
        self.over = threading.Event()

    def start(self, done: Callable[[], None]) -> None:
        threading.Thread(
            target=self._run, args=(done,), name="lifecycle-engine", daemon=True
        ).start()

    def stop(self) -> None:
        self._stopped = True
        if self._loop is not None:
            self._loop.stop()
        # The last thing that comes; it wakes the loop, too.
        self.transport.leave(_ADDRESS)

    def _run(self, done: Callable[[], None]) -> None:
        try:
            self._loop = loop = EngineLoop(
                self._factory(),
                incarnation=self._number,
                hold=self._hold,
                stall=self._stall,
            )
            if not self._stopped:
                loop.run(self.transport, self.transport)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to who waits
            complain("the engine's thread", error)
            self.failure = error.with_traceback(None)
        finally:
            self.over.set()
            done()


class Thread(Life):
    """One thread with its client: an incarnation of a `ThreadEngine`."""

    def __init__(
        self,
        loop: _Loop,
        number: int,
        retry_after: float,
        changed: Callable[[], None],
        stop_timeout: float,
    ) -> None:
        super().__init__(number, retry_after, changed)
        self._loop = loop
        self._stop_timeout = stop_timeout

    async def run(self) -> None:
        """Start the thread, serve until it ends.

        Cancellation: the thread is told to end, and given its time to.
        """
        over = Bell()
        try:
            self._loop.start(over.ring)
        except RuntimeError:  # the system has no more threads; later it may
            self.reason = "spawn_failed"
            return
        try:
            async with EngineClient(
                lambda handle: _LocalLink(self._loop.transport, handle),
                incarnation=self._number,
                retry_after=self._retry_after,
            ) as client:
                self.client = client
                await self._watch(client, over)
        finally:
            self.client = None
            # The backend, and what was handed over to it, go with the thread.
            del self._loop

    async def _watch(self, client: EngineClient, over: Bell) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._await_ready, client)
                tasks.start_soon(self._give_up, client)
                while not self._loop.over.is_set():
                    await over.wait()
                tasks.cancel_scope.cancel()
        finally:
            client.drain()
            failure = self._loop.failure
            client.lose("exit" if failure is None else type(failure).__name__)
            self.reason = client.lost or "exit"
            self._changed()
            self._loop.stop()
            with anyio.move_on_after(self._stop_timeout, shield=True):
                while not self._loop.over.is_set():
                    await over.wait()

    async def _give_up(self, client: EngineClient) -> None:
        await client.wait_lost()
        self._changed()
        self._loop.stop()


class _LocalLink:
    """A `ClientTransport` to a `QueuedTransport` of the same process."""

    def __init__(self, transport: QueuedTransport, handle: Handle) -> None:
        self._transport = transport
        self._handle = handle
        self._arrived: deque[bytes] = deque()
        self._bell = Bell()
        transport.join(_ADDRESS, self._deliver)

    def _deliver(self, head: bytes) -> None:
        self._arrived.append(head)
        self._bell.ring()

    def send(self, parts: Sequence[Buffer]) -> bool:
        head, *memory = parts
        # Plain bytes, as they come from a socket.
        self._transport.put(
            _ADDRESS, [head, *(memoryview(it).cast("B") for it in memory)]
        )
        return True

    def drain(self) -> None:
        while self._handle_next():
            pass

    async def pump(self, greet: Callable[[], bool]) -> None:
        greet()
        while True:
            await self._bell.wait()
            for _ in range(_BURST):
                if not self._handle_next():
                    break
            else:
                self._bell.ring()
                await anyio.lowlevel.checkpoint()

    def close(self) -> None:
        self._transport.leave(_ADDRESS)

    def _handle_next(self) -> bool:
        return bool(self._arrived) and self._handle([self._arrived.popleft()])
