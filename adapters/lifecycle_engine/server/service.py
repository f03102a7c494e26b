"""What all endpoints share: the engine, the processor, the gates and the sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self
from weakref import WeakKeyDictionary

import anyio

from lifecycle import (
    EngineLost,
    Gate,
    Payload,
    Session,
    SessionRegistry,
)
from lifecycle_asgi import Admission, client_address
from lifecycle_engine.api.request_body import RequestParser
from lifecycle_engine.processing.processor import Processor
from lifecycle_engine.server.remote_images import RemoteImages


class Engine(Protocol):
    """An engine in another process, such as `lifecycle_zmq.ZmqEngine`."""

    @property
    def ready(self) -> bool:
        """Whether the engine accepts requests now."""

    @property
    def pid(self) -> int | None:
        """Process id of the engine; ``None`` while no process runs."""

    @property
    def incarnation(self) -> int:
        """Number of engine processes started so far."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> bool | None: ...

    async def wait_ready(self) -> None:
        """Wait until the engine accepts requests; `EngineLost` if it ended first."""

    async def start(
        self,
        key: str,
        request: Mapping[str, Any],
        tensors: Payload[Mapping[str, Any]] | None = None,
    ) -> AsyncIterator[Any]:
        """Hand a request off; returns once the engine has accepted it."""

    async def end(self, key: str) -> None:
        """Make the engine forget the request."""

    async def status(self) -> dict[str, Any]:
        """Return the engine's counters."""

    def close(self) -> None:
        """Abandon the engine now; pending calls fail with `EngineLost`."""


ID_IS_SECRET: Final = b""
"""In place of an owner: whoever knows the id of the request may cancel it."""


def cancel_right(scope: Any, client: bytes) -> bytes | None:
    """Return who may cancel a request by its id; ``None`` for the operator alone.

    Its client, by the key that it sent. An address proves nothing, as all clients of a
    proxy share one: without a key, the right is to know an id that the server drew, and
    the response named. An id that the client chose could be guessed.
    """
    if client != client_address(scope):
        return client
    chosen = any(name == b"x-request-id" for name, _ in scope["headers"])
    return None if chosen else ID_IS_SECRET


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Timeouts for the engine, in seconds.

    Attributes:
        start: From admission until the engine has accepted the request,
            preprocessing included.
        first_token: From then until the first token.
        idle: Between two tokens.
        total: For the whole stream; ``None`` is unbounded.
    """

    start: float = 60.0
    first_token: float = 120.0
    idle: float = 60.0
    total: float | None = None


@dataclass(slots=True, kw_only=True)
class Service:
    """One model behind one engine.

    Created without an event loop; the application's lifespan runs it.

    Attributes:
        model: Model name for clients.
        engine: Runs the requests.
        processor: Turns chats into engine requests.
        parser: Validates request bodies.
        admission: Reads and admits requests.
        payloads: Gate over the bytes of payloads, until the engine has read them.
        in_flight: Gate over requests, until they end.
        threads: Limits concurrent preprocessing of images.
        text_threads: Limits concurrent preprocessing of text alone, which waits behind
            no image.
        deadlines: Timeouts for the engine.
        new_sessions: Creates the session registry of one run.
        client: Returns a request's client identity, given its ASGI scope.
        remote: Fetches images by URL; ``None`` disables fetching.
        sessions: Every request, from its arrival until the engine has released it; a
            new registry in each run.
        owners: The client that alone may cancel a session by its id, by `cancel_right`.
        failure: Why the engine could not be entered, if it could not.
        started: Whether the lifespan has been entered; without it there is no engine.
    """

    model: str
    engine: Engine
    processor: Processor
    parser: RequestParser
    admission: Admission
    payloads: Gate
    in_flight: Gate
    threads: anyio.CapacityLimiter
    text_threads: anyio.CapacityLimiter
    deadlines: Deadlines
    new_sessions: Callable[[], SessionRegistry]
    client: Callable[[Any], bytes]
    remote: RemoteImages | None = None
    failure: OSError | ValueError | None = field(default=None, init=False)
    started: bool = field(default=False, init=False)
    sessions: SessionRegistry = field(init=False)
    owners: WeakKeyDictionary[Session, bytes | None] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    def __post_init__(self) -> None:
        self.sessions = self.new_sessions()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine and the sessions.

        Cancellation:
            Ends both, sessions first, because the engine must receive their END.
        """
        self.sessions = self.new_sessions()
        self.started = True
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.engine)
            except (OSError, ValueError) as error:
                self.failure = error
                raise
            await stack.enter_async_context(self.sessions)
            yield

    @property
    def gates(self) -> tuple[Gate, ...]:
        """All gates, in the order in which a request passes them."""
        fetched = (self.remote.gate,) if self.remote is not None else ()
        return *self.admission.gates, *fetched

    @property
    def ready(self) -> bool:
        """Whether a request that arrives now can be served."""
        open_ = not (self.sessions.draining or self.in_flight.closed)
        return open_ and self.engine.ready

    async def engine_status(self, timeout: float = 1.0) -> dict[str, Any] | None:
        """Return the engine's counters; ``None`` if it does not answer in time.

        Cancellation:
            At any time.
        """
        if not self.started:
            return None
        with anyio.move_on_after(timeout):
            try:
                return await self.engine.status()
            except EngineLost:
                return None
        return None
