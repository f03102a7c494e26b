"""Framing: messages in a stream of bytes, with a descriptor beside some of them.

Each part of a message follows a prefix of eight bytes, one big-endian number: the first
byte says how many parts of the message follow this one, the next two are a checksum of
the prefix, the others say how many bytes this part has. If the highest bit of the first
byte is set in the first part, the bytes of the other parts do not follow their
prefixes: they lie in sealed memory whose descriptor is passed with the first byte of
the message.
"""

from __future__ import annotations

import array
import binascii
import mmap
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lifecycle_zmq import protocol
from lifecycle_zmq.exceptions import EncodeError, ProtocolError
from lifecycle_zmq.shared_memory import memfd
from lifecycle_zmq.shared_memory.memfd import SUPPORTED
from lifecycle_zmq.shared_memory.tensors import LOST, MAX_TENSOR_BYTES, Buffer

_ITEM = array.array("i").itemsize
# Of an incomplete message and of the next one. A read ends after a descriptor.
_MAX_HELD = 2
# A program may have changed that Python ignores SIGPIPE.
QUIET: int = getattr(socket, "MSG_NOSIGNAL", 0)
_PRIVATE: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def send(sock: socket.socket, frame: memoryview, descriptor: int) -> int:
    """Send bytes, and a descriptor with the first of them; return how many were sent.

    Raises:
        OSError: As `socket.sendmsg`; the descriptor was not passed.
    """
    rights = array.array("i", [descriptor])
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    return sock.sendmsg([frame], passed, QUIET)


class DescriptorReceiver:
    """Receives bytes of a socket, and keeps passed descriptors until `take`."""

    __slots__ = ("_held", "_socket", "_space")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # None: passed, but this process had no descriptor left.
        self._held: deque[int | None] = deque()
        # Room for one: the kernel closes others, and sets MSG_CTRUNC.
        self._space = socket.CMSG_LEN(_ITEM)

    @property
    def held(self) -> bool:
        """Whether a descriptor was not taken yet."""
        return bool(self._held)

    def recv_into(self, memory: memoryview) -> int:
        """Receive bytes as a socket does, and descriptors passed with them.

        Raises:
            OSError: As `socket.recv_into`.
            ProtocolError: Too many, or something else, was passed; all was closed.
        """
        count, ancillary, flags, _ = self._socket.recvmsg_into(
            [memory], self._space, _PRIVATE
        )
        if ancillary or flags & socket.MSG_CTRUNC:
            cut = bool(ancillary and flags & socket.MSG_CTRUNC)
            known = self._hold(ancillary)
            if cut or len(self._held) > _MAX_HELD or not known:
                self.close()
                raise ProtocolError("more descriptors were passed than a message has")
        return count

    def take(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return the tensors in the memory passed first; closes its descriptor.

        Each is `LOST` if this process has no descriptor or room left for them.

        Raises:
            ProtocolError: No memory was passed, or not theirs.
        """
        if not self._held:
            raise ProtocolError("the memory of tensors was announced, but not passed")
        descriptor = self._held.popleft()
        if descriptor is not None:
            with suppress(MemoryError):
                return memfd.unpack(descriptor, sizes)
        return [LOST] * len(sizes)

    def close(self) -> None:
        """Close descriptors that were not taken."""
        memfd.close(it for it in self._held if it is not None)
        self._held.clear()

    def _hold(self, ancillary: Sequence[tuple[int, int, bytes]]) -> bool:
        known = True
        if not ancillary:
            self._held.append(None)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _ITEM
                self._held.extend(array.array("i", data[:whole]))
            else:
                known = False
        return known


def passed(sock: socket.socket) -> DescriptorReceiver | None:
    """Return a receiver of descriptors; ``None`` if the system cannot use them."""
    return DescriptorReceiver(sock) if SUPPORTED else None


PREFIX = struct.Struct("!Q")
_SHIFT = 56
_APART = 128
_CHECKED_SHIFT = 40
_SIZE = 2**_CHECKED_SHIFT - 1
_CHECK = 2**16 - 1
_NOTHING = memoryview(b"")
# Larger tensors get a mapping, which is unmapped with them.
_MAPPED_BYTES = 64 * 2**10

# A `FrameWriter` hands the whole rest of a message to the system, which passes it on in
# larger pieces, however long one of the processes is stopped between them.
_TRICKLE_BYTES = 4096
_TRICKLE_SECONDS = 0.3
_MOST_TRICKLES = 2


def prefix(follow: int, size: int) -> bytes:
    """Return the prefix of a part of so many bytes, before so many others."""
    number = follow << _SHIFT | size
    check = binascii.crc_hqx(PREFIX.pack(number), _CHECK)
    return PREFIX.pack(number | check << _CHECKED_SHIFT)


def _split(number: int) -> tuple[int, int]:
    """Return how many parts follow the one of a prefix, and its size.

    Raises:
        ProtocolError: The checksum differs.
    """
    follow, check, size = number >> _SHIFT, number >> _CHECKED_SHIFT, number & _SIZE
    if binascii.crc_hqx(PREFIX.pack(follow << _SHIFT | size), _CHECK) != check & _CHECK:
        raise ProtocolError(
            "the prefix of a part was damaged on its way, or is not of version "
            f"{protocol.VERSION} of this protocol"
        )
    return follow, size


class FrameReader:
    """Splits the bytes of a socket into messages."""

    def __init__(self, sock: socket.socket, *, head: int, tensors: int) -> None:
        self._passed = passed(sock) if tensors else None
        self._receive = (sock if self._passed is None else self._passed).recv_into
        self._head = head
        self._tensors = tensors
        # One buffer, always used from its beginning: it stays in the cache.
        self._memory = memoryview(bytearray(PREFIX.size + head))
        self._start = self._end = 0
        self._parts: list[Buffer] = []
        self._follow = 0
        self._unfilled = _NOTHING
        # Bytes still to come of a tensor for which there is no memory.
        self._skipped = 0
        # Sizes of tensors in passed memory; None if they follow in the stream.
        self._sizes: list[int] | None = None
        # Small reads in a row that did not complete a message, their bytes, and when
        # the last other read was.
        self._trickles = self._trickled = 0
        self._since = self._read_at = 0.0
        self.at_end = False

    @property
    def mid_message(self) -> bool:
        """Whether the rest of a message is still to be read."""
        return bool(self._parts) or self._start < self._end

    def read(self) -> bool:
        """Read what is there, at most a buffer full; False if that is nothing.

        Raises:
            ProtocolError: A descriptor was passed that belongs to no message.
        """
        inside = self.mid_message
        try:
            if self._passed is not None and self._passed.held and not self.mid_message:
                raise ProtocolError("memory was passed that no message announces")
            room = self._unfilled or self._room()
            count = self._receive(room)
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        except ProtocolError:
            self.close()
            raise
        # A read that fills its room says nothing of what else there is.
        self._note_pace(count, inside=inside and count < len(room))
        if not count:
            self.close()
        elif self._unfilled:
            # An empty rest would keep the whole tensor alive.
            self._unfilled = self._unfilled[count:] or _NOTHING
        else:
            self._end += count
        return count > 0

    def _note_pace(self, count: int, *, inside: bool) -> None:
        # The rest of a message that has lost bytes never comes. What comes instead are
        # later messages: the small ones of a side that waits.
        self._read_at = time.monotonic()
        self._trickled += count
        if inside and self._trickled < _TRICKLE_BYTES:
            self._trickles += 1
        else:
            self._reset_pace()

    def _reset_pace(self) -> None:
        self._trickles = self._trickled = 0
        self._since = self._read_at

    def take(self) -> Sequence[Buffer] | None:
        """Return the parts of the next whole message; None if there is none.

        A single part is valid until the next `read`.

        Raises:
            ProtocolError: The data is no message; nothing more is read.
        """
        while not self._unfilled:
            if self._skipped and not self._skip():
                break
            if self._parts and not self._follow:
                parts, self._parts = self._parts, []
                self._reset_pace()
                return parts
            if self.at_end or not self._begin():
                break
        if self._trickles >= _MOST_TRICKLES and not self.at_end:
            self._refuse_endless()
        return None

    def _refuse_endless(self) -> None:
        if self._read_at - self._since >= _TRICKLE_SECONDS:
            self._parts = []
            self.close()
            raise ProtocolError(
                "bytes of a message were lost on its way: it never ends"
            )

    def close(self) -> None:
        """Read nothing more, and close descriptors of incomplete messages."""
        self.at_end = True
        if self._passed is not None:
            self._passed.close()

    def _room(self) -> memoryview:
        # The longest legal part fits, so there always is room.
        rest = self._end - self._start
        if rest:
            self._memory[:rest] = self._memory[self._start : self._end]
        self._start, self._end = 0, rest
        return self._memory[rest:]

    def _begin(self) -> bool:
        begin = self._start + PREFIX.size
        if begin > self._end:
            return False
        (number,) = PREFIX.unpack_from(self._memory, self._start)
        try:
            follow, size = _split(number)
            if not self._parts:
                self._sizes = [] if follow & _APART else None
                follow &= ~_APART
            self._check(follow, size)
        except ProtocolError:
            self._parts = []
            self.close()
            raise
        if self._parts:
            self._begin_tensor(begin, size, last=not follow)
        elif begin + size > self._end:
            return False
        else:
            head = self._memory[begin : begin + size]
            self._parts.append(bytes(head) if follow else head)
            self._start = begin + size
        self._follow = follow
        return True

    def _check(self, follow: int, size: int) -> None:
        if self._parts:
            bad = follow != self._follow - 1 or size > MAX_TENSOR_BYTES
        else:
            bad = follow > self._tensors or size > self._head
            bad = bad or (self._sizes is not None and not follow)
        if bad:
            raise ProtocolError(f"a part of {size} bytes before {follow} others")

    def _begin_tensor(self, begin: int, size: int, *, last: bool) -> None:
        if self._sizes is not None:
            self._sizes.append(size)
            self._start = begin
            if last:
                self._parts += self._passed_tensors(self._sizes)
            return
        part = _memory_for(size)
        self._parts.append(part)
        if part is LOST:
            self._start, self._skipped = begin, size
            return
        view = memoryview(part)
        there = min(size, self._end - begin)
        view[:there] = self._memory[begin : begin + there]
        self._unfilled = view[there:] or _NOTHING
        self._start = begin + there

    def _skip(self) -> bool:
        """Skip bytes of a tensor; False while more of them are to come."""
        there = min(self._skipped, self._end - self._start)
        self._start += there
        self._skipped -= there
        return not self._skipped

    def _passed_tensors(self, sizes: list[int]) -> list[memoryview]:
        try:
            if self._passed is None:
                raise ProtocolError("this system cannot receive memory")
            return self._passed.take(sizes)
        except ProtocolError:
            self._parts = []
            self.close()
            raise


def _memory_for(size: int) -> bytearray | memoryview:
    """Return memory for a tensor; `LOST` if this process has no room for it."""
    # Pages are not touched before they are filled, however much a peer announces.
    try:
        if size < _MAPPED_BYTES:
            return bytearray(size)
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE))
    except (MemoryError, OSError):
        return LOST


# Smaller tensors are cheaper to copy into the socket than to pass as memory.
PASSED_BYTES = 64 * 2**10
# Most bytes queued: of messages with tensors, which a gate bounds long before, and of
# others, far more than credit allows.
MAX_WAITING_TENSORS = 4 * 2**30
MAX_WAITING = 256 * 2**20
# Most descriptors queued; further messages are queued as copies. The socket takes
# hundreds before the first is queued.
MAX_WAITING_DESCRIPTORS = 64
_SENDS = 64
_BUFFER = 2**20


def prepare(sock: socket.socket) -> None:
    """Configure one end of a pair for frames."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)


@dataclass(slots=True)
class _PendingFrame:
    """Queued bytes, and the descriptor to pass with the first of them."""

    rest: memoryview
    tensorless: bool
    descriptor: int | None = None
    sizes: Sequence[int] = ()

    @property
    def cost(self) -> int:
        return len(self.rest) + (0 if self.descriptor is None else sum(self.sizes))


class FrameWriter:
    """Sends messages through a socket, and queues what does not fit into it yet.

    Large tensors are copied into memory that is passed to the other side, where the
    system has such memory, so that queued tensors are no memory of this process.

    Attributes:
        waiting: Bytes that are queued, here or in memory that is to be passed.
    """

    __slots__ = ("_descriptors", "_kept", "_socket", "_tensorless", "waiting")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._kept: deque[_PendingFrame] = deque()
        self._descriptors = 0
        # Bytes of it of messages without tensors.
        self._tensorless = 0
        self.waiting = 0

    def write(self, parts: Sequence[Buffer]) -> bool:
        """Send or queue one message; queued parts are copied. False: no room for it.

        Raises:
            EncodeError: There is no room for its tensors, or one of them is gone.
            OSError: The other side has hung up, or the system takes nothing.
        """
        tensorless = len(parts) == 1
        if tensorless and not self._kept:
            frame = prefix(0, len(parts[0])) + parts[0]
            return self._send([frame], tensorless=True)
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        if tensorless:
            # A separate limit, so that tensors leave room for control messages.
            if self._tensorless + size > MAX_WAITING:
                return False
        elif self.waiting and self.waiting + size > MAX_WAITING_TENSORS:
            message = f"{self.waiting} bytes wait for the engine to read them"
            raise _no_memory(f"{message}, at most {MAX_WAITING_TENSORS}")
        elif size - len(views[0]) > PASSED_BYTES and self._pass(views):
            return True
        return self._send(_framed(views), tensorless=tensorless)

    def flush(self) -> None:
        """Send queued data, as much as fits.

        Raises:
            OSError: The other side has hung up.
        """
        # Bounded: a reader that keeps up must not block the caller.
        for _ in range(_SENDS):
            if not self._kept or not self._send_first():
                return

    def drop(self) -> None:
        """Drop everything that is queued."""
        memfd.close(it.descriptor for it in self._kept if it.descriptor is not None)
        self._kept.clear()
        self._tensorless = self.waiting = self._descriptors = 0

    def _pass(self, views: Sequence[memoryview]) -> bool:
        head, *tensors = views
        if self._descriptors >= MAX_WAITING_DESCRIPTORS:
            return False
        descriptor = memfd.pack(tensors)
        if descriptor is None:
            return False
        prefixes = _prefixes(views)
        first = prefix(_APART + len(tensors), len(head))
        frame = memoryview(b"".join((first, head, *prefixes[1:])))
        self._keep(_PendingFrame(frame, False, descriptor, list(map(len, tensors))))
        if len(self._kept) == 1:
            self._send_first()
        return True

    def _keep(self, kept: _PendingFrame) -> None:
        self._kept.append(kept)
        self._count(kept, 1)

    def _count(self, kept: _PendingFrame, sign: int) -> None:
        self.waiting += sign * kept.cost
        self._tensorless += sign * kept.cost * kept.tensorless
        self._descriptors += sign * (kept.descriptor is not None)

    def _send_first(self) -> bool:
        """Send the first queued frame; False if the socket has no room for more."""
        kept = self._kept[0]
        try:
            sent = self._try_kept(kept)
        except OSError:
            if kept.descriptor is None:
                raise
            # Too many descriptors are in flight, or the other side has hung up, which
            # sending the bytes finds out.
            self._unpack_first()
            return True
        self._count(kept, -1)
        if sent and kept.descriptor is not None:
            memfd.close([kept.descriptor])
            kept.descriptor = None
        kept.rest = kept.rest[sent:]
        if not kept.rest:
            self._kept.popleft()
            return True
        self._count(kept, 1)
        return False

    def _try_kept(self, kept: _PendingFrame) -> int:
        if kept.descriptor is None:
            return self._try([kept.rest])
        try:
            return send(self._socket, kept.rest, kept.descriptor)
        except BlockingIOError:
            return 0

    def _unpack_first(self) -> None:
        kept = self._kept.popleft()
        self._count(kept, -1)
        assert kept.descriptor is not None
        # Nothing of it was sent: the whole head is between the prefixes.
        head = kept.rest[PREFIX.size : -PREFIX.size * len(kept.sizes)]
        try:
            tensors = memfd.unpack(kept.descriptor, kept.sizes)
        except (MemoryError, ProtocolError):
            raise OSError("the memory of tensors cannot be mapped") from None
        frame = b"".join(_framed([head, *tensors]))
        self._kept.appendleft(_PendingFrame(memoryview(frame), False))
        self._count(self._kept[0], 1)

    def _send(self, frames: Sequence[Buffer], *, tensorless: bool) -> bool:
        sent = 0 if self._kept else self._try_new(frames)
        try:
            # One piece: of several the other side may see the first alone, and take the
            # message for one that has lost bytes.
            rest = b"".join(_after(frames, sent))
        except MemoryError:
            if sent:  # the other side could not parse what follows
                raise
            raise _no_memory("the system has no memory for a copy") from None
        if rest:
            self._keep(_PendingFrame(memoryview(rest), tensorless))
        return True

    def _try_new(self, frames: Sequence[Buffer]) -> int:
        try:
            return self._try(frames)
        except OSError as error:
            memfd.check_address(error)
            raise

    def _try(self, frames: Sequence[Buffer]) -> int:
        try:
            if len(frames) == 1:
                return self._socket.send(frames[0], QUIET)
            return self._socket.sendmsg(frames, (), QUIET)
        except BlockingIOError:
            return 0


def _after(frames: Sequence[Buffer], sent: int) -> Iterator[memoryview]:
    """Yield what is left of some frames after so many bytes of them."""
    for frame in frames:
        if sent < len(frame):
            yield memoryview(frame)[sent:]
        sent = max(0, sent - len(frame))


def _framed(views: Sequence[memoryview]) -> list[Buffer]:
    pairs = zip(_prefixes(views), views, strict=True)
    return [frame for pair in pairs for frame in pair]


def _prefixes(views: Sequence[memoryview]) -> list[bytes]:
    follow: Iterable[int] = reversed(range(len(views)))
    return [prefix(left, len(view)) for left, view in zip(follow, views, strict=True)]


def _no_memory(why: str) -> EncodeError:
    return EncodeError(
        "no_memory",
        f"{why}; admit fewer bytes at a time, or pass arena_bytes=",
    )
