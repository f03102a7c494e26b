"""Messages of every kind through a socket that is full, cut short and refused."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lifecycle_zmq.memory import parcels
from lifecycle_zmq.transport import frame_writer, passing
from lifecycle_zmq.transport.frame_writer import FrameWriter
from lifecycle_zmq.transport.frames import FrameReader

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="no such memory"),
    pytest.mark.usefixtures("no_leaks"),
]

MESSAGES = 60
HEAD = 5_000


def unreliable(dice: random.Random, call: Callable[..., int], code: int) -> Any:
    """`call`, which fails now and then."""

    def tried(*arguments: Any) -> int:
        if dice.random() < 0.1:
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    return tried


def halting(dice: random.Random, send: Callable[..., int]) -> Any:
    """`send`, which takes only the beginning now and then."""

    def tried(sock: socket.socket, frame: memoryview, descriptor: int) -> int:
        most = dice.choice([len(frame), dice.randint(1, len(frame))])
        return send(sock, frame[:most], descriptor)

    return tried


def message(dice: random.Random) -> list[bytes]:
    """A head, and up to seven tensors."""
    sizes = [dice.choice([1, 20, HEAD])]
    sizes += dice.choices([1, 70, 500, 9_000], k=dice.choice([0, 0, 1, 2, 3, 7]))
    return [dice.randbytes(size) for size in sizes]


def write(dice: random.Random, writer: FrameWriter, parts: list[bytes]) -> None:
    """Send it, its tensors copied before or not."""
    tensors = [memoryview(part) for part in parts[1:]]
    early = parcels.pack_early(tensors) if tensors and dice.random() < 0.4 else None
    assert writer.write([parts[0], *(early or tensors)])


@pytest.mark.parametrize("seed", range(40))
def test_all_arrives_in_order_whatever_fails_meanwhile(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Passed, kept, kept as a copy, or in the stream; and nothing is left of it."""
    dice = random.Random(seed)
    send = unreliable(dice, halting(dice, passing.send), errno.ETOOMANYREFS)
    monkeypatch.setattr(passing, "send", send)
    made = unreliable(dice, os.memfd_create, errno.EMFILE)
    monkeypatch.setattr(os, "memfd_create", made)
    monkeypatch.setattr(frame_writer, "PASSED_FROM", 200)
    monkeypatch.setattr(frame_writer, "MOST_DESCRIPTORS", 5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame_writer.prepare(ours)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, dice.choice([1, 65_536]))
        theirs.setblocking(False)
        writer, reader = FrameWriter(ours), FrameReader(theirs, head=HEAD, tensors=7)
        sent = [message(dice) for _ in range(MESSAGES)]
        left, heard = sent[::-1], []
        for _ in range(100 * MESSAGES):
            for _ in range(min(len(left), dice.choice([0, 1, 8]))):
                write(dice, writer, left.pop())
            if dice.random() < 0.5:
                writer.flush()
            reader.read()
            while (parts := reader.take()) is not None:
                heard.append([bytes(part) for part in parts])
        assert heard == sent
        assert writer.waiting == 0
        for _ in range(20):  # more than there is room for
            writer.write([b"head", bytes(60_000)])
        writer.drop()
        reader.close()
