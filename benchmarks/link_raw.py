"""The minimum for two processes: words in a Unix socket, one write per step.

No numbering, credit, checks, confirmation of a start or crash detection: what a link
costs beyond this is the cost of its guarantees.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from link_load import Steps

_FINISH = 2**32 - 1


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


class Raw:
    """The API process's side."""

    async def __aenter__(self) -> Self:
        """Start the engine process."""
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket.setblocking(False)
        self._received = bytearray()
        self._streams: dict[int, Direct] = {}
        self._started = 0
        self._writing = asyncio.Lock()
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        await self.cpu()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Kill the engine process."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _read(self) -> None:
        self._received += self._socket.recv(2**20)
        whole = len(self._received) // 8 * 8
        words = array("I", bytes(self._received[:whole]))
        del self._received[:whole]
        for number, word in zip(words[::2], words[1::2], strict=True):
            self._streams[number].put(None if word == _FINISH else [word])

    async def _say(self, request: dict[str, Any]) -> Direct:
        self._started += 1
        stream = self._streams[self._started] = Direct()
        line = json.dumps(request | {"number": self._started}).encode() + b"\n"
        async with self._writing:
            await asyncio.get_running_loop().sock_sendall(self._socket, line)
        return stream

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Begin a stream."""
        del key
        return await self._say(request)

    async def end(self, key: str) -> None:
        """Do nothing: the stream is over."""

    async def cpu(self) -> float:
        """Return the CPU time of the engine process."""
        micros: list[int] = await anext(await self._say({}))
        return micros[0] / 1e6


def _serve(sock: socket.socket) -> None:
    steps = Steps()
    words = array("I")
    part = b""
    while True:
        while not steps.busy or select.select([sock], [], [], 0)[0]:
            *lines, part = (part + sock.recv(2**16)).split(b"\n")
            for request in map(json.loads, lines):
                if "count" in request:
                    steps.start(request["number"], request, {})
                else:
                    used = int(time.process_time() * 1e6)
                    sock.sendall(array("I", (request["number"], used)))
        for key, items, finish in steps.step():
            words += array("I", (int(key), items[0][0] if finish is None else _FINISH))
        sock.sendall(words)
        del words[:]


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
