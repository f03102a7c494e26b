"""Today's design, written for the benchmark from its description: a poll per chunk.

An engine process runs one event loop. Each request has a task there that reads the
engine's generator into a mailbox of one place, where what is not fetched in time is
merged. The API process fetches each chunk by a call of its own: a pickle over
loopback TCP, and a pickle back, through `zmq.asyncio` at both ends.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio
from link_load import Stepper

from lifecycle_zmq import Output

# How often the server looks for calls while there are none.
_IDLE = 0.01


class _Mailbox:
    def __init__(self) -> None:
        self.tokens: Any = None
        self.done = False
        self.changed = asyncio.Event()

    def put(self, tokens: Any) -> None:
        # Tokens are merged; of anything else, the latest is all that is left.
        merges = isinstance(tokens, list) and self.tokens is not None
        self.tokens = self.tokens + tokens if merges else tokens
        self.changed.set()

    def finish(self) -> None:
        self.done = True
        self.changed.set()

    async def take(self) -> tuple[Any, bool]:
        while self.tokens is None and not self.done:
            await self.changed.wait()
        self.changed.clear()
        tokens, self.tokens = self.tokens, None
        return tokens, self.done


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


class _Server:
    def __init__(self) -> None:
        self._engine = Engine()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        print(self._socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
        self._mailboxes: dict[str, _Mailbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._spawn(self._engine.run())
        while True:
            if not await self._socket.poll(1000 * _IDLE):
                continue
            address, data = await self._socket.recv_multipart()
            self._spawn(self._answer(address, *pickle.loads(data)))  # noqa: S301

    def _spawn(self, job: Any) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, address: bytes, call: int, name: str, *args: Any) -> None:
        result = await getattr(self, name)(*args)
        await self._socket.send_multipart([address, pickle.dumps((call, result))])

    async def start(self, key: str, request: dict[str, Any]) -> str:
        self._mailboxes[key] = _Mailbox()
        self._spawn(self._stream(key, request))
        return key

    async def _stream(self, key: str, request: dict[str, Any]) -> None:
        mailbox = self._mailboxes[key]
        async for tokens in self._engine.generate(key, request):
            mailbox.put(tokens)
        mailbox.finish()

    async def poll(self, key: str) -> tuple[Any, bool]:
        return await self._mailboxes[key].take()

    async def end(self, key: str) -> None:
        self._mailboxes.pop(key, None)

    async def cpu(self) -> float:
        return time.process_time()


class Today:
    """The API process's side."""

    async def __aenter__(self) -> Self:
        """Start the engine process and wait for it."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, __file__], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._calls = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Kill the engine process."""
        self._reader.cancel()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._socket.close()

    async def _read(self) -> None:
        while True:
            call, result = pickle.loads(await self._socket.recv())  # noqa: S301
            self._replies.pop(call).set_result(result)

    async def _call(self, name: str, *args: Any) -> Any:
        self._calls += 1
        reply = asyncio.get_running_loop().create_future()
        self._replies[self._calls] = reply
        await self._socket.send(pickle.dumps((self._calls, name, *args)))
        return await reply

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Begin a stream."""
        return self._stream(await self._call("start", key, request))

    async def _stream(self, key: str) -> AsyncIterator[Any]:
        done = False
        while not done:
            tokens, done = await self._call("poll", key)
            if tokens is not None:
                yield tokens

    async def end(self, key: str) -> None:
        """Make the engine forget a stream."""
        await self._call("end", key)

    async def cpu(self) -> float:
        """Return the CPU time of the engine process."""
        used: float = await self._call("cpu")
        return used


if __name__ == "__main__":
    asyncio.run(_Server().run())
