"""The clients of the overload experiment: an open loop, in a process of its own.

    python benchmarks/overload_load.py PORT RATE SECONDS DEADLINE SEED

Requests come when they come, whatever has become of those before: their times are drawn
beforehand, and latency counts from the time that was drawn, not from when this process
got round to it. Whoever has no whole answer at their deadline hangs up. Prints JSON: an
entry ``[second, what, milliseconds]`` for each request, and the processor time of this
process.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from _client import about_picture
from overload_rig import TOKENS

_PIXELS = 40_000
_END = b"data: [DONE]"


class Ask(asyncio.Protocol):
    """One request, from the time that was drawn for it to its end.

    Args:
        request: What is sent.
        due: The time that was drawn.
        deadline: Seconds until its client hangs up.

    Attributes:
        what: ``ok``, ``refused``, ``late`` or ``failed``.
        took: Seconds from *due* to the end.
    """

    def __init__(self, request: bytes, due: float, deadline: float) -> None:
        self._request = request
        self._deadline = deadline
        self._head = b""
        self._tail = b""
        self._transport: asyncio.BaseTransport | None = None
        self.due = due
        self.what = "failed"
        self.took = 0.0
        self.over = asyncio.get_running_loop().create_future()
        self._timer = asyncio.get_running_loop().call_at(due + deadline, self._hang_up)

    async def start(self, port: int) -> None:
        """Connect."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self, "127.0.0.1", port)
        except OSError:
            self._end("failed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.over.done():
            transport.abort()
        else:
            transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Look for the end of the stream."""
        if len(self._head) < 16:
            self._head += data[:16]
        self._tail = self._tail[-len(_END) :] + data
        self.took = asyncio.get_running_loop().time() - self.due
        if _END in self._tail:
            self._end("ok")

    def connection_lost(self, exc: Exception | None) -> None:
        """Of what is no stream, this is the end."""
        del exc
        refused = self._head[9:12] in (b"503", b"429", b"529")
        self._end("refused" if refused else "failed")

    def _hang_up(self) -> None:
        self.took = self._deadline
        self._end("late")
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()

    def _end(self, what: str) -> None:
        self._timer.cancel()
        if not self.over.done():
            self.what = what
            self.over.set_result(None)


async def load(
    port: int, rate: float, seconds: float, deadline: float, seed: int
) -> list[Ask]:
    """Ask at *rate* for so many *seconds*; return when the last one has an end."""
    loop = asyncio.get_running_loop()
    draw = random.Random(seed)
    request = about_picture(_PIXELS, TOKENS, noise=True)
    asks: list[Ask] = []
    tasks: set[asyncio.Task[None]] = set()
    due = begin = loop.time() + 0.05
    while (due := due + draw.expovariate(rate)) < begin + seconds:
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        asks.append(ask := Ask(request, due, deadline))
        tasks.add(task := loop.create_task(ask.start(port)))
        task.add_done_callback(tasks.discard)
    for ask in asks:
        await ask.over
    for ask in asks:
        ask.due -= begin
    return asks


def main() -> None:
    """Run the command line."""
    port, rate, seconds, deadline, seed = sys.argv[1:]
    began = time.process_time()
    asks = asyncio.run(
        load(int(port), float(rate), float(seconds), float(deadline), int(seed))
    )
    cpu = time.process_time() - began
    told = [[round(a.due, 3), a.what, round(a.took * 1000, 2)] for a in asks]
    print(json.dumps({"cpu": cpu, "asks": told}))


if __name__ == "__main__":
    main()
