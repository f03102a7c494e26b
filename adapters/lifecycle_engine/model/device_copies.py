"""The device: copies in flight, pinning of the arena, and detection of device loss.

Torch is imported where it is used, so that this module loads without it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lifecycle_engine.core.model_runner import DeviceLost

if TYPE_CHECKING:
    import numpy as np
    import torch

    from lifecycle_zmq import ArenaView


class CopyEvent(Protocol):
    """A point in the order of a device's work, such as a CUDA event."""

    def synchronize(self) -> None:
        """Wait until all work before the event is done."""


class CopyDevice(Protocol):
    """A device that copies asynchronously and in order."""

    def copy(self, source: np.ndarray) -> Any:
        """Start a copy; later work on the device may use the result at once."""
        ...

    def record_event(self) -> CopyEvent:
        """Return an event after all work that was started."""
        ...


class PendingCopies:
    """Keeps source arrays alive until the device has read them.

    An arena region is released when its last reference is dropped, and the client then
    writes the next tensor there. So the source has to outlive the call that copies it.
    """

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self._pending: list[tuple[CopyEvent, np.ndarray]] = []

    def start(self, source: np.ndarray) -> Any:
        """Start a copy; later work on the device may use the result at once."""
        copy = self._device.copy(source)
        self._pending.append((self._device.record_event(), source))
        return copy

    def wait(self) -> None:
        """Wait for the copies, not for the work after them; release each source.

        Raises:
            RuntimeError: The device failed; sources it may still read are kept.
        """
        while self._pending:
            event, _ = self._pending[0]
            event.synchronize()
            del self._pending[0]


class TorchDevice:
    """A torch device, on its current stream.

    Args:
        device: The device. On the CPU a "copy" is a view of the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, source: np.ndarray) -> torch.Tensor:
        """Start a copy; asynchronous if the source is pinned."""
        import torch

        with warnings.catch_warnings():
            # Torch warns about read-only sources; the model only reads them.
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch.from_numpy(source)
        return tensor.to(self._device, non_blocking=True)

    def record_event(self) -> CopyEvent:
        """Return an event after all work started on the current stream."""
        import torch

        if self._device.type != "cuda":
            return _CompletedEvent()
        event: CopyEvent = torch.cuda.current_stream(self._device).record_event()
        return event


class _CompletedEvent:
    def synchronize(self) -> None:
        """Return at once."""


def small_tensor(values: Sequence[Any], device: torch.device, dtype: Any = None) -> Any:
    """Return a small tensor on the device without waiting for the device's work.

    A copy from pageable memory waits for all work before it. Torch does not reuse
    pinned memory before the copy from it is done.

    Args:
        values: Numbers of one type, or sequences of them.
        device: The destination.
        dtype: The default is that of the values.
    """
    import torch

    pinned = device.type == "cuda"
    tensor = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return tensor.to(device, non_blocking=True)


def pin(arena: ArenaView) -> bool:
    """Pin an arena so that the current CUDA device reads it by DMA.

    Pinning allocates all pages of the arena and keeps them in memory. Without it
    copies are slower and synchronous; nothing else changes. Call `unpin` before the
    arena is unmapped, unless the process ends with it: the driver would treat the next
    mapping at that address as the same memory.

    Returns:
        False if the driver refused.
    """
    import torch

    code = torch.cuda.cudart().cudaHostRegister(arena.address, arena.size, 0)
    if int(code) == 0:
        return True
    # Clears the error, which the next kernel would report as its own.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").item()
    return False


def unpin(arena: ArenaView) -> None:
    """Undo `pin`; no copy from the arena may be in flight."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(arena.address)


@contextlib.contextmanager
def detect_device_loss(device: torch.device) -> Iterator[None]:
    """Turn a CUDA error that persists into `DeviceLost`; let other errors through.

    Raises:
        DeviceLost: A CUDA error after which every further call fails as well.
    """
    try:
        yield
    except RuntimeError as error:
        if _is_lost(device, error):
            raise DeviceLost("a CUDA error that stays; the process must end") from None
        raise


def _is_lost(device: torch.device, error: RuntimeError) -> bool:
    import torch

    if device.type != "cuda" or isinstance(error, torch.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return False  # out of memory, which libraries report in words of their own
    except RuntimeError:
        return True
    return False
