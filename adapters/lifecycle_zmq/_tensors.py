"""The tensors beside a START: what its map says of them, and their memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ._errors import EncodeError, ProtocolError

Buffer = bytes | bytearray | memoryview

MAX_TENSORS = 7
# libzmq drops a longer part without a word, so the sender checks first.
MAX_TENSOR_BYTES = 4 * 2**30
# The native formats that memoryview.cast knows on every supported Python.
ITEMSIZE = {letter: struct.calcsize(letter) for letter in "?bBhHiIlLqQfd"}


def describe(tensors: Mapping[str, Any]) -> tuple[list[list[Any]], list[memoryview]]:
    """Return what START says of `tensors`, and their memory, not copied.

    Args:
        tensors: Name to any C-contiguous buffer of a plain native format.

    Raises:
        EncodeError: A tensor has no such buffer, or there are too many or too large.
    """
    if len(tensors) > MAX_TENSORS:
        raise EncodeError(
            "too_large", f"{len(tensors)} tensors, at most {MAX_TENSORS}; join some"
        )
    described: list[list[Any]] = []
    memory: list[memoryview] = []
    for name, value in tensors.items():
        view = _view(name, value)
        described.append([name, view.format, list(view.shape or ())])
        memory.append(view)
    return described, memory


def attach(
    described: list[list[Any]], memory: Sequence[Buffer]
) -> dict[str, memoryview]:
    """Return the tensors that were described, over `memory`, not copied.

    Raises:
        ProtocolError: The memory is not what its description says.
    """
    if len(described) != len(memory):
        raise ProtocolError(f"{len(memory)} tensors, {len(described)} described")
    attached: dict[str, memoryview] = {}
    for (name, letter, shape), raw in zip(described, memory, strict=True):
        view = memoryview(raw)
        if name in attached or math.prod(shape) * ITEMSIZE[letter] != len(view):
            raise ProtocolError("a tensor is not what its description says")
        attached[name] = view.cast(letter, shape)
    return attached


def _view(name: str, value: Any) -> memoryview:
    try:
        view = memoryview(value)
    except (TypeError, ValueError):  # no buffer, or a format that buffers lack
        raise EncodeError(
            "unencodable",
            f"tensor {name!r} gives no buffer; pass a numpy array or bytes",
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
