"""Mutated streams and unannounced descriptors for the engine's end of a pair.

python tests/lifecycle_zmq/fuzz_pair.py [--frames 10000000] [--seed 1]
"""

from __future__ import annotations

import argparse
import array
import os
import random
import socket
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lifecycle_zmq import ProtocolError
from lifecycle_zmq.shared_memory import memfd as parcels
from lifecycle_zmq.transport.framing import PREFIX, FrameReader, prefix

HEAD = 4096
# One connection in so many is read under a tracer, which slows it down.
TRACED = 50
MOST_MESSAGES = 8


@dataclass
class Result:
    """What a run saw.

    Attributes:
        frames: That were sent, some of them after a fault.
        heard: Messages that came out.
        passed: Descriptors that were sent beside.
        refused: Connections that ended by `ProtocolError`.
        slowest: Seconds of processor time of one read with all that came of it.
        peak: The most bytes that one traced connection took.
        left: Descriptors that are open afterwards and were not before.
    """

    frames: int = 0
    heard: int = 0
    passed: int = 0
    refused: int = 0
    slowest: float = 0.0
    peak: int = 0
    left: int = 0

    def __str__(self) -> str:
        return (
            f"{self.frames:,} frames and {self.passed:,} descriptors, {self.heard:,} "
            f"heard, {self.refused:,} connections refused, slowest "
            f"{self.slowest * 1e3:.2f} ms, peak {self.peak / 1024:.0f} KiB, "
            f"{self.left} descriptors left"
        )


class Sender:
    """Makes up what one client sends."""

    def __init__(self, draw: random.Random, result: Result) -> None:
        self._draw = draw
        self._result = result

    def send_all(self, sock: socket.socket) -> None:
        """Send messages, most of them legal, in pieces, with what is passed."""
        for _ in range(self._draw.randint(1, MOST_MESSAGES)):
            self._result.frames += 1
            frame, descriptors = self._message()
            cut = self._draw.choice((len(frame), self._draw.randint(1, len(frame))))
            self._send(sock, frame[:cut], descriptors)
            self._send(sock, frame[cut:], self._spoilt([]))

    def _message(self) -> tuple[bytes, list[int]]:
        chance = self._draw.randrange
        sizes = [chance(1, 200) for _ in range(chance(4))]
        apart = bool(sizes) and chance(3) > 0
        frame, prefixes = bytearray(), []
        for number, size in enumerate((chance(100), *sizes)):
            first = len(sizes) - number | (128 if apart and not number else 0)
            prefixes.append(len(frame))
            frame += prefix(first, size)
            frame += bytes(0 if apart and number else size)
        passed = (
            parcels.pack([memoryview(bytes(it)) for it in sizes]) if apart else None
        )
        if not chance(4):
            for _ in range(1 + chance(3)):
                at = chance(len(frame))
                # Most of a message is no prefix, and not worth much here.
                at = self._draw.choice((at, self._draw.choice(prefixes) + chance(8)))
                frame[at] = chance(256)
            if chance(4):
                _seal(frame, prefixes)
        return bytes(frame), self._spoilt([] if passed is None else [passed])

    def _spoilt(self, descriptors: list[int]) -> list[int]:
        if self._draw.randrange(16):
            return descriptors
        how = self._draw.randrange(4)
        if how == 0:
            parcels.close(descriptors)
            return []
        odd: tuple[Callable[[], int], ...] = (
            lambda: os.open("/", os.O_RDONLY),
            lambda: os.memfd_create("odd"),
            lambda: os.dup(0),
        )
        return [
            *descriptors,
            *(odd[how - 1]() for _ in range(self._draw.choice((1, 3)))),
        ]

    def _send(self, sock: socket.socket, data: bytes, descriptors: list[int]) -> None:
        rights = array.array("i", descriptors)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        if data:
            sock.sendmsg([data], passed)
            self._result.passed += len(rights)
        parcels.close(descriptors)


def _seal(frame: bytearray, prefixes: list[int]) -> None:
    """Make the checksums right again, so that what they cover is judged by itself."""
    for at in prefixes:
        size = int.from_bytes(frame[at + 3 : at + PREFIX.size], "big")
        frame[at : at + PREFIX.size] = prefix(frame[at], size)


def fuzz(*, seed: int, frames: int | None = None, seconds: float = 1e9) -> Result:
    """Read mutated streams until so many frames or so much time is over.

    Any error but `ProtocolError` is raised, with the seed of its connection as a note.
    """
    result = Result()
    until = time.perf_counter() + seconds
    before = _open()
    connection = 0
    while result.frames < (frames or 2**62) and time.perf_counter() < until:
        connection += 1
        one = f"{seed}/{connection}"
        traced = not connection % TRACED
        try:
            _connect(random.Random(one), result, traced=traced)
        except BaseException as error:
            error.add_note(f"connection {one}")
            raise
    result.left = _open() - before
    return result


def _connect(draw: random.Random, result: Result, *, traced: bool) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        Sender(draw, result).send_all(ours)
        ours.close()
        reader = FrameReader(theirs, head=HEAD, tensors=7)
        if traced:
            tracemalloc.start()
        try:
            _read(reader, result, timed=not traced)
        except ProtocolError:
            result.refused += 1
        finally:
            reader.close()
            if traced:
                result.peak = max(result.peak, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()


def _read(reader: FrameReader, result: Result, *, timed: bool) -> None:
    more = True
    while more and not reader.at_end:
        begin = time.thread_time()
        try:
            more = reader.read()
            while reader.take() is not None:
                result.heard += 1
        finally:
            if timed:
                result.slowest = max(result.slowest, time.thread_time() - begin)


def _open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def main() -> None:
    """Run the fuzzer as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result = fuzz(seed=options.seed, frames=options.frames)
    print(result)
    # Reads take microseconds. The slowest of half a million has a pause of the collector
    # or of the machine in it, which took 6 ms once.
    sys.exit(result.peak >= 2**20 or result.slowest >= 50e-3 or result.left)


if __name__ == "__main__":
    main()
