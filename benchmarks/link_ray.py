"""Ray's own way to stream: an actor's generator, an object for each of its items.

Ray's daemons work for every item too, so their CPU time counts as the engine's.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import psutil
from link_rivals import Served

_STORE = 128 * 2**20
# Of streams at once in the actor, beyond what any cell starts.
_AT_ONCE = 1000


class _Actor(Served):
    """The step engine behind one generator for each request."""

    _running: asyncio.Task[None] | None = None

    async def stream(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield the items of one request."""
        if self._running is None:
            self._running = asyncio.create_task(self.run())
        async for item in self.start(key, request):
            yield item


class Ray:
    """The caller's side."""

    async def __aenter__(self) -> Self:
        """Start Ray for this cell alone, and the actor."""
        import ray  # type: ignore[import-untyped, import-not-found, unused-ignore]

        self._ray = ray
        self._directory = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=_STORE,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=self._directory.name,
        )
        actor: Any = ray.remote(_Actor).options(max_concurrency=_AT_ONCE)
        self._actor = actor.remote()
        async for _ in await self.start("warm", {"count": 1, "rate": 0}):
            pass
        self._processes = psutil.Process().children(recursive=True)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End Ray."""
        self._ray.shutdown()
        self._directory.cleanup()

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Begin a stream."""
        streaming = self._actor.stream.options(num_returns="streaming")
        return self._read(streaming.remote(key, request))

    async def _read(self, references: Any) -> AsyncIterator[Any]:
        async for reference in references:
            yield await reference

    async def end(self, key: str) -> None:
        """Do nothing: the stream has ended with its generator."""

    async def cpu(self) -> float:
        """Return the CPU time of the actor and of Ray's daemons."""
        used = [it.cpu_times() for it in self._processes if it.is_running()]
        return sum(it.user + it.system for it in used)
