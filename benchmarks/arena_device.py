"""Copies from the arena to a device, with and without pinning."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import numpy as np
    import torch

MIB = 2**20
SIZE = 32 * MIB
Row = tuple[str, str]


@dataclass(frozen=True)
class Shared:
    """Shared memory as an engine maps it, without the link."""

    mapping: mmap.mmap
    array: np.ndarray

    @classmethod
    def make(cls, size: int) -> Shared:
        """Map new memory."""
        import numpy as np

        descriptor = os.memfd_create("arena")
        os.ftruncate(descriptor, size)
        mapping = mmap.mmap(descriptor, size)
        os.close(descriptor)
        return cls(mapping, np.frombuffer(mapping, np.uint8))

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.mapping)

    @property
    def address(self) -> int:
        """Address of the mapping."""
        return int(self.array.ctypes.data)


def arena(name: str) -> tuple[dict[str, Any], list[Row]]:
    """Copy 32 MiB from ordinary memory and from the arena, each to the device."""
    import numpy as np
    import torch

    from lifecycle_engine.model.device_copies import pin, unpin

    device = torch.device(name)
    cuda = device.type == "cuda"
    shared = Shared.make(2 * SIZE)
    begin = time.perf_counter()
    pinned = cuda and pin(cast("Any", shared))
    seconds = time.perf_counter() - begin
    figures: dict[str, Any] = {"pinned": pinned, "pin_seconds": seconds}
    rows = [("arena pinned", f"{pinned}, {seconds * 1e3:.1f} ms for 64 MiB")]
    sources = {
        "ordinary memory": np.ones(SIZE, np.uint8),
        "the arena": shared.array[:SIZE],
    }
    for where, source in sources.items():
        called, done, whole = _copy(device, source)
        figures[where] = {"call_ms": called, "done_ms": done, "identical": whole}
        latency = f"call {called:.2f} ms, done {done:.2f} ms"
        same = "identical" if whole else "DIFFERENT"
        rows.append((f"32 MiB from {where}", f"{latency}, {same}"))
    if pinned:
        unpin(cast("Any", shared))
    return figures, rows


def _copy(device: torch.device, source: np.ndarray) -> tuple[float, float, bool]:
    """Return milliseconds until the call returns and until the copy is done."""
    from lifecycle_engine.model.device_copies import PendingCopies, TorchDevice

    copies = PendingCopies(TorchDevice(device))
    called, done, whole = [], [], True
    for number in range(12):
        source[:] = number
        begin = time.perf_counter()
        copy = copies.start(source)
        called.append(time.perf_counter() - begin)
        copies.wait()
        done.append(time.perf_counter() - begin)
        if device.type == "cuda":
            # Freed memory may be overwritten at once without affecting the copy.
            source[:] = 255
        whole = whole and bool((copy == number).all())
    return statistics.median(called) * 1e3, statistics.median(done) * 1e3, whole
