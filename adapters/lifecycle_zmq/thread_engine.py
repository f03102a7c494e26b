"""`ThreadEngine`: an engine in a thread of this process, over in-memory queues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from lifecycle.lowlevel import ThreadsafeEvent, check_int, check_seconds, check_type
from lifecycle_zmq.backend import Backend
from lifecycle_zmq.client import EngineClient
from lifecycle_zmq.exceptions import log_exception
from lifecycle_zmq.server import EngineLoop
from lifecycle_zmq.shared_memory.tensors import Buffer
from lifecycle_zmq.supervisor import (
    EngineInstance,
    Restarts,
    SupervisedEngine,
    Supervisor,
)
from lifecycle_zmq.transport.base import MessageHandler


class QueuedTransport:
    """Carries messages between the thread of an `EngineLoop` and other threads.

    Attributes:
        beats: Number of turns of the loop, as a heartbeat.
        waiting: Whether the loop sleeps until a message arrives.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[bytes, Sequence[Buffer] | None]] = deque()
        self._condition = threading.Condition()
        self._clients: dict[bytes, Callable[[bytes], None]] = {}
        # Set if the backend has an event loop.
        self._event: ThreadsafeEvent | None = None
        self.beats = 0
        self.waiting = False

    def connect(self, address: bytes, deliver: Callable[[bytes], None]) -> None:
        """Add a client; `deliver` takes its messages, in the loop's thread."""
        self._clients[address] = deliver

    def disconnect(self, address: bytes) -> None:
        """Remove a client: its streams end, it is sent nothing more."""
        if self._clients.pop(address, None) is not None:
            self._append(address, None)

    def put(self, address: bytes, parts: Sequence[Buffer]) -> None:
        """Take a message of a client; the parts belong to the engine from now on."""
        self._append(address, parts)

    def poll(self, milliseconds: int | None) -> None:
        """Wait until there is a message, or for a time; ``None``: no limit."""
        seconds = None if milliseconds is None else milliseconds / 1000
        with self._condition:
            self._condition.wait_for(lambda: self._arrived, seconds)

    @property
    def ahead(self) -> bool:
        """Whether there is a message to receive."""
        return bool(self._arrived)

    @property
    def full(self) -> bool:
        """Always False: clients take every message at once."""
        return False

    async def wait(self, *, room: bool = False) -> None:
        """Wait until a message may have arrived; in the loop's thread, one task only.

        Cancellation: nothing is lost.
        """
        del room
        if self._event is None:
            self._event = ThreadsafeEvent()
        if self._arrived:
            await anyio.lowlevel.checkpoint()  # lets other tasks run
        else:
            await self._event.wait()

    def beat(self, *, idle: bool) -> None:
        """Record a turn of the loop, or the begin of its sleep."""
        self.beats += 1
        self.waiting = idle

    def receive(self) -> tuple[bytes, Sequence[Buffer] | None] | None:
        """Return sender and parts of the next message; None if there is none."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, address: bytes, head: bytes) -> bool:
        """Send a message to a client; False if that client is gone."""
        deliver = self._clients.get(address)
        if deliver is None:
            return False
        deliver(head)
        return True

    def _append(self, address: bytes, parts: Sequence[Buffer] | None) -> None:
        with self._condition:
            self._arrived.append((address, parts))
            self._condition.notify()
        if self._event is not None:
            self._event.set()


_ADDRESS = b"owner"
_BURST = 256


class ThreadEngine(SupervisedEngine["ThreadInstance"]):
    """Runs a backend in a thread of this process, and restarts it when it fails.

    For tests, and for engines that need no process. The guarantees are those of a
    process, except what only a process can give: a crash of C code ends the server, a
    step that hangs cannot be killed, and payloads are the caller's own memory, not
    copied, until the backend drops them.

    Args:
        factory: Makes the backend, in its thread.
        hold: As for `EngineServer`.
        stall: As for `EngineServer`.
        stop_timeout: Seconds that a step may take to end when the engine stops; then
            its thread is abandoned.
        restarts: When a new backend is made; ``None``: after half a second, doubled
            up to thirty, and not after four exits in a minute.

    Raises:
        TypeError: An option has the wrong type.
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
        check_int(hold=hold)
        check_seconds(stall=stall, stop_timeout=stop_timeout)
        check_type(Restarts | None, "restarts must be Restarts or None", restarts)

        def spawn(
            number: int, retry_after: float, changed: Callable[[], None]
        ) -> ThreadInstance:
            loop = _EngineThread(factory, number, hold, stall)
            return ThreadInstance(loop, number, retry_after, changed, stop_timeout)

        super().__init__(Supervisor(spawn, restarts or Restarts()))


class _EngineThread:
    """The thread, and the exception that ended it."""

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
        self.finished = threading.Event()

    def start(self, done: Callable[[], None]) -> None:
        threading.Thread(
            target=self._run, args=(done,), name="lifecycle-engine", daemon=True
        ).start()

    def stop(self) -> None:
        self._stopped = True
        if self._loop is not None:
            self._loop.stop()
        # The last message; it wakes the loop, too.
        self.transport.disconnect(_ADDRESS)

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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to waiters
            log_exception("the engine's thread", error)
            self.failure = error.with_traceback(None)
        finally:
            self.finished.set()
            done()


class ThreadInstance(EngineInstance):
    """One thread with its client: an incarnation of a `ThreadEngine`."""

    def __init__(
        self,
        loop: _EngineThread,
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

        Cancellation: the thread is asked to end, and given `stop_timeout`.
        """
        finished = ThreadsafeEvent()
        try:
            self._loop.start(finished.set)
        except RuntimeError:  # the system has no thread left; later it may
            self.reason = "spawn_failed"
            return
        try:
            async with EngineClient(
                lambda handle: _QueuedClient(self._loop.transport, handle),
                incarnation=self._number,
                retry_after=self._retry_after,
            ) as client:
                self.client = client
                await self._watch(client, finished)
        finally:
            self.client = None
            # Drops the backend, and the requests in it.
            del self._loop

    async def _watch(self, client: EngineClient, finished: ThreadsafeEvent) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._await_ready, client)
                tasks.start_soon(self._stop_when_lost, client)
                while not self._loop.finished.is_set():
                    await finished.wait()
                tasks.cancel_scope.cancel()
        finally:
            client.drain()
            failure = self._loop.failure
            client.mark_failed("exit" if failure is None else type(failure).__name__)
            self.reason = client.lost or "exit"
            self._changed()
            self._loop.stop()
            with anyio.move_on_after(self._stop_timeout, shield=True):
                while not self._loop.finished.is_set():
                    await finished.wait()

    async def _stop_when_lost(self, client: EngineClient) -> None:
        await client.wait_lost()
        self._changed()
        self._loop.stop()


class _QueuedClient:
    """A `ClientTransport` to a `QueuedTransport` of the same process."""

    def __init__(self, transport: QueuedTransport, handle: MessageHandler) -> None:
        self._transport = transport
        self._handle = handle
        self._arrived: deque[bytes] = deque()
        self._event = ThreadsafeEvent()
        transport.connect(_ADDRESS, self._deliver)

    def _deliver(self, head: bytes) -> None:
        self._arrived.append(head)
        self._event.set()

    def send(self, parts: Sequence[Buffer]) -> bool:
        head, *memory = parts
        # Plain bytes, as from a socket.
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
            await self._event.wait()
            for _ in range(_BURST):
                if not self._handle_next():
                    break
            else:
                self._event.set()
                await anyio.lowlevel.checkpoint()

    def close(self) -> None:
        self._transport.disconnect(_ADDRESS)

    def _handle_next(self) -> bool:
        return bool(self._arrived) and self._handle([self._arrived.popleft()])
