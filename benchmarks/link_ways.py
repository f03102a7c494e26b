"""The ways that benchmarks/link.py compares: the link, and no transport at all."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
from link_load import Stepper, Steps, Transport

from lifecycle import SessionRegistry
from lifecycle_zmq import (
    Backend,
    EngineServer,
    GeneratorBackend,
    Output,
    ZmqEngine,
)


class Link:
    """This library's link, as it is."""

    def __init__(self, engine: ZmqEngine) -> None:
        self._engine = engine
        self.start = engine.start
        self.end = engine.end

    async def cpu(self) -> float:
        """Return the CPU time of the engine process."""
        status: dict[str, Any] = await self._engine.status()
        used: float = status["backend"]["cpu"]
        return used


class Sessions:
    """A way under sessions of the core, each with its barrier."""

    def __init__(self, engine: Transport, sessions: SessionRegistry) -> None:
        self._engine = engine
        self._sessions = sessions
        self.start = engine.start
        self.end = engine.end
        self.cpu = engine.cpu

    async def whole(self, key: str, request: dict[str, Any]) -> None:
        """Run one session from its opening to its end."""
        with self._sessions.open(key) as session:
            source = await session.start(
                lambda: self._engine.start(session.key, request),
                end=lambda _: self._engine.end(session.key),
            )
            async with session.stream(source) as items:
                async for _ in items:
                    pass


class Direct:
    """Items by a future of the reader, which is the least that a loop can do."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, item: Any) -> None:
        """Take one item; ``None`` is the end."""
        self._items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set_result(None)

    def __aiter__(self) -> Direct:
        """Return itself."""
        return self

    async def __anext__(self) -> Any:
        """Return the next item."""
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        item = self._items[0]
        if item is None:
            raise StopAsyncIteration
        return self._items.popleft()


class Floor(Stepper):
    """No transport: the step engine is a task of the readers' own loop."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[str, Direct] = {}

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Begin a stream."""
        self._begin(key, request)
        stream = self._streams[key] = Direct()
        return stream

    async def end(self, key: str) -> None:
        """Forget it."""
        self._steps.end(key)
        del self._streams[key]

    async def cpu(self) -> float:
        """Return nothing: there is no other process."""
        return 0.0

    def _put(self, output: Output) -> None:
        key, items, finish = output
        self._streams[key].put(items[0] if finish is None else None)


@asynccontextmanager
async def way(name: str) -> AsyncIterator[Transport]:
    """Start the engine of one design."""
    if name in {"floor", "session-floor"}:
        floor = Floor()
        task = asyncio.create_task(floor.run())
        async with SessionRegistry() as sessions:
            yield floor if name == "floor" else Sessions(floor, sessions)
        task.cancel()
    else:
        argv = [sys.executable, __file__]
        argv += ["--generators"] if name == "generators" else []
        transport: Literal["pair", "ipc"] = "ipc" if name == "link-ipc" else "pair"
        async with (
            ZmqEngine(argv, transport=transport) as engine,
            SessionRegistry() as sessions,
        ):
            await engine.wait_ready()
            link = Link(engine)
            yield Sessions(link, sessions) if name == "session" else link


class Engine(Stepper):
    """The step engine behind generators, one for each request."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, asyncio.Queue[Output]] = {}

    async def generate(
        self, key: str, request: dict[str, Any]
    ) -> AsyncIterator[list[Any]]:
        """Yield the items of one request."""
        queue = self._queues[key] = asyncio.Queue()
        self._begin(key, request)
        try:
            while (output := await queue.get()).finish is None:
                yield output.items[0]
        finally:
            self._steps.end(key)
            del self._queues[key]

    def _put(self, output: Output) -> None:
        self._queues[output.key].put_nowait(output)


class Generators:
    """The step engine behind one async generator per request."""

    def __init__(self) -> None:
        self._engine = Engine()

    def backend(self) -> GeneratorBackend:
        """Return what serves it."""
        return GeneratorBackend(
            self._serve,
            merge="concatenate",
            lifespan=self._run,
            status=lambda: {"cpu": time.process_time()},
        )

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._engine.run)
            yield
            tasks.cancel_scope.cancel()

    def _serve(self, key: str, request: dict[str, Any], tensors: Any) -> Any:
        del tensors
        return self._engine.generate(key, request)


def _serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generators", action="store_true")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    options = parser.parse_args()
    backend: Backend = Generators().backend() if options.generators else Steps()
    EngineServer(options.endpoint, backend, incarnation=options.incarnation).run()


if __name__ == "__main__":
    _serve()
