"""Decode steps: eager, or of fixed shapes that are captured as CUDA graphs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
        tokens: The last generated token, and drafts of those that follow.
        length: Filled KV positions.
        delta: Offset of its rotary position from `length`.
    """

    row: int
    tokens: Sequence[int]
    length: int
    delta: int


class Drafts:
    """Makes drafts for the requests in a runner's slots; this base makes none.

    Attributes:
        tokens: Maximum number of drafts in a step.
    """

    tokens = 0

    def truncate(self, slot: int, length: int) -> None:
        """Discard a slot's tokens from *length* on; 0 is a new request."""

    def extend(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Read chunks of prompts, of which *texts* are the tokens so far."""

    def propose(
        self, slots: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return drafts for each slot, whose tokens so far are its text."""
        del texts
        return [[] for _ in slots]

    def free(self, slot: int) -> None:
        """Discard a slot's request; an empty slot is a no-op."""
        self.truncate(slot, 0)

    def capture(self) -> None:
        """Capture graphs of all shapes, where steps run as graphs."""


class StepShape(NamedTuple):
    """The shape of a step.

    Attributes:
        width: Number of lanes.
        tokens: Tokens of each lane.
        stop: Attention reads the positions ``0 .. stop - 1``.
    """

    width: int
    tokens: int
    stop: int


class StepInputs:
    """The input tensors of a step of one shape, on the device.

    Attributes:
        ids, rows, positions, rotary: ``(width, tokens)``; see
            `kv_cache.BatchWindow`.
        table: These four, ``(4, width, tokens)``.
        mask: ``(width, 1, tokens, stop)``, the positions that each token attends to.
    """

    def __init__(
        self, shape: StepShape, *, reserved: int, device: torch.device
    ) -> None:
        width, tokens, self.stop = shape
        self._reserved = reserved
        self.table = torch.empty((4, width, tokens), dtype=torch.long, device=device)
        self._seen = torch.arange(self.stop, device=device)
        mask = (width, 1, tokens, self.stop)
        self.mask = torch.empty(mask, dtype=torch.bool, device=device)
        self.ids, self.rows, self.positions, self.rotary = self.table
        self.fill(())

    def fill(self, lanes: Sequence[Lane]) -> None:
        """Write the lanes; all other tokens become padding on the reserved row."""
        columns = [(0, self._reserved, 0, 0)] * self.ids.numel()
        for lane in lanes:
            first = lane.row * self.ids.shape[1]
            for at, token in enumerate(lane.tokens):
                position = lane.length + at
                rotary = position + lane.delta
                columns[first + at] = (token, lane.row, position, rotary)
        self.load(list(zip(*columns, strict=True)))

    def load(self, table: Sequence[Sequence[int]]) -> None:
        """Write the four rows of `table`, each with the tokens of all lanes."""
        numbers = small_tensor(table, self.table.device).view_as(self.table)
        self.table.copy_(numbers, non_blocking=True)
        torch.le(self._seen, self.positions[..., None], out=self.mask[:, 0])


# Runs a step; returns the logits ``(width, tokens, vocab)``.
Forward = Callable[[StepInputs], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How the steps of a model run, and those of its drafts.

    Attributes:
        graphs: See `TransformersRunner`.
        slots, max_batch, widths: See `FixedShapeSteps`.
    """

    graphs: GraphMode
    slots: int
    max_batch: int | None = None
    widths: Sequence[int] = ()


class EagerSteps:
    """Runs each step with inputs of its own shape."""

    def __init__(self, forward: Forward, *, slots: int, device: torch.device) -> None:
        self._forward, self._slots, self._device = forward, slots, device

    def width(self, lanes: int) -> int:
        """Return the width that a batch of that many lanes runs with."""
        return lanes

    def run(self, lanes: Sequence[Lane], width: int) -> torch.Tensor:
        """Return the logits ``(width, tokens, vocab)`` of a step."""
        shape = StepShape(width, *_extent(lanes))
        inputs = StepInputs(shape, reserved=self._slots, device=self._device)
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
        tokens: Maximum number of tokens of a lane.
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
        tokens: int = 1,
        capture: bool,
    ) -> None:
        max_batch = self._max_batch = min(max_batch or slots, slots)
        chosen = {width for width in widths if 0 < width < max_batch}
        self._widths: list[int] = sorted(
            {*(chosen or _powers_of_two(1, max_batch)), max_batch, slots}
        )
        self._tokens = sorted({1, tokens})
        self._stops = [*_powers_of_two(_SHORTEST, max_length), max_length]
        self._forward, self._slots, self._device = forward, slots, device
        self._capture = capture
        self._shapes: dict[StepShape, _PreparedStep] = {}
        self._logits: torch.Tensor | None = None
        self._recording: tuple[Any, Any] | None = None
        self.captured = 0

    @property
    def shapes(self) -> list[StepShape]:
        """Every shape that a step can have."""
        sizes = itertools.product(self._widths, self._tokens, self._stops)
        return [StepShape(*size) for size in sizes]

    def width(self, lanes: int) -> int:
        """Return the width that a batch of that many lanes runs with."""
        return next(width for width in self._widths if width >= lanes)

    def run(self, lanes: Sequence[Lane], width: int) -> torch.Tensor:
        """Return the logits ``(width, tokens, vocab)``, valid until the next step."""
        tokens, stop = _extent(lanes)
        tokens = next(each for each in self._tokens if each >= tokens)
        stop = next(each for each in self._stops if each >= stop)
        shape = StepShape(width, tokens, stop)
        if shape not in self._shapes:
            self._shapes[shape] = self._prepare(shape)
        prepared = self._shapes[shape]
        prepared.inputs.fill(lanes)
        return prepared.replay()

    def prepare(self) -> None:
        """Prepare the shapes of all batches now, so that no request waits for one.

        Shapes wider than *max_batch* are left out: with more slots than running
        requests, as for cached conversations, they would never run.
        """
        # Largest first: the smaller shapes then fit into its memory.
        for shape in reversed(self.shapes):
            if shape.width <= self._max_batch and shape not in self._shapes:
                self._shapes[shape] = self._prepare(shape)

    def _prepare(self, shape: StepShape) -> _PreparedStep:
        # All lanes are padding: recording must not write to a request's row.
        inputs = StepInputs(shape, reserved=self._slots, device=self._device)
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
                    shape.width,
                    shape.stop,
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
            most = (self._slots, self._tokens[-1], logits.shape[2])
            self._logits = logits.new_empty(most)
        return self._logits[: logits.shape[0], : logits.shape[1]].copy_(logits)

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


def _extent(lanes: Sequence[Lane]) -> tuple[int, int]:
    """Return the tokens of the longest lane, and where the last position ends."""
    return (
        max(len(lane.tokens) for lane in lanes),
        max(lane.length + len(lane.tokens) for lane in lanes),
    )


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


def make_steps(
    forward: Forward, options: StepOptions, *, device: torch.device, **sizes: int
) -> EagerSteps | FixedShapeSteps:
    """Make what runs steps; *sizes* are ``max_length`` and ``tokens`` of fixed ones."""
    if options.graphs == "off":
        return EagerSteps(forward, slots=options.slots, device=device)
    return FixedShapeSteps(
        forward,
        slots=options.slots,
        max_batch=options.max_batch,
        widths=options.widths,
        capture=options.graphs == "on",
        device=device,
        **sizes,
    )
