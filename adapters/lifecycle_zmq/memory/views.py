"""Arrays of numpy and tensors of torch over memory that is somebody else's.

Neither is imported before somebody asks for an array of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Shape = int | Sequence[int]


def numpy() -> Any:
    """Return numpy, which an arena cannot do without.

    Raises:
        ModuleNotFoundError: It is not installed; with the extra that brings it.
    """
    try:
        import numpy as np
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'an arena needs numpy; pip install "anyio-lifecycle[arena]", or pass '
            "arena_bytes=0 and payloads are sent",
            name=error.name,
        ) from None
    return np


def is_torch(value: object) -> bool:
    """Whether `value` is a dtype or a tensor of torch."""
    return type(value).__module__.partition(".")[0] == "torch"


def flat(owner: object) -> np.ndarray:
    """Return the bytes that an object with an array interface owns; they keep it."""
    import numpy as np

    return np.asarray(owner)


def address_of(array: np.ndarray) -> int:
    """Return where an array begins."""
    address: int = array.__array_interface__["data"][0]
    return address


def nbytes_of(shape: Shape, dtype: Any) -> int:
    """Return the bytes of an array.

    Raises:
        TypeError: No dtype, or one whose items are not plain memory.
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
    """Return `memory` as an array of numpy, or a tensor if `dtype` is one of torch."""
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
        TypeError: It has none that Python could see.
        ValueError: Likewise.
    """
    if is_torch(value):
        try:
            value = value.numpy()
        except RuntimeError as error:  # as of a tensor that wants a gradient
            raise TypeError(type(error).__name__) from None
    return memoryview(value)
