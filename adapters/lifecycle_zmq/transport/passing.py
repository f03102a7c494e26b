"""Descriptors that travel beside the bytes of a socket, one with a message at most."""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from lifecycle_zmq._errors import ProtocolError
from lifecycle_zmq.memory import parcels
from lifecycle_zmq.memory.parcels import SUPPORTED
from lifecycle_zmq.memory.tensors import LOST

_ITEM = array.array("i").itemsize
# Of a message that was begun, and of the next one. A read ends where one was passed.
_MOST_HELD = 2
# Programs may have undone that Python ignores this signal.
QUIET: int = getattr(socket, "MSG_NOSIGNAL", 0)
_PRIVATE: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def send(sock: socket.socket, frame: memoryview, descriptor: int) -> int:
    """Send bytes, and a descriptor with the first of them; return how many were sent.

    Raises:
        OSError: As `socket.sendmsg`; nothing was passed.
    """
    rights = array.array("i", [descriptor])
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    return sock.sendmsg([frame], passed, QUIET)


class Passed:
    """What was passed with the bytes that a socket brought, until it is taken.

    Args:
        sock: The socket.
    """

    __slots__ = ("_held", "_socket", "_space")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # None: passed, and this process had no descriptor left to take it.
        self._held: deque[int | None] = deque()
        # Room for one: the kernel closes others by itself, and says so.
        self._space = socket.CMSG_LEN(_ITEM)

    @property
    def held(self) -> bool:
        """Whether something was not taken yet."""
        return bool(self._held)

    def recv_into(self, memory: memoryview) -> int:
        """Receive bytes as a socket does, and what was passed with them.

        Raises:
            OSError: As `socket.recv_into`.
            ProtocolError: Too much was passed, or something else; all was closed.
        """
        count, ancillary, flags, _ = self._socket.recvmsg_into(
            [memory], self._space, _PRIVATE
        )
        if ancillary or flags & socket.MSG_CTRUNC:
            cut = bool(ancillary and flags & socket.MSG_CTRUNC)
            known = self._hold(ancillary)
            if cut or len(self._held) > _MOST_HELD or not known:
                self.close()
                raise ProtocolError("more was passed than a message has")
        return count

    def take(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return the tensors in what was passed first, which is closed.

        Each is `LOST` where this process has no descriptor or room left for them.

        Raises:
            ProtocolError: Nothing was passed, or not their memory.
        """
        if not self._held:
            raise ProtocolError("the memory of tensors was announced and not passed")
        descriptor = self._held.popleft()
        if descriptor is not None:
            with suppress(MemoryError):
                return parcels.unpack(descriptor, sizes)
        return [LOST] * len(sizes)

    def close(self) -> None:
        """Close whatever nobody took."""
        parcels.close(it for it in self._held if it is not None)
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


def passed(sock: socket.socket) -> Passed | None:
    """Return what takes in descriptors; ``None`` where none could be made use of."""
    return Passed(sock) if SUPPORTED else None
