"""Makes the real registry, client and engine go through a trace of link.pml.

Between a client and an engine loop of the wire protocol, each message waits on one of
two lists until the trace delivers, loses or doubles it. Everything runs in one thread,
and each change is followed until nothing is left to run.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import anyio
from model_checker import Step

from lifecycle import EngineLost, Session, SessionEnded, SessionRegistry
from lifecycle_zmq import EngineClient, EngineLoop, Finish, Output, loss_probe

PHASES = {"starting": 1, "started": 2, "closing": 3, "quiet": 4}
# Iterations of the event loop after which nothing is left to run.
_ITERATIONS = 40


class ClientEnd:
    """A client's transport: what it sends is appended to a list."""

    def __init__(self, up: deque[Any], address: bytes, handle: Any) -> None:
        self._up = up
        self._address = address
        self.handle = handle

    def send(self, parts: Sequence[Any]) -> bool:
        self._up.append((self._address, [bytes(part) for part in parts]))
        return True

    def drain(self) -> None:
        """Nothing arrives by itself."""

    async def pump(self, greet: Callable[[], bool]) -> None:
        greet()
        await anyio.sleep_forever()

    def close(self) -> None:
        """There is nothing to close."""


class Engine:
    """An engine loop, its transport, and a backend that does what the trace says."""

    def __init__(self, incarnation: int, down: deque[bytes]) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.outputs: list[Output] = []
        self._down = down
        self._arrived: deque[Any] = deque()
        self.loop = EngineLoop(self, incarnation=incarnation)
        self.loop._transport = self
        self.loop._heartbeat = self

    # The heartbeat.

    def beat(self, *, idle: bool) -> None:
        """No process watches this engine."""

    # The transport.

    def poll(self, milliseconds: int | None) -> None:
        """Nothing arrives by itself."""

    def receive(self) -> Any:
        return self._arrived.popleft() if self._arrived else None

    def send(self, address: bytes, head: bytes) -> bool:
        self._down.append(bytes(head))
        return True

    # The backend.

    def start(self, key: str, request: Any, tensors: Any) -> None:
        self.begun.append(key)

    def cancel(self, key: str) -> None:
        """The trace decides when a stream finishes."""

    def end(self, key: str) -> None:
        self.ended.append(key)

    @property
    def busy(self) -> bool:
        return bool(self.outputs)

    def step(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def status(self) -> dict[str, Any]:
        return {}

    # What the trace does.

    def take(self, message: Any) -> None:
        self._arrived.append(message)
        self.loop.turn()

    def finish(self, key: str) -> None:
        self.outputs.append(Output(key, (), Finish("completed")))
        self.loop.turn()

    def live(self, key: str) -> bool:
        return key in self.loop._state.streams


class LinkReplay:
    """All that the model has, for real."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry
        self._over = anyio.Event()
        self._tasks = anyio.create_task_group()
        self._up: deque[Any] = deque()
        self._down: deque[bytes] = deque()
        self._incarnation = 0
        self._engines: list[Engine] = []
        self._alive = False
        self._sessions: dict[int, Session] = {}
        self._streams: dict[int, Any] = {}
        self._ends: dict[int, anyio.CancelScope] = {}

    async def connect(self) -> None:
        """Start an engine, and a client of it."""
        self._incarnation += 1
        self._engines.append(Engine(self._incarnation, self._down))
        self._alive = True
        connected = partial(ClientEnd, self._up, b"%d" % self._incarnation)
        self._client = EngineClient(connected, incarnation=self._incarnation)
        self._tasks.start_soon(self._keep, self._client)
        await self.follow()

    async def _keep(self, client: EngineClient) -> None:
        async with client:
            await self._over.wait()

    async def follow(self) -> None:
        """Let everything run that can."""
        for _ in range(_ITERATIONS):
            await asyncio.sleep(0)

    async def _own(self, number: int, session: Session, client: EngineClient) -> None:
        async def end(_: object) -> None:
            with anyio.CancelScope() as scope:
                self._ends[number] = scope
                await client.end(session.key)
                return
            raise TimeoutError

        opening = partial(client.start, session.key, {})
        try:
            stream = await session.start(opening, end=end, timeout=math.inf)
            self._streams[number] = stream
        except (EngineLost, SessionEnded):
            session.close("engine_lost")

    async def play(self, step: Step) -> None:  # noqa: PLR0912 - one for each change
        """Make one change."""
        who, engine = step.who, self._engines[-1]
        match step.what:
            case "Open":
                session = self._sessions[who] = self._registry.open("a")
                self._tasks.start_soon(self._own, who, session, self._client)
            case "Close":
                self._sessions[who].close()
            case "Cut":
                self._sessions[who]._cut_starts()
            case "Stop":
                self._streams[who].close_nowait()
            case "GiveUp":
                self._ends[who].cancel()
            case "Hear":
                self._client._link.handle([self._down.popleft()])
            case "Take":
                engine.take(self._up.popleft())
            case "Finish":
                engine.finish(self._sessions[who].key)
            case "LoseUp":
                self._up.popleft()
            case "LoseDown":
                self._down.popleft()
            case "DoubleUp":
                self._up.append(self._up[0])
            case "DoubleDown":
                self._down.append(self._down[0])
            case "Die":
                self._alive = False
                self._down.clear()
                self._client.mark_failed("killed")
            case "Connect":
                await self.connect()
            case _:
                raise AssertionError(step)
        await self.follow()

    def seen(self) -> tuple[int, ...]:
        """Return what the model shows of itself."""
        phases, live, failed = [0, 0], 0, 0
        for number, session in self._sessions.items():
            phases[number] = PHASES[session.phase]
            if self._alive and self._engines[-1].live(session.key):
                live |= 1 << number
            if session.key in self._registry.quarantined():
                failed |= 1 << number
        lost = self._client.lost is not None
        wires = len(self._up), len(self._down)
        rest = int(self._client.ready), int(lost), *wires, self._incarnation
        return (*phases, live, failed, *rest)

    def check_once(self) -> None:
        """No engine began or ended a stream twice, or one that it had not begun."""
        for engine in self._engines:
            assert len(set(engine.begun)) == len(engine.begun)
            assert len(set(engine.ended)) == len(engine.ended)
            assert set(engine.ended) <= set(engine.begun)

    async def run(self, steps: list[Step]) -> None:
        """Go through a trace, and compare after each change."""
        async with self._tasks:
            try:
                await self.connect()
                for number, step in enumerate(steps):
                    await self.play(step)
                    assert self.seen() == step.seen, (number, steps[: number + 1])
                    self.check_once()
            finally:
                # Without an engine, every END is done.
                self._client.mark_failed("closed")
                self._registry.close_all()
                self._over.set()


async def replay(steps: list[Step]) -> None:
    """Go through a trace, and compare after each change."""
    # The trace has no PING.
    with mock.patch.object(loss_probe, "_PING_SECONDS", math.inf):
        await _replay(steps)


async def _replay(steps: list[Step]) -> None:
    async with SessionRegistry(end_timeout=math.inf) as registry:
        await LinkReplay(registry).run(steps)
