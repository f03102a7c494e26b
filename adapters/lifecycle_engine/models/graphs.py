"""Decode steps of fixed shapes, captured as CUDA graphs where there is CUDA.

A graph replays kernels on the memory that it was captured with, so a step of a
given shape has inputs of its own that are filled before each replay. A batch is
padded up to the next shape; its padded lanes write to the reserved row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .uploads import small

GraphMode = Literal["off", "fake", "on"]
# Fewer positions than this are not worth a graph of their own.
_SHORTEST = 256
# Kernels are chosen and workspaces made by the first steps of a shape.
_WARM_UPS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lane:
    """What one step needs of one request.

    Attributes:
        row: Of the cache, which is also its place in the batch.
        token: The last one drawn.
        length: Positions filled.
        delta: How far its rotary position is from `length`.
    """

    row: int
    token: int
    length: int
    delta: int


class Inputs:
    """The inputs of a step of one shape, on the device.

    Attributes:
        ids, rows, positions, rotary: ``(width,)``; see `kv.Step`.
        mask: ``(width, 1, 1, stop)``, which positions each lane sees.
    """

    __slots__ = (
        "_reserved",
        "_seen",
        "_table",
        "ids",
        "mask",
        "positions",
        "rotary",
        "rows",
        "stop",
    )

    def __init__(
        self, width: int, stop: int, *, reserved: int, device: torch.device
    ) -> None:
        self.stop = stop
        self._reserved = reserved
        self._table = torch.empty((4, width), dtype=torch.long, device=device)
        self._seen = torch.arange(stop, device=device)
        self.mask = torch.empty((width, 1, 1, stop), dtype=torch.bool, device=device)
        self.ids, self.rows, self.positions, self.rotary = self._table
        self.fill(())

    def fill(self, lanes: Sequence[Lane]) -> None:
        """Write the lanes in; every other one is padding on the reserved row."""
        columns = [(0, self._reserved, 0, 0)] * self.ids.shape[0]
        for lane in lanes:
            rotary = lane.length + lane.delta
            columns[lane.row] = (lane.token, lane.row, lane.length, rotary)
        table = list(zip(*columns, strict=True))
        self._table.copy_(small(table, self._table.device), non_blocking=True)
        torch.le(self._seen, self.positions[:, None], out=self.mask[:, 0, 0])


Forward = Callable[[Inputs], torch.Tensor]


class Eager:
    """Runs each step as it comes; nothing is fixed and nothing kept."""

    def __init__(self, forward: Forward, *, slots: int, device: torch.device) -> None:
        self._forward, self._slots, self._device = forward, slots, device

    def width(self, lanes: int) -> int:
        """Lanes that a batch of so many is run with."""
        return lanes

    def run(self, lanes: Sequence[Lane], width: int) -> torch.Tensor:
        """Return the logits ``(width, vocab)`` of a step."""
        stop = max(lane.length for lane in lanes) + 1
        inputs = Inputs(width, stop, reserved=self._slots, device=self._device)
        inputs.fill(lanes)
        return self._forward(inputs)


class Fixed:
    """Runs steps of a few shapes, each with inputs and a graph of its own.

    Args:
        forward: One step; it may read nothing from the device.
        slots: Rows that requests can hold, and so the number of the reserved one.
        max_length: Positions of a row.
        widest: The largest batch that is made ready for; ``None`` is all slots. One
            that is wider runs all the same, in a shape that is made when it comes.
        widths: Batch sizes; none are the powers of two up to *widest*.
        capture: Record the kernels of each shape once; without it each step runs
            the same shapes through the same memory. If the device refuses to, it is
            logged and the rest goes on without.

    Attributes:
        captured: Shapes that are replayed as a graph.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        slots: int,
        max_length: int,
        device: torch.device,
        widest: int | None = None,
        widths: Sequence[int] = (),
        capture: bool,
    ) -> None:
        widest = self._widest = min(widest or slots, slots)
        chosen = {width for width in widths if 0 < width < widest}
        self._widths: list[int] = sorted(
            {*(chosen or _powers(1, widest)), widest, slots}
        )
        self._stops = [*_powers(_SHORTEST, max_length), max_length]
        self._forward, self._slots, self._device = forward, slots, device
        self._capture = capture
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._logits: torch.Tensor | None = None
        self._recording: tuple[Any, Any] | None = None
        self.captured = 0

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Every ``(width, stop)`` that a step can have."""
        return [(width, stop) for width in self._widths for stop in self._stops]

    def width(self, lanes: int) -> int:
        """Lanes that a batch of so many is run with."""
        return next(width for width in self._widths if width >= lanes)

    def run(self, lanes: Sequence[Lane], width: int) -> torch.Tensor:
        """Return the logits ``(width, vocab)`` of a step, valid until the next."""
        needed = max(lane.length for lane in lanes) + 1
        stop = next(stop for stop in self._stops if stop >= needed)
        shape = self._shapes.get((width, stop))
        if shape is None:
            shape = self._shapes[width, stop] = self._make(width, stop)
        shape.inputs.fill(lanes)
        return shape.replay()

    def prepare(self) -> None:
        """Make the shapes of every batch now, so that no request waits for it later.

        With more slots than requests in a step, as for conversations that rest, the
        wider shapes would take as much memory as time, and never be run.
        """
        # The largest first: the smaller ones then fit into its memory.
        for width, stop in reversed(self.shapes):
            if width <= self._widest and (width, stop) not in self._shapes:
                self._shapes[width, stop] = self._make(width, stop)

    def _make(self, width: int, stop: int) -> _Shape:
        # All of it padding: recording a step must not write to anybody's row.
        inputs = Inputs(width, stop, reserved=self._slots, device=self._device)
        if self._capture:
            try:
                return self._record(inputs)
            except RuntimeError as error:
                # What one shape refuses the next would, too: memory, or a kernel.
                self._capture = False
                _log.warning(
                    "a step of %d lanes over %d positions cannot be captured: %s: %s; "
                    "steps run without CUDA graphs from here on, and so slower",
                    width,
                    stop,
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
        self._step(inputs)
        return _Shape(inputs, lambda: self._step(inputs))

    def _step(self, inputs: Inputs) -> torch.Tensor:
        """Run a step into the memory that the logits of all shapes share.

        Left where each graph made them, those of every shape would stay allocated.
        """
        made = self._forward(inputs)
        if self._logits is None:
            self._logits = made.new_empty((self._slots, made.shape[1]))
        return self._logits[: made.shape[0]].copy_(made)

    def _record(self, inputs: Inputs) -> _Shape:
        if self._recording is None:
            self._recording = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # One stream for all of it: what libraries set aside for a stream is made by
        # the first step on it, and not once more inside of each graph.
        pool, side = self._recording
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:  # both are left also by a capture that fails
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self._step(inputs)
                # Only what this thread does is recorded, so only that can spoil it.
                with torch.cuda.graph(
                    graph, pool=pool, stream=side, capture_error_mode="thread_local"
                ):
                    output = self._step(inputs)
        finally:
            current.wait_stream(side)
        self.captured += 1

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return _Shape(inputs, replay)


@dataclass(frozen=True, slots=True)
class _Shape:
    """One shape's inputs, and a function that runs it on them."""

    inputs: Inputs
    replay: Callable[[], torch.Tensor]


def _powers(start: int, below: int) -> list[int]:
    powers = []
    while start < below:
        powers.append(start)
        start *= 2
    return powers
