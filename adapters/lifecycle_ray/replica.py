"""One replica: the actor that runs a backend, and its client in this process."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)

from lifecycle import EngineLost
from lifecycle.lowlevel import ThreadsafeEvent
from lifecycle_ray.placement import Placement
from lifecycle_zmq import (
    Backend,
    EncodeError,
    EngineClient,
    EngineLoop,
    SupervisedEngine,
)
from lifecycle_zmq.shared_memory.tensors import Buffer
from lifecycle_zmq.supervisor import EngineInstance
from lifecycle_zmq.thread_engine import QueuedTransport
from lifecycle_zmq.transport.base import MessageHandler


def future_of(reference: Any, notify: Callable[[], None]) -> Future[Any]:
    """Return the future of an object; `notify` is called from any thread at its end."""
    future: Future[Any] = reference.future()
    future.add_done_callback(lambda _: notify())
    return future


async def result(reference: Any) -> Any:
    """Wait for an object on asyncio or trio, and return it.

    Raises:
        ray.exceptions.RayError: The call failed, or its actor is gone.

    Cancellation: the call continues; its result is dropped.
    """
    event = ThreadsafeEvent()
    future = future_of(reference, event.set)
    while not future.done():
        await event.wait()
    return future.result()


# A pull without messages returns after this time, and shows that the actor lives.
PULL_SECONDS = 1.0


class RayTransport:
    """The server's side of one actor: a `ClientTransport` of calls, without a socket.

    One pull is pending at any time, so that all messages of one step cost one call,
    for any number of streams.

    Args:
        actor: Handle of an `EngineActor`.
        handle: Called with each message received.
        on_reply: Called with each result of a pull, before its messages are handled.
        on_error: Called once, with the error of a failed call.
    """

    def __init__(
        self,
        actor: Any,
        handle: MessageHandler,
        *,
        on_reply: Callable[[PullReply], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._actor = actor
        self._handle = handle
        self._on_reply = on_reply
        self._on_error = on_error
        self._sent = 0
        self._pull: Future[PullReply] | None = None
        self._pushed: set[Future[None]] = set()
        self._event = ThreadsafeEvent()
        self._closed = False

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Put tensors into the object store, and call; return False after a failure.

        The references are dropped at once: only the call keeps the tensors, until the
        actor has dropped them.

        Raises:
            EncodeError: The object store is full.
        """
        if self._closed:
            return False
        head, *memory = parts
        try:
            tensors = [ray.put(np.frombuffer(it, np.uint8)) for it in memory]
        except (ObjectStoreFullError, OutOfDiskError):
            raise EncodeError(
                "no_memory", "the object store is full; admit fewer bytes at a time"
            ) from None
        reference = self._actor.push.remote(self._sent, bytes(head), *tensors)
        self._sent += 1
        self._pushed.add(future_of(reference, self._event.set))
        return True

    def drain(self) -> None:
        """Handle the result of the last pull, if it has returned."""
        pull = self._pull
        if pull is None or not pull.done() or self._closed:
            return
        self._pull = None
        try:
            reply = pull.result()
        except RayError as error:
            self._fail(error)
            return
        self._on_reply(reply)
        for head in reply.messages:
            if not self._handle([head]):
                return

    async def pump(self, greet: Callable[[], bool]) -> None:
        """Pull forever.

        Cancellation: at any time; a pending pull is dropped.
        """
        greet()
        while not self._closed:
            if self._pull is None:
                reference = self._actor.pull.remote(PULL_SECONDS)
                self._pull = future_of(reference, self._event.set)
            await self._event.wait()
            self._check_pushes()
            self.drain()
        await anyio.sleep_forever()

    def close(self) -> None:
        """Stop receiving and sending."""
        self._closed = True
        self._pull = None
        self._pushed.clear()

    def _check_pushes(self) -> None:
        for push in [it for it in self._pushed if it.done()]:
            self._pushed.discard(push)
            # After a lost push the actor would wait forever with all later ones.
            error = push.exception()
            if error is not None:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._closed:
            self._closed = True
            self._on_error(error)


Factory = Callable[[], Backend]

# The only client of an actor. Another owner has its own actors.
_OWNER = b"owner"
EXIT_FAILED = 70


class PullReply(NamedTuple):
    """An answer to `pull`.

    Attributes:
        messages: The engine's messages since the last pull, in order.
        turns: Number of turns of the engine's loop so far.
        working: Whether the loop is running, not waiting.
    """

    messages: list[bytes]
    turns: int
    working: bool


class EngineActor:
    """Runs a backend in a thread; its owner pushes messages and pulls answers.

    It is one incarnation of an engine: when its backend fails, its process exits.

    Args:
        factory: Creates the backend, or names that function: ``"package.module:name"``.
        incarnation: Number that every message contains.
        hold: As for `lifecycle_zmq.EngineServer`.
        stall: As for `lifecycle_zmq.EngineServer`.
        owner_timeout: Seconds without a pull after which the owner counts as lost, and
            all its streams are ended.
    """

    def __init__(
        self,
        factory: Factory | str,
        *,
        incarnation: int,
        hold: int,
        stall: float,
        owner_timeout: float,
    ) -> None:
        self._factory = factory
        self._options: dict[str, Any] = {
            "incarnation": incarnation,
            "hold": hold,
            "stall": stall,
        }
        self._transport = QueuedTransport()
        self._outgoing: deque[bytes] = deque()
        self._outgoing_changed = threading.Condition()
        self._order = ReorderBuffer(self._transport)
        self._owner_timeout = owner_timeout
        # ``None`` until the first pull: the backend is still being created.
        self._last_pull: float | None = None
        self._pulling = False
        self._owner_lost = False
        self._backend_created = threading.Event()
        self._failure: Exception | None = None
        self._transport.connect(_OWNER, self._send)
        for run in (self._run, self._watch_owner):
            threading.Thread(target=run, name="lifecycle-engine", daemon=True).start()

    @ray.method(concurrency_group="control")
    def hello(self) -> dict[str, Any]:
        """Return process and node once the backend is built; raise if that failed."""
        self._backend_created.wait()
        if self._failure is not None:
            raise self._failure
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": node}

    @ray.method(concurrency_group="control")
    def push(self, number: int, head: bytes, *tensors: np.ndarray) -> None:
        """Accept a message; one that arrives early waits for earlier ones."""
        self._order.put(number, [head, *(it.data for it in tensors)])

    @ray.method(concurrency_group="pull")
    def pull(self, seconds: float) -> PullReply:
        """Return the messages since the last pull; wait at most *seconds* for one.

        Raises:
            RuntimeError: The last pull is longer ago than ``owner_timeout``.
        """
        self._pulling = True
        if self._owner_lost:
            raise RuntimeError("the owner came back too late; its streams are ended")
        try:
            with self._outgoing_changed:
                self._outgoing_changed.wait_for(lambda: self._outgoing, seconds)
            messages = [self._outgoing.popleft() for _ in range(len(self._outgoing))]
            return PullReply(
                messages, self._transport.beats, not self._transport.waiting
            )
        finally:
            self._last_pull = time.monotonic()
            self._pulling = False

    def _send(self, head: bytes) -> None:
        with self._outgoing_changed:
            self._outgoing.append(head)
            self._outgoing_changed.notify()

    def _run(self) -> None:
        try:
            loop = EngineLoop(_create_backend(self._factory), **self._options)
        except Exception as error:  # noqa: BLE001 - raised in `hello`
            self._failure = error
            self._backend_created.set()
            return
        except BaseException as error:  # noqa: ASYNC103, BLE001 - no loop runs here
            # For example a lost device. Raised as it is, Ray would take it for an
            # intended exit of the actor.
            self._failure = RuntimeError(str(error))
            self._backend_created.set()
            return  # noqa: ASYNC104 - as above
        self._backend_created.set()
        try:
            loop.run(self._transport, self._transport)
        finally:
            # Nothing is served any more. Exiting frees everything that was held.
            os._exit(EXIT_FAILED)

    def _watch_owner(self) -> None:
        # Ray terminates the actors of a driver whose death it detects. This handles
        # a driver that is stopped or partitioned.
        while True:
            time.sleep(self._owner_timeout / 4)
            if self._pulling or self._last_pull is None:
                continue
            if time.monotonic() - self._last_pull > self._owner_timeout:
                self._owner_lost = True
                self._transport.disconnect(_OWNER)


class ReorderBuffer:
    """Restores the order of messages: calls run in threads, and wait for tensors."""

    def __init__(self, transport: QueuedTransport) -> None:
        self._transport = transport
        self._next = 0
        self._early: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def put(self, number: int, parts: list[Any]) -> None:
        """Pass message *number* on once all earlier ones were passed on."""
        with self._lock:
            self._early[number] = parts
            while self._next in self._early:
                self._transport.put(_OWNER, self._early.pop(self._next))
                self._next += 1


def _create_backend(factory: Factory | str) -> Backend:
    if not isinstance(factory, str):
        return factory()
    made: Backend = resolve_name(factory)()
    return made


_CONCURRENCY = {"pull": 1, "control": 4}
_SAMPLE_SECONDS = 0.25
_MAX_GAP_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings:
    """Options of each actor of one replica; see `RayEngine`."""

    factory: Factory | str
    replica: int
    placement: Placement
    hold: int
    stall: float
    ready_timeout: float
    busy_after: float
    stalled_after: float
    silent_after: float
    owner_timeout: float


class Replica(SupervisedEngine["ActorInstance"]):
    """One replica of a `RayEngine`: an actor, replaced when it dies."""

    def _output_tail(self) -> str:
        current = self._supervisor.current
        return f"; {current.output}" if current is not None and current.output else ""

    @property
    def place(self) -> Mapping[str, Any]:
        """Process and node of the current actor; empty without one."""
        current = self._supervisor.current
        return current.place if current is not None and self.ready else {}

    def check_new(self) -> None:
        """Raise `RuntimeError` if it was entered or closed before."""
        self._supervisor.check_new()

    def check(self) -> None:
        """Raise `RuntimeError` if it is not entered, or in another thread."""
        self._supervisor.check_entered()
        self._supervisor.check_thread()

    def lost(self) -> EngineLost | None:
        """Return the error to raise when no actor runs or is being created."""
        it = self._supervisor
        return it.lost_error() if it.closing or it.broken else None

    def holds(self, key: str) -> bool:
        """Whether this replica has an unfinished stream with that key."""
        return self._client is not None and key in self._client


class ActorInstance(EngineInstance):
    """One actor with its client: an incarnation of a replica.

    An actor is never restarted by Ray, which would report the death only after the
    restart. The death of an actor without restarts is reported in milliseconds, and
    no message for it can reach its replacement, which Ray places anew.
    """

    def __init__(
        self,
        settings: ActorSettings,
        number: int,
        retry_after: float,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(number, retry_after, changed)
        self._settings = settings
        self._actor: Any = None
        self._turns = 0
        # Seconds without an answer of the actor, and without a turn of its loop.
        self._silent_for = self._stalled_for = 0.0
        self.place: Mapping[str, Any] = {}
        self.output = ""

    @property
    def health(self) -> Literal["serving", "busy", "stalled"] | None:
        """Health according to the last pull."""
        if self.client is None:
            return None
        if not self.client.ready:
            return "stalled" if self.client.lost == "stalled" else None
        return "busy" if self._stalled_for > self._settings.busy_after else "serving"

    async def run(self) -> None:
        """Create the actor, serve, kill it; an error becomes the reason.

        Cancellation: the actor is killed, its requests fail.
        """
        try:
            await self._run()
        except Exception as error:  # noqa: BLE001 - raised in `wait_ready`
            self.reason = loss_reason(error, "start_failed")
            self.output = str(error)[-2000:]
        finally:
            self._kill_actor()

    async def _run(self) -> None:
        await anyio.to_thread.run_sync(self._create_actor)
        with anyio.move_on_after(self._settings.ready_timeout) as waiting:
            self.place = await result(self._actor.hello.remote())
        if waiting.cancelled_caught:
            self.reason = "start_timeout"
            return
        async with EngineClient(
            lambda handle: RayTransport(
                self._actor, handle, on_reply=self._on_pull, on_error=self._fail
            ),
            incarnation=self._number,
            retry_after=self._retry_after,
        ) as client:
            self.client = client
            try:
                await self._serve(client)
            finally:
                client.mark_failed("closed")
                self.reason = client.lost or "closed"
                self.client = None

    async def _serve(self, client: EngineClient) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._await_ready, client)
            tasks.start_soon(self._watch, client)
            await client.wait_lost()
            tasks.cancel_scope.cancel()
        self._changed()

    async def _watch(self, client: EngineClient) -> None:
        limits, seen = self._settings, anyio.current_time()
        while True:
            await anyio.sleep(_SAMPLE_SECONDS)
            now = anyio.current_time()
            # A longer gap is a delay of our own loop, which has unread answers.
            gap, seen = min(now - seen, _MAX_GAP_SECONDS), now
            self._silent_for += gap
            self._stalled_for += gap
            if self._silent_for > limits.silent_after:
                client.mark_failed("silent")
            elif self._stalled_for > limits.stalled_after:
                client.mark_failed("stalled")

    def _on_pull(self, reply: PullReply) -> None:
        self._silent_for = 0.0
        if reply.turns != self._turns or not reply.working:
            self._turns = reply.turns
            self._stalled_for = 0.0

    def _fail(self, error: BaseException) -> None:
        if self.client is not None:
            self.client.mark_failed(loss_reason(error, "ray_failed"))

    def _create_actor(self) -> None:
        settings = self._settings
        remote: Any = ray.remote
        make = remote(concurrency_groups=_CONCURRENCY)(EngineActor)
        self._actor = make.options(
            max_restarts=0,
            max_task_retries=0,
            **settings.placement.options(settings.replica),
        ).remote(
            settings.factory,
            incarnation=self._number,
            hold=settings.hold,
            stall=settings.stall,
            owner_timeout=settings.owner_timeout,
        )

    def _kill_actor(self) -> None:
        # This ends everything that runs there for us, known or not.
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            ray.kill(actor)


def loss_reason(error: BaseException, otherwise: str) -> str:
    """Return the reason for the loss of an actor, in one word."""
    if isinstance(error, OutOfMemoryError):
        return "out_of_memory"
    if isinstance(error, ActorUnavailableError):
        return "unreachable"
    if isinstance(error, RayActorError):
        # Ray has no type or field for it.
        return "node_died" if "its node has died" in str(error) else "died"
    return otherwise
