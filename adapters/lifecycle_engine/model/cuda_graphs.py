"""Decode steps: eager, or of fixed shapes that are captured as CUDA graphs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lifecycle_engine.model.device_copies import small_tensor

GraphMode = Literal["off", "fake", "on"]
# Shorter sequences share the graph of this length.
_SHORTEST = 256
# The first steps of a shape choose kernels and allocate workspaces.
_WARM_UPS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lane:
    """One request's inputs to a decode step.

    Attributes:
        row: Its row of the KV cache, which is also its index in the batch.
        token: The last generated token.
        length: Filled KV positions.
        delta: Offset of its rotary position from `length`.
    """

    row: int
    token: int
    length: int
    delta: int


class StepInputs:
    """The input tensors of a step of one shape, on the device.

    Attributes:
        ids, rows, positions, rotary: ``(width,)``; see `kv_cache.DecodeWindow`.
        table: These four, ``(4, width)``.
        mask: ``(width, 1, 1, stop)``, the positions that each lane attends to.
    """

    __slots__ = (
        "_reserved",
        "_seen",
        "ids",
        "mask",
        "positions",
        "rotary",
        "rows",
        "stop",
        "table",
    )

    def __init__(
        self, width: int, stop: int, *, reserved: int, device: torch.device
    ) -> None:
        self.stop = stop
        self._reserved = reserved
        self.table = torch.empty((4, width), dtype=torch.long, device=device)
        self._seen = torch.arange(stop, device=device)
        self.mask = torch.empty((width, 1, 1, stop), dtype=torch.bool, device=device)
        self.ids, self.rows, self.positions, self.rotary = self.table
        self.fill(())

    def fill(self, lanes: Sequence[Lane]) -> None:
        """Write the lanes; all others become padding on the reserved row."""
        columns = [(0, self._reserved, 0, 0)] * self.ids.shape[0]
        for lane in lanes:
            rotary = lane.length + lane.delta
            columns[lane.row] = (lane.token, lane.row, lane.length, rotary)
        self.load(list(zip(*columns, strict=True)))

    def load(self, table: Sequence[Sequence[int]]) -> None:
        """Write the four rows of `table`."""
        self.table.copy_(small_tensor(table, self.table.device), non_blocking=True)
        torch.le(self._seen, self.positions[:, None], out=self.mask[:, 0, 0])


Forward = Callable[[StepInputs], torch.Tensor]


class EagerSteps:
    """Runs each step with inputs of its own shape."""

    def __init__(self, forward: Forward, *, slots: int, device: torch.device) -> None:
        self._forward, self._slots, self._device = forward, slots, device

    def width(self, lanes: int) -> int:
        """Return the width that a batch of that many lanes runs with."""
        return lanes

    def run(self, lanes: Sequence[Lane], width: int) -> torch.Tensor:
        """Return the logits ``(width, vocab)`` of a step."""
        stop = max(lane.length for lane in lanes) + 1
        inputs = StepInputs(width, stop, reserved=self._slots, device=self._device)
        inputs.fill(lanes)
        return self._forward(inputs)


class FixedShapeSteps:
    """Runs steps of a few shapes, each with inputs and a CUDA graph of its own.

    Args:
        forward: Runs one step; it must not synchronise with the device.
        slots: Rows that requests can hold; the reserved row has this index.
        max_length: Positions of a row.
        max_batch: Largest batch to prepare for; ``None`` is all slots. The shape of a
            wider batch is prepared when one first runs.
        widths: Batch sizes; empty for the powers of two up to *max_batch*.
        capture: Record each shape as a CUDA graph. Without it the same shapes run in
            the same memory. If a capture fails, a warning is logged and the remaining
            shapes run without graphs.

    Attributes:
        captured: Number of shapes that are replayed as a graph.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        slots: int,
        max_length: int,
        device: torch.device,
        max_batch: int | None = None,
        widths: Sequence[int] = (),
        capture: bool,
    ) -> None:
        max_batch = self._max_batch = min(max_batch or slots, slots)
        chosen = {width for width in widths if 0 < width < max_batch}
        self._widths: list[int] = sorted(
            {*(chosen or _powers_of_two(1, max_batch)), max_batch, slots}
        )
        self._stops = [*_powers_of_two(_SHORTEST, max_length), max_length]
        self._forward, self._slots, self._device = forward, slots, device
        self._capture = capture
        self._shapes: dict[tuple[int, int], _PreparedStep] = {}
        self._logits: torch.Tensor | None = None
        self._recording: tuple[Any, Any] | None = None
        self.captured = 0

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Every ``(width, stop)`` that a step can have."""
        return [(width, stop) for width in self._widths for stop in self._stops]

    def width(self, lanes: int) -> int:
        """Return the width that a batch of that many lanes runs with."""
        return next(width for width in self._widths if width >= lanes)

    def run(self, lanes: Sequence[Lane], width: int) -> torch.Tensor:
        """Return the logits ``(width, vocab)`` of a step, valid until the next."""
        needed = max(lane.length for lane in lanes) + 1
        stop = next(stop for stop in self._stops if stop >= needed)
        shape = self._shapes.get((width, stop))
        if shape is None:
            shape = self._shapes[width, stop] = self._prepare(width, stop)
        shape.inputs.fill(lanes)
        return shape.replay()

    def prepare(self) -> None:
        """Prepare the shapes of all batches now, so that no request waits for one.

        Shapes wider than *max_batch* are left out: with more slots than running
        requests, as for cached conversations, they would never run.
        """
        # Largest first: the smaller shapes then fit into its memory.
        for width, stop in reversed(self.shapes):
            if width <= self._max_batch and (width, stop) not in self._shapes:
                self._shapes[width, stop] = self._prepare(width, stop)

    def _prepare(self, width: int, stop: int) -> _PreparedStep:
        # All lanes are padding: recording must not write to a request's row.
        inputs = StepInputs(width, stop, reserved=self._slots, device=self._device)
        if self._capture:
            try:
                return self._record(inputs)
            except RuntimeError as error:
                # Later shapes would fail for the same reason: memory, or a kernel.
                self._capture = False
                _log.warning(
                    "cannot capture a step of %d lanes and %d positions: %s: %s; "
                    "further shapes run without CUDA graphs, which is slower; "
                    "--graphs off captures none",
                    width,
                    stop,
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
        self._step(inputs)
        return _PreparedStep(inputs, lambda: self._step(inputs))

    def _step(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step and copy its logits into the buffer that all shapes share.

        Otherwise the logits of every captured shape would stay allocated.
        """
        logits = self._forward(inputs)
        if self._logits is None:
            self._logits = logits.new_empty((self._slots, logits.shape[1]))
        return self._logits[: logits.shape[0]].copy_(logits)

    def _record(self, inputs: StepInputs) -> _PreparedStep:
        if self._recording is None:
            self._recording = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # One stream for all captures: libraries allocate their workspace for a stream
        # once, in its first step, and not again inside each graph.
        pool, side = self._recording
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:  # a failed capture leaves both contexts, too
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self._step(inputs)
                # Only this thread's calls are recorded, so only they can break it.
                with torch.cuda.graph(
                    graph, pool=pool, stream=side, capture_error_mode="thread_local"
                ):
                    output = self._step(inputs)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # the first error says more
                _abandon(pool, self._device)
            raise
        finally:
            current.wait_stream(side)
        self.captured += 1

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return _PreparedStep(inputs, replay)


@dataclass(frozen=True, slots=True)
class _PreparedStep:
    """The inputs of one shape, and a function that runs the step on them."""

    inputs: StepInputs
    replay: Callable[[], torch.Tensor]


def _abandon(pool: Any, device: torch.device) -> None:
    """End a capture that failed, as far as torch has not.

    torch 2.11 leaves it open: no memory goes back to the device any more, a block that
    two streams used is never used again, and no random number can be drawn.
    """
    index = device.index or 0
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001  no public name
        torch._C._cuda_releasePool(index, pool)  # noqa: SLF001
    torch.cuda.empty_cache()
    # The generator of random numbers leaves the broken capture with a sound one.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


def _powers_of_two(start: int, below: int) -> list[int]:
    powers = []
    while start < below:
        powers.append(start)
        start *= 2
    return powers
