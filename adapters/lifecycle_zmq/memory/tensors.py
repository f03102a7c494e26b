"""The tensors of a START: what its map says of them, and where their memory is."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from lifecycle_zmq._errors import EncodeError, ProtocolError
from lifecycle_zmq.memory import views

Buffer = bytes | bytearray | memoryview

MAX_TENSORS = 7
# libzmq drops a longer part without a word, so the sender checks first.
MAX_TENSOR_BYTES = 4 * 2**30
# The native formats that memoryview.cast knows on every supported Python.
ITEMSIZE = {letter: struct.calcsize(letter) for letter in "?bBhHiIlLqQfd"}


# A tensor whose memory this process could not take in.
LOST: Final = memoryview(b"")
NOWHERE: Final = -1


class Place(NamedTuple):
    """A tensor that lies in the arena; nowhere, before its beginning, if it is lost."""

    offset: int
    letter: str
    shape: list[int]


def describe(
    tensors: Mapping[str, Any],
    lodge: Callable[[memoryview], int | None] = lambda _: None,
) -> tuple[list[list[Any]], list[memoryview]]:
    """Return what START says of `tensors`, and the memory to be sent, not copied.

    Args:
        tensors: Name to any C-contiguous buffer of a plain native format, or tensor.
        lodge: Says where in the arena a buffer lies; ``None``: it has to be sent.

    Raises:
        EncodeError: A tensor has no such buffer, or there are too many or too large.
    """
    if not hasattr(tensors, "items"):
        told = f"tensors must be a map of names, not {type(tensors).__name__}"
        raise EncodeError("unencodable", told)
    if len(tensors) > MAX_TENSORS:
        raise EncodeError(
            "too_large", f"{len(tensors)} tensors, at most {MAX_TENSORS}; join some"
        )
    described: list[list[Any]] = []
    memory: list[memoryview] = []
    for name, value in tensors.items():
        view = _view(name, value)
        offset = lodge(view)
        described.append([name, view.format, list(view.shape or ()), offset])
        if offset is None:
            memory.append(view)
    return described, memory


def attach(
    described: list[list[Any]], memory: Sequence[Buffer]
) -> dict[str, memoryview | Place]:
    """Return the tensors that were described, over `memory`, read-only, not copied.

    Raises:
        ProtocolError: The memory is not what its description says.
    """
    sent = sum(offset is None for *_, offset in described)
    if sent != len(memory) or len(described) > MAX_TENSORS:
        raise ProtocolError(f"{len(memory)} tensors, {sent} described")
    attached: dict[str, memoryview | Place] = {}
    parts = iter(memory)
    for name, letter, shape, offset in described:
        if name in attached:
            raise ProtocolError("two tensors have one name")
        if offset is not None:
            attached[name] = Place(offset, letter, shape)
            continue
        part = next(parts)
        if part is LOST:
            attached[name] = Place(NOWHERE, letter, shape)
            continue
        view = memoryview(part)
        if math.prod(shape) * ITEMSIZE[letter] != len(view):
            raise ProtocolError("a tensor is not what its description says")
        attached[name] = view.cast(letter, shape).toreadonly()
    return attached


def move(tensors: dict[str, memoryview | Place]) -> dict[str, memoryview]:
    """Return the tensors that were found, and leave none behind."""
    moved = {name: it for name, it in tensors.items() if not isinstance(it, Place)}
    tensors.clear()
    return moved


def _view(name: str, value: Any) -> memoryview:
    try:
        view = views.buffer_of(value)
    except (TypeError, ValueError):  # no buffer, or a format that buffers lack
        raise EncodeError(
            "unencodable",
            f"tensor {name!r} gives no buffer; pass a numpy array or bytes, of torch "
            "what has a numpy(), such as x.detach().view(torch.uint8)",
        ) from None
    if not view.c_contiguous or view.format not in ITEMSIZE or not view.nbytes:
        raise EncodeError(
            "unencodable",
            f"tensor {name!r} has format {view.format!r} and {view.nbytes} bytes; make "
            f"it C-contiguous, not empty and of one of {''.join(ITEMSIZE)}",
        )
    if view.nbytes > MAX_TENSOR_BYTES:
        raise EncodeError(
            "too_large",
            f"tensor {name!r} has {view.nbytes} bytes, at most {MAX_TENSOR_BYTES}",
        )
    return view
