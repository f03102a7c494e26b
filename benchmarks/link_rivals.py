"""Other ways to an engine process: a queue of multiprocessing, a gRPC stream."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from link_load import Stepper, Steps

from lifecycle_zmq import Output


class Items:
    """What has come for one reader."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the items until the end, which is ``None``."""
        while (item := await self.queue.get()) is not None:
            yield item


class Served(Stepper):
    """The step engine with a queue for each stream."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[str, Items] = {}

    def start(self, key: str, request: dict[str, Any]) -> Items:
        """Begin a request; its items come until the end of what this returns."""
        stream = self._streams[key] = Items()
        self._begin(key, request)
        return stream

    def _put(self, output: Output) -> None:
        key, items, finish = output
        self._streams[key].queue.put_nowait(None if finish else items[0])
        if finish:
            del self._streams[key]


def _run_steps(requests: Any, items: Any) -> None:
    """Be the engine process behind the queues."""
    steps = Steps()
    while True:
        while not (steps.busy and requests.empty()):
            what, key, request = requests.get()
            if what == "start":
                steps.start(key, request, {})
            elif what == "end":
                steps.end(key)
            else:
                items.put((None, time.process_time()))
        for output in steps.step():
            items.put((output.key, None if output.finish else output.items[0]))


class Queues:
    """One `multiprocessing.Queue` each way, an item of it for each chunk."""

    async def __aenter__(self) -> Self:
        """Start the engine process and a thread that reads its queue."""
        spawn = multiprocessing.get_context("spawn")
        self._requests: Any = spawn.Queue()
        self._items: Any = spawn.Queue()
        self._process = spawn.Process(
            target=_run_steps, args=(self._requests, self._items), daemon=True
        )
        self._process.start()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str | None, Items] = {None: Items()}
        threading.Thread(target=self._read, daemon=True).start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Kill the engine process."""
        self._process.kill()
        self._process.join()

    def _read(self) -> None:
        while True:
            key, item = self._items.get()
            self._loop.call_soon_threadsafe(self._put, key, item)

    def _put(self, key: str | None, item: Any) -> None:
        self._streams[key].queue.put_nowait(item)

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Begin a stream."""
        stream = self._streams[key] = Items()
        self._requests.put(("start", key, request))
        return aiter(stream)

    async def end(self, key: str) -> None:
        """Forget it."""
        self._requests.put(("end", key, None))

    async def cpu(self) -> float:
        """Return the CPU time of the engine process."""
        self._requests.put(("cpu", None, None))
        used: float = await self._streams[None].queue.get()
        return used


class Grpc:
    """`grpc.aio` over a unix socket: a response stream for each request."""

    async def __aenter__(self) -> Self:
        """Start the engine process."""
        import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]

        address = f"unix:{tempfile.mkdtemp()}/grpc"
        self._process = subprocess.Popen([sys.executable, __file__, address])  # noqa: ASYNC220
        self._channel = grpc.aio.insecure_channel(address)
        await self._channel.channel_ready()
        self._call = self._channel.unary_stream(_METHOD)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Kill the engine process."""
        await self._channel.close()
        self._process.kill()
        self._process.wait()

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Begin a stream."""
        packed = struct.pack("<II", request["count"], request["rate"])
        return self._read(self._call(packed + key.encode()))

    async def _read(self, call: Any) -> AsyncIterator[Any]:
        async for packed in call:
            yield list(struct.unpack(f"<{len(packed) // 4}I", packed))

    async def end(self, key: str) -> None:
        """Do nothing: the stream has ended with its call."""

    async def cpu(self) -> float:
        """Return the CPU time of the engine process."""
        async for packed in self._call(b""):
            used: float = struct.unpack("<d", packed)[0]
        return used


_METHOD = "/engine/stream"


class _Servicer(Served):
    async def stream(self, packed: bytes, _context: Any) -> AsyncIterator[bytes]:
        if not packed:
            yield struct.pack("<d", time.process_time())
            return
        count, rate = struct.unpack_from("<II", packed)
        request = {"count": count, "rate": rate}
        async for item in self.start(packed[8:].decode(), request):
            yield struct.pack(f"<{len(item)}I", *item)


async def _serve_grpc(address: str) -> None:
    import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]

    servicer = _Servicer()
    _, service, method = _METHOD.split("/")
    handler = grpc.unary_stream_rpc_method_handler(servicer.stream)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    server.add_insecure_port(address)
    await server.start()
    await servicer.run()


if __name__ == "__main__":
    # Without a word about forks and polling strategies.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    asyncio.run(_serve_grpc(sys.argv[1]))
