"""What the endpoints share: the engine, its gates and its sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import anyio

from lifecycle import EngineLost, Gate, Lease, Payload, SessionRegistry

from .images.correction import Correction
from .images.remote_images import RemoteImages
from .incoming import Intake
from .processor import Processor
from .routes.patience import Forecast
from .routes.places import Places


class Engine(Protocol):
    """An engine in another process: `lifecycle_zmq.ZmqEngine`, for one."""

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        ...

    @property
    def pid(self) -> int | None:
        """Of the engine process, if there is one."""
        ...

    @property
    def incarnation(self) -> int:
        """Number of the engine process since the server started."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None: ...

    async def wait_ready(self) -> None:
        """Wait until requests are taken; `EngineLost` if it ended before."""
        ...

    async def start(
        self,
        key: str,
        request: Mapping[str, Any],
        tensors: Payload[Mapping[str, Any]] | None = None,
    ) -> AsyncIterator[Any]:
        """Hand a request over; returns once the engine has accepted it."""
        ...

    async def end(self, key: str) -> None:
        """Make the engine forget the request."""
        ...

    async def status(self) -> dict[str, Any]:
        """The engine's counters."""
        ...

    def close(self) -> None:
        """Give the engine up now; whoever waits for it is told."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that the engine may take.

    Attributes:
        start: From admission until the engine has accepted, preprocessing
            included.
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

    Made without an event loop, run by the application's lifespan.

    Attributes:
        model: The name that clients ask for.
        engine: Runs the requests.
        processor: Turns chats into engine requests.
        intake: Reads and checks requests.
        bodies: Gate over the bytes of request bodies, until hand-off.
        payloads: Gate over the bytes of payloads, until the engine has read them.
        in_flight: Gate over requests, until their end.
        threads: Bounds preprocessing.
        deadlines: For the engine.
        new_sessions: Makes the registry of one run.
        client: Whose a request is, by its ASGI scope.
        correction: Of what payloads are estimated to weigh.
        remote: Fetches images; ``None`` fetches none.
        failure: What is wrong with what the engine was told, if it could not begin.
    """

    model: str
    engine: Engine
    processor: Processor
    intake: Intake
    bodies: Gate
    payloads: Gate
    in_flight: Gate
    threads: anyio.CapacityLimiter
    deadlines: Deadlines
    new_sessions: Callable[[], SessionRegistry]
    client: Callable[[Any], bytes]
    correction: Correction = field(default_factory=Correction)
    _forecasts: dict[Gate, Forecast] = field(default_factory=dict, init=False)
    remote: RemoteImages | None = None
    failure: OSError | ValueError | None = field(default=None, init=False)
    _sessions: SessionRegistry | None = field(default=None, init=False)
    _places: Places = field(init=False)

    def __post_init__(self) -> None:
        self._places = Places(self.in_flight)

    @property
    def places(self) -> Places:
        """Called by the routes: of requests in flight, and those still being read."""
        return self._places

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine and the sessions.

        Cancellation:
            Ends both, the sessions first: the engine has to be told of their end.
        """
        self._sessions = self.new_sessions()
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.engine)
            except (OSError, ValueError) as error:
                self.failure = error
                raise
            await stack.enter_async_context(self._sessions)
            yield

    @property
    def sessions(self) -> SessionRegistry:
        """Every request from its arrival until its engine is quiet.

        Raises:
            RuntimeError: The service does not run.
        """
        if self._sessions is None:
            message = "the service does not run; serve its application with lifespan on"
            raise RuntimeError(message)
        return self._sessions

    async def admit(self, gate: Gate, *, until: float, size: int = 0) -> Lease:
        """Admit a request whose client gives up at *until*, by the loop's clock.

        One whose turn would come too late does not wait for it: it gets in now or is
        refused.

        Raises:
            Refused: As from `Gate.admit`.

        Cancellation:
            As for `Gate.admit`.
        """
        forecast = self._forecasts.get(gate)
        if forecast is None:
            forecast = self._forecasts[gate] = Forecast(gate)
        if anyio.current_time() + forecast.wait() > until:
            return await gate.admit(bytes=size, max_wait=0)
        return await gate.admit(bytes=size)

    async def refuse_when_broken(self) -> None:
        """Refuse now who would be refused when all is read and made for it.

        Only while no engine is being started: one that is may be there by then.

        Raises:
            EngineLost: It says when there may be one again.

        Cancellation:
            At any time.
        """
        if not self.engine.ready:
            with anyio.move_on_after(0):
                await self.engine.wait_ready()

    @property
    def gates(self) -> tuple[Gate, ...]:
        """All that there are, in the order in which a request passes them."""
        fetched = (self.remote.gate,) if self.remote is not None else ()
        return self.bodies, self.in_flight, *fetched, self.payloads

    @property
    def ready(self) -> bool:
        """Whether a request that arrives now can be served."""
        open_ = not (self.sessions.draining or self.in_flight.closed)
        return open_ and self.engine.ready

    async def engine_status(self, patience: float = 1.0) -> dict[str, Any] | None:
        """The engine's counters, or ``None`` where it does not tell in time.

        Cancellation:
            At any time.
        """
        with anyio.move_on_after(patience):
            try:
                return await self.engine.status()
            except EngineLost:
                return None
        return None
