"""The clients of the overload experiment: an open loop, in a process of its own.

    python benchmarks/overload_load.py PORT RATE SECONDS DEADLINE SEED

Requests come when they come, whatever has become of those before: their times are drawn
beforehand, and latency counts from the time that was drawn, not from when this process
got round to it, to when it had read the answer. A client without a complete answer at
its deadline disconnects.

This process may be late for either, as it shares the machine with the server. So each
request has a second time, of the server alone: from just before its client connected to
when its answer lay in the client's socket, which the kernel stamps. What is between the
two is this process's own.

Prints JSON: an entry ``[second, what, milliseconds, milliseconds of the server]`` for
each request, and the processor time of this process.
"""

from __future__ import annotations

import json
import random
import select
import selectors
import socket
import struct
import sys
import time

from _client import about_picture
from overload_rig import TOKENS

_PIXELS = 40_000
_END = b"data: [DONE]"
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Of Linux, for both the option and the message; Python has no name for it.
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")


class Ask:
    """One request, from the time that was drawn for it to its end.

    Args:
        port: Of the server.
        request: What is sent.
        due: The time that was drawn.

    Attributes:
        socket: Of its own.
        what: ``ok``, ``refused``, ``late`` or ``failed``; nothing before the end.
        took: Seconds from *due* to when the last of the answer was read.
        served: Seconds from before it connected to when that had come.
    """

    def __init__(self, port: int, request: bytes, due: float) -> None:
        self._left = memoryview(request)
        self._head = self._tail = b""
        self.due = due
        self.what = ""
        self.took = self.served = 0.0
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if sys.platform == "linux":
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._begun = time.monotonic()
        self.socket.connect_ex(("127.0.0.1", port))

    @property
    def events(self) -> int:
        """What it waits for."""
        return _READ | _WRITE if self._left else _READ

    def go_on(self, ready: int) -> None:
        """Send and read what can be."""
        if self._left and ready & _WRITE:
            try:
                self._left = self._left[self.socket.send(self._left) :]
            except BlockingIOError:
                pass
            except OSError:  # what came before it is still to be read
                self._left = memoryview(b"")
        if ready & _READ:
            try:
                self._read(*self.socket.recvmsg(65536, 64)[:2])
            except BlockingIOError:
                pass
            except OSError:
                self._read(b"", [])

    def _read(self, data: bytes, stamps: list[tuple[int, int, bytes]]) -> None:
        if not data:  # of what is no stream, this is the end
            refused = self._head[9:12] in (b"503", b"429", b"529")
            self.end("refused" if refused else "failed")
            return
        now = time.monotonic()
        self._head = (self._head + data[:16])[:16]
        self._tail = self._tail[-len(_END) :] + data
        self.took = now - self.due
        self.served = now - _waited(stamps) - self._begun
        if _END in self._tail:
            self.end("ok")

    def end(self, what: str) -> None:
        """Close."""
        self.what = what
        self.socket.close()


def _waited(stamps: list[tuple[int, int, bytes]]) -> float:
    """Seconds since what is read had come; 0 where the system does not tell."""
    for _, kind, stamp in stamps:
        if kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(stamp)
            return float(time.time() - seconds - nanoseconds / 1e9)
    return 0.0


class Clients:
    """All of them, in one thread.

    Args:
        port: Of the server.
        deadline: Seconds until a client hangs up.

    Attributes:
        live: Those that have no end yet, in the order of their deadlines.
    """

    def __init__(self, port: int, deadline: float) -> None:
        self._port = port
        self._deadline = deadline
        self._request = about_picture(_PIXELS, TOKENS, noise=True)
        self._selector = selectors.DefaultSelector()
        self.live: dict[Ask, None] = {}

    def begin(self, due: float) -> Ask:
        """One more."""
        ask = Ask(self._port, self._request, due)
        self.live[ask] = None
        self._selector.register(ask.socket, ask.events, ask)
        return ask

    def wait(self, until: float) -> None:
        """Go on with those that can, until then or until some did."""
        until = min(until, next(iter(self.live)).due + self._deadline)
        # A selector counts whole milliseconds, and would be late by half of one.
        span = max(until - time.monotonic(), 0.0)
        if select.select([self._selector], [], [], span)[0]:
            for key, ready in self._selector.select(0):
                self._go_on(key.data, ready)
        self._hang_up()

    def _go_on(self, ask: Ask, ready: int) -> None:
        before, key = ask.events, self._selector.get_key(ask.socket)
        ask.go_on(ready)
        if ask.what:
            del self.live[ask]
            self._selector.unregister(key.fd)
        elif ask.events != before:
            self._selector.modify(key.fd, ask.events, ask)

    def _hang_up(self) -> None:
        overdue = time.monotonic() - self._deadline
        for ask in list(self.live):
            if ask.due > overdue:
                break
            self._selector.unregister(ask.socket)
            del self.live[ask]
            ask.took = self._deadline
            ask.end("late")


def load(
    port: int, rate: float, seconds: float, deadline: float, seed: int
) -> list[Ask]:
    """Ask at *rate* for so many *seconds*; return when the last one has an end."""
    draw = random.Random(seed)
    clients = Clients(port, deadline)
    asks: list[Ask] = []
    due = begin = time.monotonic() + 0.05
    while (due := due + draw.expovariate(rate)) < begin + seconds:
        while (span := due - time.monotonic()) > 0:
            if clients.live:
                clients.wait(due)
            else:
                time.sleep(span)
        asks.append(clients.begin(due))
    while clients.live:
        clients.wait(float("inf"))
    for ask in asks:
        ask.due -= begin
    return asks


def main() -> None:
    """Run the command line."""
    port, rate, seconds, deadline, seed = sys.argv[1:]
    began = time.process_time()
    asks = load(int(port), float(rate), float(seconds), float(deadline), int(seed))
    cpu = time.process_time() - began
    results = [
        [round(a.due, 3), a.what, round(a.took * 1000, 2), round(a.served * 1000, 2)]
        for a in asks
    ]
    print(json.dumps({"cpu": cpu, "asks": results}))


if __name__ == "__main__":
    main()
