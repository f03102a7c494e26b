"""The arena as the engine process sees it: read-only, and given back by letting go."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from . import _memory, _views
from ._errors import ProtocolError
from ._schema import ITEMSIZE

if TYPE_CHECKING:
    import numpy as np


class Loan:
    """What one request borrowed; it ends when nobody sees any of its bytes."""

    __slots__ = ("__weakref__", "_ended", "_number")

    def __init__(self, number: int, ended: deque[int]) -> None:
        self._number = number
        self._ended = ended

    def __del__(self) -> None:
        """Note the end; this may be any thread."""
        self._ended.append(self._number)


class _Window:
    __slots__ = ("_address", "_loan", "_nbytes", "_root")

    def __init__(self, root: np.ndarray, offset: int, nbytes: int, loan: Loan) -> None:
        self._root = root
        self._address = _views.address_of(root) + offset
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
        size: Bytes.

    Raises:
        OSError: There is no such memory, or it has another size.

    Attributes:
        size: Bytes.
        address: Where it is mapped, for whoever registers it with a device.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        import numpy as np

        self._root = np.frombuffer(_memory.map_read_only(descriptor, size), np.uint8)
        self.size = size
        self.address = _views.address_of(self._root)
        self._live: set[int] = set()
        self._ended: deque[int] = deque()

    @classmethod
    def parse(cls, text: str) -> ArenaView:
        """Map what ``--arena`` says: a descriptor, a colon and a size.

        Raises:
            ValueError: It says something else.
            OSError: See the class.
        """
        descriptor, _, size = text.partition(":")
        return cls(int(descriptor), int(size))

    @property
    def loans(self) -> int:
        """How many loans are not given back."""
        return len(self._live)

    def borrow(self, number: int) -> Loan:
        """Begin a loan.

        Raises:
            ProtocolError: One of this number goes on.
        """
        if number in self._live:
            raise ProtocolError("a loan began twice")
        self._live.add(number)
        return Loan(number, self._ended)

    def tensor(
        self, loan: Loan, offset: int, letter: str, shape: list[int]
    ) -> memoryview:
        """Return one tensor of a loan, read-only.

        Args:
            loan: What it belongs to.
            offset: Where it begins.
            letter: Its format.
            shape: Its lengths, each positive.

        Raises:
            ProtocolError: It is not aligned, or not inside of the arena.
        """
        nbytes = math.prod(shape) * ITEMSIZE[letter]
        if offset % ITEMSIZE[letter] or offset + nbytes > self.size:
            raise ProtocolError("a tensor is not where its description says")
        window = _Window(self._root, offset, nbytes, loan)
        memory: Any = memoryview(_views.flat(window).data)
        view: memoryview = memory.cast(letter, shape)
        return view

    def ended(self) -> list[int]:
        """Return the loans that ended since the last call, each once."""
        numbers = [self._ended.popleft() for _ in range(len(self._ended))]
        self._live.difference_update(numbers)
        return numbers
