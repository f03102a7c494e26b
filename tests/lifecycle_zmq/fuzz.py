"""Mutated frames for the decoder; run as a script for as many as you like.

python tests/lifecycle_zmq/fuzz.py [--frames 10000000] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack

from lifecycle_zmq import ProtocolError, protocol as wire
from lifecycle_zmq.codec import pack_tokens
from lifecycle_zmq.protocol import FROM_CLIENT, FROM_ENGINE, Kind
from lifecycle_zmq.shared_memory.tensors import describe

ALL = FROM_CLIENT | FROM_ENGINE
Parts = list[bytearray]
# One frame in so many is decoded under a tracer, which slows it down.
TRACED = 50
# And one in so many is timed.
TIMED = 16
FAILED = {"reason": "failed", "error": {"code": "c", "message": "m"}}
EMPTY_TICK: dict[str, Any] = {
    "accepted": [],
    "rejected": [],
    "tokens": b"",
    "chunks": [],
    "freed": [],
    "done": [],
}
CONTROL: dict[str, Any] = {"start": [], "cancel": [], "grant": [], "end": []}
NASTY = (
    b"\xc1",  # no type at all
    b"\xc7\x00\x05",  # an extension of no bytes
    b"\xd4\x01\x00",  # one of one byte
    b"\xdd\xff\xff\xff\xff",  # an array of four billion
    b"\xdc\x3f\xff" * 9,  # arrays of thousands, nested
    b"\xdf\xff\xff\xff\xff",  # a map of four billion
    b"\xdf\x00\x00\x03\xff" * 5,
    b"\xdb\xff\xff\xff\xff",  # a text of four gigabytes
    b"\xc6\xff\xff\xff\xff",  # bytes of as many
    b"\x91" * 40,
    b"\x81" * 40,
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\xcb\x7f\xf8" + b"\x00" * 6,  # not a number
    b"\xa1\xff",  # no Unicode
    b"\x00" * 9,
    b"\xff" * 9,
)


def seeds() -> list[list[bytes]]:
    """Legal messages of every kind, small and not so small."""
    tokens = [it for n in range(128) for it in (n + 1, 7, 1, n * 1000)]
    items = [msgpack.packb(it) for it in ([1], {"x": [None, 1.5]}, "text", -1)]
    request = msgpack.packb({"t": [1, {"x": "y"}]})
    chunks = [[1, 0, items, None], [2, 3, [], {"reason": "completed"}]]
    bodies: list[tuple[Kind, dict[str, Any]]] = [
        (Kind.CONTROL, CONTROL | {"cancel": [1, 2], "grant": [[3, 4096]]}),
        (Kind.CONTROL, CONTROL | {"start": [[7, "k", 9, request]], "end": [2**40]}),
        (Kind.STATUS, {"ask": 1}),
        (Kind.SHUTDOWN, {}),
        (Kind.PING, {"ask": 2}),
        (Kind.LEAVE, {"message": "m"}),
        (Kind.READY, {}),
        (Kind.PONG, {"ask": 2}),
        (Kind.FAULT, {"message": "m"}),
        (Kind.TICK, EMPTY_TICK | {"accepted": [1, 2], "rejected": [[3, "c", "m"]]}),
        (Kind.TICK, EMPTY_TICK | {"tokens": pack_tokens([1, 0, 1, 5, 2, 0, 2, 6, 7])}),
        (Kind.TICK, EMPTY_TICK | {"tokens": pack_tokens(tokens), "freed": [1, 2]}),
        (Kind.TICK, EMPTY_TICK | {"chunks": [*chunks, [3, 0, [], FAILED]]}),
        (Kind.REPORT, {"ask": 1, "status": {"live": 3, "backend": {"a": [1, "b"]}}}),
    ]
    start = {"key": "a#1", "window": 2**16, "tensors": []}
    requests = {"t": 0.5, "deep": [[[{"x": b"y"}]]]}, {"ids": list(range(500))}
    bodies += [
        (Kind.START, start | {"request": msgpack.packb(fields)}) for fields in requests
    ]
    view = memoryview(bytes(48)).cast("f", (3, 4))
    placed, _ = describe({"x": view, "y": view}, lambda _: 4096)
    bodies.append((Kind.START, start | {"request": request, "tensors": placed}))
    described, memory = describe({"x": view})
    tensors = start | {"request": request, "tensors": described}
    head = _encode(Kind.START, tensors, tensors=1)
    return [[_encode(kind, body)] for kind, body in bodies] + [
        [head, *map(bytes, memory)]
    ]


def _encode(kind: Kind, body: dict[str, Any], tensors: int = 0) -> bytes:
    number = int(kind is Kind.START)
    return wire.encode(
        kind, body, incarnation=1, sequence=0, generation=number, tensors=tensors
    )


def mutated(draw: random.Random, legal: list[list[bytes]]) -> Iterator[Parts]:
    """Yield mutated messages for ever; most with the right lengths and checksum again."""
    choice, bits, floor = draw.choice, draw.getrandbits, wire.HEADER.size
    while True:
        parts = [bytearray(part) for part in choice(legal)]
        for _ in range(1 + bits(1) + bits(1)):
            _mutate(bits, parts)
        head = parts[0]
        if bits(3) and len(head) >= floor:
            struct.pack_into("!HI", head, 6, len(parts) - 1, len(head) - floor)
            checksum = zlib.crc32(head[floor:], zlib.crc32(head[: floor - 4]))
            struct.pack_into("!I", head, floor - 4, checksum)
        yield parts


def _mutate(bits: Any, parts: Parts) -> None:
    target = parts[0] if len(parts) == 1 or bits(2) else parts[-1]
    size = len(target)
    # Half of all changes are in the map, where most is to be got wrong.
    at = bits(16) % (size + 1)
    floor = wire.HEADER.size
    if bits(1) and size > floor:
        at = floor + at % (size - floor + 1)
    how = bits(4)
    if how < 6:
        target[at : at + 1] = bytes((bits(8),))
    elif how < 8:
        del target[at : at + 1 + bits(4)]
    elif how < 10:
        target[at:at] = target[at : at + 1 + bits(5)] * (1 + bits(2))
    elif how < 14:
        target[at : at + bits(2)] = NASTY[bits(8) % len(NASTY)]
    elif how < 15:
        other = bits(16) % (size + 1)
        target[at : at + 8] = target[other : other + 8]
    else:
        parts.append(bytearray(bits(6)))


@dataclass
class Result:
    """What a run of the fuzzer saw.

    Attributes:
        frames: Decoded.
        refused: Of them, by `ProtocolError`.
        seconds: Of processor time, of a sample of decodes, each.
        peak: The most bytes that one traced decode took.
    """

    frames: int = 0
    refused: int = 0
    seconds: list[float] = field(default_factory=list)
    peak: int = 0

    def median(self) -> float:
        """Return the median of the seconds."""
        return sorted(self.seconds)[len(self.seconds) // 2]

    def __str__(self) -> str:
        return (
            f"{self.frames:,} frames, {self.refused:,} refused, median "
            f"{self.median() * 1e6:.1f} us, slowest {max(self.seconds) * 1e3:.2f} ms, "
            f"peak {self.peak / 1024:.0f} KiB"
        )


def fuzz(*, seed: int, frames: int | None = None, seconds: float = 1e9) -> Result:
    """Decode mutated frames until so many or so much time is over.

    Any error but `ProtocolError` is raised, with the number of the frame as a note.
    """
    result = Result()
    until = time.perf_counter() + seconds
    for parts in mutated(random.Random(seed), seeds()):
        try:
            _decode(result, parts)
        except BaseException as error:
            error.add_note(f"frame {result.frames} of seed {seed}")
            raise
        result.frames += 1
        if result.frames == frames:
            break
        if not result.frames % 256 and time.perf_counter() > until:
            break
    return result


def _decode(result: Result, parts: Parts) -> None:
    if not result.frames % TRACED:
        tracemalloc.start()
        _attempt(result, parts)
        result.peak = max(result.peak, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    elif result.frames % TIMED:
        _attempt(result, parts)
    else:
        # Of processor time: what a busy machine does meanwhile is not the decoder's.
        begin = time.thread_time()
        _attempt(result, parts)
        result.seconds.append(time.thread_time() - begin)


def _attempt(result: Result, parts: Parts) -> None:
    try:
        wire.decode(parts, accept=ALL)
    except ProtocolError:
        result.refused += 1


def main() -> None:
    """Run the fuzzer as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result = fuzz(seed=options.seed, frames=options.frames)
    print(result)
    sys.exit(result.peak >= 2**20 or max(result.seconds) >= 1e-2)


if __name__ == "__main__":
    main()
