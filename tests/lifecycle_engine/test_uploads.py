"""Copies to a device: what it still reads is held, in the order of its stream."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lifecycle_engine.models.uploads import TorchDevice, Uploads, pin, small, unpin
from lifecycle_zmq import Arena, ArenaView
from lifecycle_zmq.protocol.wire import Place


class Stream:
    """A device that does nothing by itself: a test says how far it has come."""

    def __init__(self) -> None:
        self.begun = 0
        self.done = 0
        self.waited: list[int] = []
        self.broken = False

    def copy(self, source: np.ndarray) -> int:
        """Begin."""
        self.begun += 1
        return self.begun

    def mark(self) -> Any:
        """Return a mark behind what was begun."""
        return Mark(self, self.begun)


class Mark:
    """Waiting for it is what makes the stream get there."""

    def __init__(self, stream: Stream, at: int) -> None:
        self.stream, self.at = stream, at

    def synchronize(self) -> None:
        """Get there."""
        if self.stream.broken:
            raise RuntimeError("the device is gone")
        self.stream.waited.append(self.at)
        self.stream.done = self.at


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nothing here may need the collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def lent() -> Iterator[tuple[ArenaView, list[np.ndarray]]]:
    """Three tensors of an arena as an engine has them, each a loan of its own."""
    arena = Arena(2**20, kind="memfd")
    assert arena.descriptor is not None
    view = ArenaView(os.dup(arena.descriptor))
    tensors: list[np.ndarray] = []
    for number in range(3):
        found: dict[str, Any] = {"x": Place(number * 4096, "f", [4, 8])}
        view.lodge((b"", number), found)
        tensors.append(np.asarray(found.pop("x")))
    yield view, tensors
    arena.close()


def test_memory_is_held_until_its_copy_is_done(
    lent: tuple[ArenaView, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loan ends when the stream is past the copy, not when it was begun (`peers-68`)."""
    view, tensors = lent
    stream = Stream()
    uploads = Uploads(stream)
    copies = [uploads.begin(tensor) for tensor in tensors]
    tensors.clear()
    del tensors
    assert copies == [1, 2, 3]
    assert view.ended() == []
    ended: list[int] = []
    synchronize = Mark.synchronize

    def look(mark: Mark) -> None:
        ended.extend(number for _, number in view.ended())
        # What comes later in the stream is not let go of before.
        assert ended == list(range(mark.at - 1))
        synchronize(mark)

    monkeypatch.setattr(Mark, "synchronize", look)
    uploads.finish()
    assert stream.waited == [1, 2, 3]
    assert view.ended() == [(b"", 2)]
    assert view.loans == 0
    uploads.finish()
    assert stream.waited == [1, 2, 3]


def test_memory_is_held_when_the_device_fails(
    lent: tuple[ArenaView, list[np.ndarray]],
) -> None:
    """Nobody knows what a broken device still reads."""
    view, tensors = lent
    stream = Stream()
    uploads = Uploads(stream)
    for tensor in tensors:
        uploads.begin(tensor)
    tensors.clear()
    del tensor
    stream.broken = True
    with pytest.raises(RuntimeError):
        uploads.finish()
    assert view.ended() == []
    assert view.loans == 3


def test_cpu_looks_at_the_same_memory() -> None:
    """On a CPU there is no copy, and the tensor keeps the memory by itself."""
    torch = pytest.importorskip("torch")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    watch = weakref.ref(array)
    uploads = Uploads(TorchDevice(torch.device("cpu")))
    tensor = uploads.begin(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == array.tolist()
    uploads.finish()
    del array
    assert watch() is not None
    del tensor
    assert watch() is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_small_tensor_waits_for_nothing_on_its_way(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Pinned where there is a device, which then copies it in its own time."""
    torch = pytest.importorskip("torch")
    asked: list[Any] = []

    class Made:
        """A tensor, as far as it is asked."""

        def to(self, device: Any, *, non_blocking: bool) -> Any:
            asked.append((device.type, non_blocking))
            return self

    def make(values: Any, *, dtype: Any, pin_memory: bool) -> Made:
        asked.append((values, dtype, pin_memory))
        return Made()

    monkeypatch.setattr(torch, "tensor", make)
    small([1, 2], torch.device(kind), torch.float64)
    assert asked == [([1, 2], torch.float64, kind == "cuda"), (kind, True)]


@pytest.mark.parametrize("refused", [False, True])
def test_pinned_arena_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """By the address that it was pinned at; a refusal is cleared and told."""
    torch = pytest.importorskip("torch")
    calls: list[Any] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("register", address, size, flags))
        return 712 if refused else 0

    def unregister(address: int) -> int:
        calls.append(("unregister", address))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def probe(*_: Any, **options: Any) -> Any:
        calls.append(("probe", options["device"]))
        raise RuntimeError("CUDA error: part or all of the memory is mapped already")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", probe)
    arena: Any = SimpleNamespace(address=4096, size=8192)
    assert pin(arena) is not refused
    unpin(arena)
    cleared = [("probe", "cuda")] if refused else []
    first = ("register", 4096, 8192, 0)
    assert calls == [first, *cleared, ("unregister", 4096)]
