"""The arena in the engine process: read-only, released by dropping the views."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from lifecycle.lowlevel import check_bool, check_int
from lifecycle_zmq.exceptions import ProtocolError
from lifecycle_zmq.shared_memory import memfd, tensors
from lifecycle_zmq.shared_memory.tensors import ITEMSIZE, Place

if TYPE_CHECKING:
    import numpy as np


# The client, and the generation of its stream.
LeaseKey = tuple[bytes, int]


class ArenaLease:
    """The lease of one request; released when no view of its tensors is left."""

    __slots__ = ("__weakref__", "_key", "_released")

    def __init__(self, key: LeaseKey, released: deque[LeaseKey]) -> None:
        self._key = key
        self._released = released

    def __del__(self) -> None:
        """Note the release; any thread may run this."""
        self._released.append(self._key)


class _Window:
    __slots__ = ("_address", "_lease", "_nbytes", "_root")

    def __init__(
        self, root: np.ndarray, offset: int, nbytes: int, lease: ArenaLease
    ) -> None:
        self._root = root
        self._address = tensors.address_of(root) + offset
        self._nbytes = nbytes
        self._lease = lease

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self._address, True),
            "shape": (self._nbytes,),
            "typestr": "|u1",
        }


class ArenaView:
    """Maps an inherited arena and returns its tensors without a copy.

    A lease is released when the last array, tensor or memoryview of it is gone, so
    readers, such as a copy to a device, keep a reference until they are done.

    Args:
        descriptor: As inherited; closed here.
        writable: Map it so that a device can be given it as pinned memory. Tensors
            are read-only all the same.

    Raises:
        OSError: It is no memory.
        TypeError: *descriptor* is no number, or *writable* neither True nor False.

    Attributes:
        size: Bytes.
        address: Address of the mapping, to register it with a device.
    """

    def __init__(self, descriptor: int, *, writable: bool = False) -> None:
        check_int(descriptor=descriptor)
        check_bool(writable=writable)
        np = tensors.numpy()
        self._root = np.frombuffer(
            memfd.map_inherited(descriptor, writable=writable), np.uint8
        )
        self.size = self._root.size
        self.address = tensors.address_of(self._root)
        self._live: set[LeaseKey] = set()
        self._released: deque[LeaseKey] = deque()

    @classmethod
    def attach(
        cls, inherited: Mapping[str, int], *, writable: bool = False
    ) -> Self | None:
        """Map the arena among inherited descriptors; ``None`` without one."""
        descriptor = inherited.get("arena")
        return None if descriptor is None else cls(descriptor, writable=writable)

    @property
    def leases(self) -> int:
        """Number of leases that are not released."""
        return len(self._live)

    def acquire(self, key: LeaseKey) -> ArenaLease:
        """Acquire a lease.

        Raises:
            ProtocolError: There is one for this key already.
        """
        if key in self._live:
            raise ProtocolError("a lease was acquired twice")
        self._live.add(key)
        return ArenaLease(key, self._released)

    def tensor(self, lease: ArenaLease, place: Place) -> memoryview:
        """Return one tensor of a lease, read-only.

        Args:
            lease: The request that the tensor belongs to.
            place: Offset, format and shape according to START.

        Raises:
            ProtocolError: It is not aligned, or not inside the arena.
        """
        offset, letter, shape = place
        nbytes = math.prod(shape) * ITEMSIZE[letter]
        if offset % ITEMSIZE[letter] or offset + nbytes > self.size:
            raise ProtocolError("a tensor is not where its description says")
        window = _Window(self._root, offset, nbytes, lease)
        memory: Any = memoryview(tensors.flat(window).data)
        view: memoryview = memory.cast(letter, shape)
        return view

    def resolve(self, key: LeaseKey, tensors: dict[str, memoryview | Place]) -> None:
        """Replace places among the tensors of a request by tensors of the arena.

        Raises:
            ProtocolError: As `tensor` and `acquire`; nothing was replaced then.
        """
        places = {name: it for name, it in tensors.items() if isinstance(it, Place)}
        if places:
            lease = self.acquire(key)
            tensors |= {name: self.tensor(lease, it) for name, it in places.items()}

    def released(self) -> list[LeaseKey]:
        """Return the leases that were released since the last call, each once."""
        numbers = [self._released.popleft() for _ in range(len(self._released))]
        self._live.difference_update(numbers)
        return numbers
