"""The arena as the engine process sees it: read-only, and given back by letting go."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from lifecycle_zmq import _options
from lifecycle_zmq._errors import ProtocolError
from lifecycle_zmq.memory import mapping, views
from lifecycle_zmq.memory.tensors import ITEMSIZE, Place

if TYPE_CHECKING:
    import numpy as np


# Whose loan, and which.
Number = tuple[bytes, int]


class Loan:
    """What one request borrowed; it ends when nobody sees any of its bytes."""

    __slots__ = ("__weakref__", "_ended", "_number")

    def __init__(self, number: Number, ended: deque[Number]) -> None:
        self._number = number
        self._ended = ended

    def __del__(self) -> None:
        """Note the end; this may be any thread."""
        self._ended.append(self._number)


class _Window:
    __slots__ = ("_address", "_loan", "_nbytes", "_root")

    def __init__(self, root: np.ndarray, offset: int, nbytes: int, loan: Loan) -> None:
        self._root = root
        self._address = views.address_of(root) + offset
        self._nbytes = nbytes
        self._loan = loan

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self._address, True),
            "shape": (self._nbytes,),
            "typestr": "|u1",
        }


class ArenaView:
    """Maps an inherited arena and gives out its tensors without a copy.

    A loan is over when the last array, tensor or memoryview of it is gone, so whoever
    still reads, such as a copy to a device, keeps a reference until it is done.

    Args:
        descriptor: As inherited; closed here.
        writable: Map it so that a device can be given it as pinned memory. Tensors
            are read-only all the same.

    Raises:
        OSError: It is no memory.
        TypeError: *descriptor* is no number, or *writable* neither True nor False.

    Attributes:
        size: Bytes.
        address: Where it is mapped, for whoever registers it with a device.
    """

    def __init__(self, descriptor: int, *, writable: bool = False) -> None:
        _options.whole(descriptor=descriptor)
        _options.flags(writable=writable)
        np = views.numpy()
        self._root = np.frombuffer(
            mapping.map_inherited(descriptor, writable=writable), np.uint8
        )
        self.size = self._root.size
        self.address = views.address_of(self._root)
        self._live: set[Number] = set()
        self._ended: deque[Number] = deque()

    @classmethod
    def attach(
        cls, inherited: Mapping[str, int], *, writable: bool = False
    ) -> Self | None:
        """Map the arena among inherited descriptors; ``None`` without one."""
        descriptor = inherited.get("arena")
        return None if descriptor is None else cls(descriptor, writable=writable)

    @property
    def loans(self) -> int:
        """How many loans are not given back."""
        return len(self._live)

    def borrow(self, number: Number) -> Loan:
        """Begin a loan.

        Raises:
            ProtocolError: One of this number goes on.
        """
        if number in self._live:
            raise ProtocolError("a loan began twice")
        self._live.add(number)
        return Loan(number, self._ended)

    def tensor(self, loan: Loan, place: Place) -> memoryview:
        """Return one tensor of a loan, read-only.

        Args:
            loan: What it belongs to.
            place: Where it is said to lie.

        Raises:
            ProtocolError: It is not aligned, or not inside of the arena.
        """
        offset, letter, shape = place
        nbytes = math.prod(shape) * ITEMSIZE[letter]
        if offset % ITEMSIZE[letter] or offset + nbytes > self.size:
            raise ProtocolError("a tensor is not where its description says")
        window = _Window(self._root, offset, nbytes, loan)
        memory: Any = memoryview(views.flat(window).data)
        view: memoryview = memory.cast(letter, shape)
        return view

    def lodge(self, number: Number, tensors: dict[str, memoryview | Place]) -> None:
        """Replace the places among the tensors of a request by what lies there.

        Raises:
            ProtocolError: As `tensor` and `borrow`; nothing was replaced then.
        """
        places = {name: it for name, it in tensors.items() if isinstance(it, Place)}
        if places:
            loan = self.borrow(number)
            tensors |= {name: self.tensor(loan, it) for name, it in places.items()}

    def ended(self) -> list[Number]:
        """Return the loans that ended since the last call, each once."""
        numbers = [self._ended.popleft() for _ in range(len(self._ended))]
        self._live.difference_update(numbers)
        return numbers
