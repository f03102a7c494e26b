"""Damaged messages on their way between a real client and a real engine loop.

python tests/lifecycle_zmq/fuzz_link.py [--count 100000] [--seed 1]

Each conversation has one message damaged: on a pair its bytes in the socket, on ZeroMQ
its parts. Afterwards the conversation was right and the engine has no stream of it, or
the client has lost its engine and the engine has none either; and no call took a second.
The memory of tensors is not damaged, since nothing covers it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import zmq

from lifecycle import EngineLost, Payload
from lifecycle_zmq import EngineClient, EngineLoop, Finish, Output
from lifecycle_zmq.transport.socketpair import SocketPair, SocketPairServer
from lifecycle_zmq.transport.zmq import ZmqClientTransport, ZmqServerTransport

MOST_SECONDS = 1.0
# After which a call hangs, however busy the machine is.
HANGS = 30.0
AT_ONCE = 32
HOW = ("flip", "bits", "cut", "tail", "insert", "zero", "drop", "twice", "late", "old")
LINKS = ("pair", "ipc")
WAYS = ("up", "down")


class Damage:
    """Passes messages on, one of them damaged.

    Args:
        draw: What is done to it.
        at: The number of that message.

    Attributes:
        how: What is done to it.
        done: Whether that message has come.
    """

    def __init__(self, draw: random.Random, at: int) -> None:
        self._draw = draw
        self._at = at
        self._seen = 0
        self._past: list[bytes] = []
        self._late: list[bytes] = []
        self.how = draw.choice(HOW)
        self.done = False

    def passed(self, message: bytes, spare: int = 0) -> list[bytes]:
        """Return what arrives instead of a message, with `spare` bytes left alone."""
        self._seen += 1
        late, self._late = self._late, []
        if self._seen - 1 != self._at:
            self._past.append(message)
            return [message, *late]
        self.done = True
        if self.how == "drop":
            return []
        if self.how == "twice":
            return [message, message]
        if self.how == "late":
            self._late = [message]
            return []
        if self.how == "old" and self._past:
            return [self._draw.choice(self._past), message]
        return [self._changed(message, spare)]

    def _changed(self, message: bytes, spare: int) -> bytes:
        chance = self._draw.randrange
        changed = bytearray(message)
        at = chance(len(message) - spare)
        end = min(len(message) - spare, at + 1 + chance(16))
        if self.how == "cut":
            del changed[at:end]
        elif self.how == "tail":
            del changed[-1 - chance(len(message)) :]
        elif self.how == "insert":
            changed[at:at] = self._draw.randbytes(1 + chance(16))
        elif self.how == "zero":
            changed[at:end] = bytes(end - at)
        elif self.how == "bits":
            for _ in range(1 + chance(4)):
                changed[chance(len(message) - spare)] ^= 1 << chance(8)
        else:
            changed[at] ^= 1 + chance(255)
        return bytes(changed)


class DamagedSocket:
    """A socket whose bytes are damaged when they are sent."""

    def __init__(self, sock: Any, damage: Damage) -> None:
        self._socket = sock
        self._damage = damage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, frame: bytes, flags: int = 0) -> int:
        """Send a whole message."""
        return self.sendmsg([frame], (), flags)

    def sendmsg(self, frames: Sequence[Any], passed: Any = (), flags: int = 0) -> int:
        """Send a whole message, of which the last frame may be a tensor."""
        message = b"".join(map(bytes, frames))
        spare = len(frames[-1]) if len(frames) > 2 else 0
        for each in self._damage.passed(message, spare):
            self._socket.sendall(each, flags)
        return len(message)


class DamagedLink:
    """A client's ZeroMQ transport whose messages are damaged in one direction."""

    def __init__(self, endpoint: str, handle: Any, damage: Damage, way: str) -> None:
        self._damage = damage
        self._handle = handle
        self._link = ZmqClientTransport(
            endpoint, self._receive if way == "down" else handle
        )
        if way == "up":
            self.send = self._send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def _send(self, parts: Sequence[Any]) -> bool:
        # A first message that finds no connection is not on its way yet.
        if not cast("int", self._link._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
            return self._link.send(parts)
        head, *memory = parts
        return all(
            self._link.send([each, *memory])
            for each in self._damage.passed(bytes(head))
        )

    def _receive(self, parts: Sequence[Any]) -> bool:
        return all(self._handle([it]) for it in self._damage.passed(bytes(parts[0])))


class Counting:
    """A backend whose streams count to three, or wait to be cancelled."""

    def __init__(self) -> None:
        self.live: dict[str, bool] = {}
        self._outputs: list[Output] = []

    def start(self, key: str, request: Any, tensors: Any) -> None:
        self.live[key] = True
        if "hold" not in request:
            finish = Finish("completed")
            self._outputs.append(
                Output(key, ([1], [2, 2], {"x": len(tensors)}), finish)
            )

    def cancel(self, key: str) -> None:
        self._outputs.append(Output(key, (), Finish("cancelled")))

    def end(self, key: str) -> None:
        del self.live[key]

    @property
    def busy(self) -> bool:
        return bool(self._outputs)

    def step(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return [each for each in outputs if each.key in self.live]

    def status(self) -> dict[str, Any]:
        return {}


class Served:
    """An engine loop that runs in this event loop."""

    transport: Any

    def __init__(self) -> None:
        self.backend = Counting()
        self.loop = EngineLoop(self.backend, incarnation=1)
        self.loop._heartbeat = self

    def beat(self, *, idle: bool) -> None:
        """No process watches this engine."""

    async def run(self) -> None:
        """Serve until the loop is stopped."""
        self.loop._transport = self.transport
        while self.loop.running:
            if not (self.transport.ahead or self.backend.busy):
                await self.transport.wait()
            self.loop.turn()
            await asyncio.sleep(0)


@dataclass
class Result:
    """What a run saw.

    Attributes:
        damaged: Conversations in which a message was damaged.
        lost: Of them, those that the client has lost.
        slowest: Seconds of the slowest call, and until both ends agreed.
        lag: Seconds by which the event loop was late at worst.
        wrong: What was not as it should be.
    """

    damaged: int = 0
    lost: int = 0
    slowest: float = 0.0
    lag: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether both ends always agreed within a second of a loop that has time."""
        return not self.wrong and self.slowest < MOST_SECONDS + self.lag

    def __str__(self) -> str:
        return (
            f"{self.damaged:,} damaged, {self.lost:,} lost, slowest {self.slowest:.2f} s,"
            f" loop late by {self.lag:.2f} s, {len(self.wrong)} wrong"
        )


class Case:
    """One conversation with one damaged message."""

    def __init__(self, result: Result, name: str, link: str, way: str) -> None:
        draw = random.Random(name)
        self._result = result
        self._name = name
        self._link = link
        self._way = way
        self._damage = Damage(draw, draw.randrange(7))

    async def run(self, shared: Callable[[], Any]) -> None:
        """Talk, and judge what became of it."""
        async with self._connected(shared) as (served, connect):
            async with EngineClient(connect, incarnation=1) as client:
                right = False
                with suppress(EngineLost):
                    right = await self._talk(client)
                await self._judge(client, served, right=right)

    @asynccontextmanager
    async def _connected(self, shared: Any) -> AsyncIterator[Any]:
        if self._link == "ipc":
            served, endpoint = shared()
            yield (
                served,
                lambda handle: DamagedLink(endpoint, handle, self._damage, self._way),
            )
            return
        pair = SocketPair()
        served = Served()
        server = served.transport = SocketPairServer(
            pair._theirs.detach(), served.loop.stop
        )

        def connect(handle: Any) -> Any:
            link: Any = pair.connect(handle)
            writer: Any = link._writer if self._way == "up" else server._writer
            writer._socket = DamagedSocket(writer._socket, self._damage)
            return link

        with server:
            task = asyncio.create_task(served.run())
            try:
                yield served, connect
            finally:
                await task

    async def _talk(self, client: EngineClient) -> bool:
        first, second = f"{self._name}.a", f"{self._name}.b"
        await self._soon(client.wait_ready(), "ready")
        stream = await self._soon(client.start(first, {}), "start")
        items = [[1], [2, 2], {"x": 0}]
        right = [await self._next(stream) for _ in items] == items
        right = right and await self._next(stream) is None
        held = await self._soon(
            client.start(second, {"hold": 1}, Payload({"x": bytearray(3000)})), "start"
        )
        client.cancel(second)
        right = right and await self._next(held) is None
        for key in (first, second):
            await self._soon(client.end(key), "end")
        status = await self._soon(client.status(), "status")
        return right and status["bad_frames"] >= 0

    async def _next(self, stream: Any) -> Any:
        return await self._soon(anext(stream, None), "next")

    async def _soon(self, call: Awaitable[Any], what: str) -> Any:
        begin = time.monotonic()
        try:
            return await asyncio.wait_for(call, HANGS)
        except TimeoutError:
            self._wrong(f"{what} hangs")
            raise EngineLost("it hangs", reason="hangs") from None
        finally:
            self._took(time.monotonic() - begin)

    async def _judge(
        self, client: EngineClient, served: Served, *, right: bool
    ) -> None:
        begin = time.monotonic()
        mine = tuple(f"{self._name}.{it}" for it in "ab")
        while any(key in served.backend.live for key in mine):
            if time.monotonic() - begin > HANGS:
                self._wrong("the engine keeps a stream")
                break
            await asyncio.sleep(0.001)
        self._took(time.monotonic() - begin)
        if client.lost is None and not right:
            self._wrong("a conversation is wrong, and nobody knows")
        elif client.lost not in {None, "protocol"}:
            self._wrong(f"the engine is lost as {client.lost}")
        self._result.damaged += self._damage.done
        self._result.lost += client.lost is not None

    def _took(self, seconds: float) -> None:
        self._result.slowest = max(self._result.slowest, seconds)

    def _wrong(self, what: str) -> None:
        self._result.wrong.append(f"{self._name} ({self._damage.how}): {what}")


async def _measure_lag(result: Result) -> None:
    while True:
        begin = time.monotonic()
        await asyncio.sleep(0.01)
        result.lag = max(result.lag, time.monotonic() - begin - 0.01)


async def fuzz(link: str, way: str, *, seed: int, count: int) -> Result:
    """Damage a message in each of so many conversations over one kind of link."""
    logging.getLogger("lifecycle_zmq").setLevel(logging.CRITICAL)
    result = Result()
    numbers = deque(range(count))
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/engine"
        served = Served()
        with ZmqServerTransport(endpoint) as served.transport:
            tasks = [
                asyncio.create_task(it) for it in (_measure_lag(result), served.run())
            ]

            async def talk() -> None:
                while numbers:
                    name = f"{seed}/{numbers.popleft()}/{link}/{way}"
                    await Case(result, name, link, way).run(lambda: (served, endpoint))

            await asyncio.gather(*(talk() for _ in range(AT_ONCE)))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return result


def main() -> None:
    """Run it as a script, in both directions on both kinds of links."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    good = True
    for link in LINKS:
        for way in WAYS:
            begin = time.monotonic()
            result = asyncio.run(
                fuzz(link, way, seed=options.seed, count=options.count)
            )
            seconds = time.monotonic() - begin
            print(f"{link} {way}: {result}, {seconds:.0f} s", flush=True)
            print(*result.wrong[:20], sep="\n", end="\n" if result.wrong else "")
            good = good and result.good
    sys.exit(not good)


if __name__ == "__main__":
    main()
