"""Telling a device that is gone from an error that the next call survives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lifecycle_engine.runner import DeviceLost


@contextmanager
def told_if_lost(device: torch.device) -> Iterator[None]:
    """Turn an error that stays into `DeviceLost`; let every other one pass.

    Raises:
        DeviceLost: A CUDA error after which every further call fails as well.
    """
    try:
        yield
    except RuntimeError as error:
        if _lost(device, error):
            raise DeviceLost("a CUDA error that stays; the process must end") from None
        raise


def _lost(device: torch.device, error: RuntimeError) -> bool:
    if device.type != "cuda" or isinstance(error, torch.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return False  # full, as the first error may have said in a library's words
    except RuntimeError:
        return True
    return False
