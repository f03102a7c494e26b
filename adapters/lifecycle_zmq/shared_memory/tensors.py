"""The tensors of a START: payloads, buffers of numpy and torch, and their description.

numpy and torch are imported only when an array of theirs is needed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from lifecycle_zmq.exceptions import EncodeError, ProtocolError

if TYPE_CHECKING:
    import numpy as np


class TensorPayload(Protocol):
    """A container that gives its tensors away once, such as `lifecycle.Payload`."""

    def take(self) -> Mapping[str, Any]:
        """Return the tensors and forget them."""


def take_tensors(payload: TensorPayload | None) -> Mapping[str, Any]:
    """Return the tensors of a payload, which is empty then.

    Raises:
        TypeError: It is not a payload; a plain mapping would keep the tensors alive.
    """
    if payload is None:
        return {}
    if not hasattr(payload, "take"):
        kind = type(payload).__name__
        raise TypeError(f"tensors must be a Payload, not {kind}; pass Payload({{…}})")
    return payload.take()


Shape = int | Sequence[int]


def numpy() -> Any:
    """Return numpy, which an arena requires.

    Raises:
        ModuleNotFoundError: It is not installed; names the extra that installs it.
    """
    try:
        import numpy as np
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'an arena needs numpy; pip install "anyio-lifecycle[zmq]", or pass '
            "arena_bytes=0 and payloads are sent",
            name=error.name,
        ) from None
    return np


def is_torch(value: object) -> bool:
    """Whether `value` is a dtype or a tensor of torch."""
    return type(value).__module__.partition(".")[0] == "torch"


def flat(owner: object) -> np.ndarray:
    """Return an array over the bytes of an object with an array interface."""
    import numpy as np

    return np.asarray(owner)


def address_of(array: np.ndarray) -> int:
    """Return the address of an array."""
    address: int = array.__array_interface__["data"][0]
    return address


def nbytes_of(shape: Shape, dtype: Any) -> int:
    """Return the bytes of an array.

    Raises:
        TypeError: No dtype, or one whose items are objects.
        ValueError: A negative length.
    """
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape is {lengths}; lengths are 0 or more")
    if is_torch(dtype):
        return math.prod(lengths) * int(dtype.itemsize)
    import numpy as np

    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype {kind} holds objects; take one of plain numbers")
    return math.prod(lengths) * int(kind.itemsize)


def shaped(memory: np.ndarray, shape: Shape, dtype: Any) -> Any:
    """Return *memory* as an array of numpy, or a tensor if *dtype* is one of torch."""
    if not is_torch(dtype):
        return memory.view(dtype).reshape(shape)
    import torch

    if not memory.size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def fill(target: Any, source: Any) -> None:
    """Copy `source` into an array or a tensor of the same shape."""
    if is_torch(target):
        target.copy_(source)
        return
    import numpy as np

    np.copyto(target, source)


def buffer_of(value: Any) -> memoryview:
    """Return the memory of a buffer or of a tensor, not copied.

    Raises:
        TypeError: It has no memory that Python can access.
        ValueError: Likewise.
    """
    if is_torch(value):
        try:
            value = value.numpy()
        except RuntimeError as error:  # as of a tensor that wants a gradient
            raise TypeError(type(error).__name__) from None
    return memoryview(value)


Buffer = bytes | bytearray | memoryview

MAX_TENSORS = 7
# libzmq drops a longer part silently, so the sender checks first.
MAX_TENSOR_BYTES = 4 * 2**30
# The native formats that memoryview.cast knows on every supported Python.
ITEMSIZE = {letter: struct.calcsize(letter) for letter in "?bBhHiIlLqQfd"}


# Memory of a tensor that this process could not allocate or map.
LOST: Final = memoryview(b"")
NOWHERE: Final = -1


class Place(NamedTuple):
    """A tensor in the arena; its offset is `NOWHERE` if its memory was lost."""

    offset: int
    letter: str
    shape: list[int]


def describe(
    tensors: Mapping[str, Any],
    place: Callable[[memoryview], int | None] = lambda _: None,
) -> tuple[list[list[Any]], list[memoryview]]:
    """Return the description of *tensors* for START, and the memory to be sent.

    Args:
        tensors: Name to any C-contiguous buffer of a plain native format, or tensor.
        place: Returns the offset of a buffer in the arena, or ``None`` to send it.

    Raises:
        EncodeError: A tensor has no such buffer, or there are too many or too large.
    """
    if not hasattr(tensors, "items"):
        message = f"tensors must be a map of names, not {type(tensors).__name__}"
        raise EncodeError("unencodable", message)
    if len(tensors) > MAX_TENSORS:
        raise EncodeError(
            "too_large", f"{len(tensors)} tensors, at most {MAX_TENSORS}; join some"
        )
    described: list[list[Any]] = []
    memory: list[memoryview] = []
    for name, value in tensors.items():
        view = _view(name, value)
        offset = place(view)
        described.append([name, view.format, list(view.shape or ()), offset])
        if offset is None:
            memory.append(view)
    return described, memory


def attach(
    described: list[list[Any]], memory: Sequence[Buffer]
) -> dict[str, memoryview | Place]:
    """Return the described tensors over *memory*, read-only, not copied.

    Raises:
        ProtocolError: The memory does not match its description.
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
    """Move the tensors that have memory out of a map."""
    moved = {name: it for name, it in tensors.items() if not isinstance(it, Place)}
    tensors.clear()
    return moved


def _view(name: str, value: Any) -> memoryview:
    try:
        view = buffer_of(value)
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
