"""Copies to a device that are under way, and the memory that they still read."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from lifecycle_zmq import ArenaView


class Mark(Protocol):
    """A point in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait until everything before it is done."""


class Device(Protocol):
    """What copies in its own time, in the order in which it was told."""

    def copy(self, source: np.ndarray) -> Any:
        """Begin to copy; return what later work on the device may use at once."""
        ...

    def mark(self) -> Mark:
        """Return a mark behind all that was begun."""
        ...


class Uploads:
    """Holds what a device reads until the device has read it.

    A tensor in the arena counts as read when nobody holds it any more, and the client
    then writes the next one there. So it is held here beyond the call that copies it.

    Args:
        device: Where to.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reading: list[tuple[Mark, np.ndarray]] = []

    def begin(self, source: np.ndarray) -> Any:
        """Begin to copy; return what later work on the device may use at once."""
        copy = self._device.copy(source)
        self._reading.append((self._device.mark(), source))
        return copy

    def finish(self) -> None:
        """Wait for the copies, not for the work behind them, and let go of each.

        Raises:
            RuntimeError: The device failed; what it may still read is held on to.
        """
        while self._reading:
            mark, _ = self._reading[0]
            mark.synchronize()
            del self._reading[0]


class TorchDevice:
    """A device of torch, on its current stream.

    Args:
        device: A CPU "copies" by looking at the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, source: np.ndarray) -> torch.Tensor:
        """Begin to copy; asynchronous where the source is pinned."""
        import torch

        with warnings.catch_warnings():
            # It is read-only, which torch warns about; the model only reads it.
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch.from_numpy(source)
        return tensor.to(self._device, non_blocking=True)

    def mark(self) -> Mark:
        """Return an event behind all that was begun on the current stream."""
        import torch

        if self._device.type != "cuda":
            return _Past()
        event: Mark = torch.cuda.current_stream(self._device).record_event()
        return event


class _Past:
    def synchronize(self) -> None:
        """Return at once."""


def small(values: Sequence[Any], device: torch.device, dtype: Any = None) -> Any:
    """Return a small tensor on the device without waiting for what runs there.

    From ordinary memory a copy waits for all that was begun before it. Pinned memory
    that torch lends is not lent again before its copy is done.

    Args:
        values: Of one type, or sequences of them.
        device: Where to.
        dtype: By default that of the values.
    """
    import torch

    pinned = device.type == "cuda"
    tensor = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return tensor.to(device, non_blocking=True)


def pin(arena: ArenaView) -> bool:
    """Let the current CUDA device read an arena by itself; False: it refused.

    All of the arena's pages are made and kept in memory by this. Without it copies are
    slower and hold the caller up, and nothing else changes. `unpin` it before it is
    unmapped, unless the process ends with it: the driver would take what is mapped
    there next for the same memory.
    """
    import torch

    code = torch.cuda.cudart().cudaHostRegister(arena.address, arena.size, 0)
    if int(code) == 0:
        return True
    # The refusal would otherwise be taken for that of the next kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").item()
    return False


def unpin(arena: ArenaView) -> None:
    """Take back what `pin` did; nothing may be on its way from there any more."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(arena.address)
