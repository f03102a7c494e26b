"""Sends messages in frames, and keeps what the socket has no room for yet."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lifecycle_zmq._errors import EncodeError, ProtocolError
from lifecycle_zmq.memory import parcels
from lifecycle_zmq.protocol.wire import Buffer
from lifecycle_zmq.transport import passing
from lifecycle_zmq.transport.frames import APART, PREFIX, SHIFT
from lifecycle_zmq.transport.passing import QUIET

# Up to here copying tensors into the socket costs less than memory that is passed.
PASSED_FROM = 64 * 2**10
# What may wait for the other side to read: of all messages with tensors, which a gate
# bounds long before; and of others, far more than credit lets pile up.
MOST_TENSORS = 4 * 2**30
MOST_WAITING = 256 * 2**20
# Descriptors that may wait; a message beyond them is kept as a copy. The socket takes
# hundreds before any has to.
MOST_DESCRIPTORS = 64
_SENDS = 64
_BUFFER = 2**20


def prepare(sock: socket.socket) -> None:
    """Make one end of a pair ready for frames."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)


@dataclass(slots=True)
class _Kept:
    """Bytes that wait, and what is passed with the first of them.

    Attributes:
        rest: The bytes.
        lone: Whether they are of a message without tensors.
        descriptor: Of the tensors' memory, closed once it is passed.
        sizes: Of the tensors in it.
    """

    rest: memoryview
    lone: bool
    descriptor: int | None = None
    sizes: Sequence[int] = ()

    @property
    def cost(self) -> int:
        return len(self.rest) + (0 if self.descriptor is None else sum(self.sizes))


class FrameWriter:
    """Sends messages through a socket, and keeps what does not fit into it yet.

    Large tensors are copied into memory that is passed to the other side, where the
    system has such memory, so that none of what waits for it is held by this process.

    Args:
        sock: The socket; it does not block.

    Attributes:
        waiting: Bytes that are kept, here or in memory that is to be passed.
    """

    __slots__ = ("_descriptors", "_kept", "_lone", "_socket", "waiting")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._kept: deque[_Kept] = deque()
        self._descriptors = 0
        # How much of it is of messages without tensors.
        self._lone = 0
        self.waiting = 0

    def write(self, parts: Sequence[Buffer]) -> bool:
        """Send or keep one message; what is kept was copied. False: no room for it.

        Raises:
            EncodeError: There is no room for its tensors, or one of them is gone.
            OSError: The other side has hung up, or the system takes nothing.
        """
        lone = len(parts) == 1
        if lone and not self._kept:
            frame = PREFIX.pack(len(parts[0])) + parts[0]
            return self._send([frame], lone=True)
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        if lone:
            # Tensors leave room for what is to be said of their streams.
            if self._lone + size > MOST_WAITING:
                return False
        elif self.waiting and self.waiting + size > MOST_TENSORS:
            told = f"{self.waiting} bytes wait for the engine to read them"
            raise _no_memory(f"{told}, at most {MOST_TENSORS}")
        elif size - len(views[0]) > PASSED_FROM and self._pass(views):
            return True
        return self._send(_framed(views), lone=lone)

    def flush(self) -> None:
        """Send what was kept, as much as fits.

        Raises:
            OSError: The other side has hung up.
        """
        # Bounded: a reader that keeps up must not hold the caller.
        for _ in range(_SENDS):
            if not self._kept or not self._send_first():
                return

    def drop(self) -> None:
        """Keep nothing any more."""
        parcels.close(it.descriptor for it in self._kept if it.descriptor is not None)
        self._kept.clear()
        self._lone = self.waiting = self._descriptors = 0

    def _pass(self, views: Sequence[memoryview]) -> bool:
        head, *tensors = views
        if self._descriptors >= MOST_DESCRIPTORS:
            return False
        descriptor = parcels.pack(tensors)
        if descriptor is None:
            return False
        prefixes = _prefixes(views)
        first = PREFIX.pack(APART + len(tensors) << SHIFT | len(head))
        frame = memoryview(b"".join((first, head, *prefixes[1:])))
        self._keep(_Kept(frame, False, descriptor, list(map(len, tensors))))
        if len(self._kept) == 1:
            self._send_first()
        return True

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._count(kept, 1)

    def _count(self, kept: _Kept, sign: int) -> None:
        self.waiting += sign * kept.cost
        self._lone += sign * kept.cost * kept.lone
        self._descriptors += sign * (kept.descriptor is not None)

    def _send_first(self) -> bool:
        """Send of what was kept first; False when the socket has no room for more."""
        kept = self._kept[0]
        try:
            sent = self._try_kept(kept)
        except OSError:
            if kept.descriptor is None:
                raise
            # Too many are under way, or it has hung up, as the bytes will find out.
            self._unpack_first()
            return True
        self._count(kept, -1)
        if sent and kept.descriptor is not None:
            parcels.close([kept.descriptor])
            kept.descriptor = None
        kept.rest = kept.rest[sent:]
        if not kept.rest:
            self._kept.popleft()
            return True
        self._count(kept, 1)
        return False

    def _try_kept(self, kept: _Kept) -> int:
        if kept.descriptor is None:
            return self._try([kept.rest])
        try:
            return passing.send(self._socket, kept.rest, kept.descriptor)
        except BlockingIOError:
            return 0

    def _unpack_first(self) -> None:
        kept = self._kept.popleft()
        self._count(kept, -1)
        assert kept.descriptor is not None
        # Nothing of it was sent: between the prefixes is the head, whole.
        head = kept.rest[PREFIX.size : -PREFIX.size * len(kept.sizes)]
        try:
            tensors = parcels.unpack(kept.descriptor, kept.sizes)
        except (MemoryError, ProtocolError):
            raise OSError("the memory of tensors cannot be mapped") from None
        for frame in reversed(_framed([head, *tensors])):
            self._kept.appendleft(_Kept(memoryview(frame), False))
            self._count(self._kept[0], 1)

    def _send(self, frames: Sequence[Buffer], *, lone: bool) -> bool:
        sent = total = 0 if self._kept else self._try_new(frames)
        rests: list[bytes] = []
        try:
            for frame in frames:
                if sent < len(frame):
                    rests.append(bytes(memoryview(frame)[sent:]))
                sent = max(0, sent - len(frame))
        except MemoryError:
            if total:  # what follows could not be understood
                raise
            raise _no_memory("the system has no memory for a copy") from None
        for rest in rests:
            self._keep(_Kept(memoryview(rest), lone))
        return True

    def _try_new(self, frames: Sequence[Buffer]) -> int:
        try:
            return self._try(frames)
        except OSError as error:
            parcels.check_address(error)
            raise

    def _try(self, frames: Sequence[Buffer]) -> int:
        try:
            if len(frames) == 1:
                return self._socket.send(frames[0], QUIET)
            return self._socket.sendmsg(frames, (), QUIET)
        except BlockingIOError:
            return 0


def _framed(views: Sequence[memoryview]) -> list[Buffer]:
    pairs = zip(_prefixes(views), views, strict=True)
    return [frame for pair in pairs for frame in pair]


def _prefixes(views: Sequence[memoryview]) -> list[bytes]:
    follow: Iterable[int] = reversed(range(len(views)))
    return [
        PREFIX.pack(left << SHIFT | len(view))
        for left, view in zip(follow, views, strict=True)
    ]


def _no_memory(why: str) -> EncodeError:
    return EncodeError(
        "no_memory",
        f"{why}; admit fewer bytes at a time, or pass arena_bytes=",
    )
