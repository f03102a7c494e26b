from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from lifecycle_engine.models.checkpoint import FAMILIES, build  # noqa: E402
from lifecycle_engine.models.graphs import Fixed, Inputs, Lane  # noqa: E402
from lifecycle_engine.models.loading import load_model  # noqa: E402
from lifecycle_engine.models.transformers_runner import TransformersRunner  # noqa: E402
from lifecycle_engine.runner import Prompt  # noqa: E402
from lifecycle_engine.scheduler import Scheduler  # noqa: E402

CPU = torch.device("cpu")


class Forward:
    """A step whose logits show its inputs, and which notes their shapes and place."""

    def __init__(self) -> None:
        self.seen: list[Inputs] = []

    def __call__(self, inputs: Inputs) -> Any:
        self.seen.append(inputs)
        columns = (inputs.ids, inputs.rows, inputs.positions, inputs.rotary)
        visible = inputs.mask[:, 0, 0].sum(-1)
        return torch.stack([*columns, visible], dim=1).float()


def fixed(forward: Forward, **options: Any) -> Fixed:
    """Steps of fixed shapes, walked without capture."""
    options = {"slots": 6, "max_length": 1000, "capture": False} | options
    return Fixed(forward, device=CPU, **options)


def test_batch_is_padded_up_to_its_bucket() -> None:
    """Padded lanes write to the reserved row at position 0 and see nothing else."""
    steps = fixed(Forward())
    width = steps.width(3)
    lanes = [Lane(0, 7, 10, -3), Lane(2, 8, 300, 0)]
    logits = steps.run(lanes, width)
    assert logits.tolist() == [
        [7, 0, 10, 7, 11],
        [0, 6, 0, 0, 1],
        [8, 2, 300, 300, 301],
        [0, 6, 0, 0, 1],
    ]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((), [1, 2, 4, 4, 6, 6]),
        ((3,), [3, 3, 3, 6, 6, 6]),
        ((99, 0), [1, 2, 4, 4, 6, 6]),
    ],
)
def test_bucket_is_the_smallest_that_fits(
    widths: tuple[int, ...], expected: list[int]
) -> None:
    """Every batch up to the slots has a bucket, and none is larger than the slots."""
    steps = fixed(Forward(), widths=widths)
    assert [steps.width(lanes) for lanes in range(1, 7)] == expected


def test_shape_keeps_its_memory() -> None:
    """A step of a shape that ran before runs in the same inputs and output."""
    forward = Forward()
    steps = fixed(forward)
    first = steps.run([Lane(0, 1, 5, 0)], 1)
    second = steps.run([Lane(0, 2, 6, 0)], 1)
    assert first.data_ptr() == second.data_ptr()
    assert second.tolist() == [[2, 0, 6, 6, 7]]
    assert len({id(inputs) for inputs in forward.seen}) == 1
    steps.run([Lane(0, 2, 400, 0)], 1)
    assert len({id(inputs) for inputs in forward.seen}) == 2


def test_recording_touches_the_reserved_row_only() -> None:
    """What runs while a shape is made is padding in every lane."""
    rows: list[Any] = []

    def forward(inputs: Inputs) -> Any:
        rows.append(inputs.rows.tolist())
        return torch.zeros(len(inputs.rows), 2)

    steps = Fixed(forward, slots=4, max_length=600, device=CPU, capture=False)
    steps.prepare()
    assert len(rows) == len(steps.shapes) == 3 * 3
    assert {row for each in rows for row in each} == {4}
    steps.prepare()
    assert len(rows) == 9


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_graphs_on_or_off_draw_the_same_tokens(
    model: Any, prepared: list[Any], expected: list[Any], count: int
) -> None:
    """The shapes of a step change nothing about what it draws."""
    for graphs in ("off", "fake"):
        runner = TransformersRunner(model, slots=8, max_length=512, graphs=graphs)
        scheduler = Scheduler(runner, chunk=9)
        got: dict[str, list[int]] = {}
        for index in range(count):
            request = prepared[index].request | {"max_tokens": 24}
            scheduler.start(str(index), request, dict(prepared[index].tensors))
        while scheduler.busy:
            for output in scheduler.step():
                tokens = [
                    t for item in output.items if type(item) is list for t in item
                ]
                got.setdefault(output.key, []).extend(tokens)
        assert [got[str(index)] for index in range(count)] == expected[:count]


def test_rows_of_a_batch_are_packed_when_one_leaves(
    model: Any, prepared: list[Any], expected: list[Any]
) -> None:
    """The last one running is run alone, wherever it sat, and goes on as before."""
    runner = TransformersRunner(model, slots=4, max_length=512, graphs="fake")
    for slot in range(4):
        ids = prepared[slot].request["input_ids"]
        prompt = Prompt(ids, dict(prepared[slot].tensors))
        runner.prefill(slot, prompt, 0, len(ids))
    runner.decode([0, 1, 2, 3])
    for slot in (0, 1, 2):
        runner.free(slot)
    tokens = []
    while len(tokens) < 22:
        tokens += [emitted.token for emitted in runner.decode([3])]
    assert tokens == expected[3][2:]
    keys = runner.cache.layers[0].keys
    assert keys[0].any()
    assert not keys[1:4].any()
    runner.free(3)
    assert not any(layer.keys[:4].any() for layer in runner.cache.layers)


def test_row_of_a_prompt_in_prefill_is_left_alone(
    model: Any, prepared: list[Any], expected: list[Any], generate: Callable[..., Any]
) -> None:
    """Neither packing nor padding touches a row whose prompt is half read."""
    runner = TransformersRunner(model, slots=4, max_length=512, graphs="fake")
    prompts = [
        Prompt(prepared[index].request["input_ids"], dict(prepared[index].tensors))
        for index in (0, 4, 1)
    ]
    lengths = [len(prompt.input_ids) for prompt in prompts]
    runner.prefill(0, prompts[0], 0, lengths[0])
    runner.prefill(1, prompts[1], 0, 20)
    first = runner.prefill(2, prompts[2], 0, lengths[2])
    runner.free(0)
    tokens = [first.token]
    for _ in range(5):
        tokens += [emitted.token for emitted in runner.decode([2])]
    middle = runner.prefill(1, prompts[1], 20, lengths[1])
    both = [[middle.token], tokens]
    while len(both[0]) < 18:
        for stream, emitted in zip(both, runner.decode([1, 2]), strict=True):
            stream.append(emitted.token)
    assert both[0] == expected[4][:18]
    assert both[1] == expected[1][:23]


def test_rows_are_not_packed_into_a_prompt_in_prefill(
    model: Any, prepared: list[Any], expected: list[Any]
) -> None:
    """Where the only row in front is a half-read prompt's, the batch is run wider."""
    runner = TransformersRunner(model, slots=4, max_length=512, graphs="fake")
    half, whole = (
        Prompt(prepared[index].request["input_ids"], dict(prepared[index].tensors))
        for index in (4, 1)
    )
    length = len(half.input_ids)
    runner.prefill(0, half, 0, 20)
    tokens = [runner.prefill(1, whole, 0, len(whole.input_ids)).token]
    for _ in range(5):
        tokens += [emitted.token for emitted in runner.decode([1])]
    last = [runner.prefill(0, half, 20, length).token]
    for _ in range(5):
        for stream, emitted in zip((last, tokens), runner.decode([0, 1]), strict=True):
            stream.append(emitted.token)
    assert last == expected[4][:6]
    assert tokens == expected[1][:11]


class Cuda:
    """As much of torch.cuda as recording needs; a replay repeats what was recorded."""

    def __init__(self) -> None:
        self.recording: Cuda.CUDAGraph | None = None
        self.refuses: Exception | None = None
        self.inside = 0
        self.streams = 0
        self.pools: list[Any] = []
        self.waits = 0

    class CUDAGraph:
        """What was recorded."""

        def __init__(self) -> None:
            self.work: list[Callable[[], Any]] = []

        def replay(self) -> None:
            for each in self.work:
                each()

    def graph_pool_handle(self) -> str:
        return "the pool"

    def Stream(self) -> Cuda:  # noqa: N802  # as torch calls it
        self.streams += 1
        return self

    def current_stream(self) -> Cuda:
        return self

    def wait_stream(self, other: Cuda) -> None:
        self.waits += 1

    @contextlib.contextmanager
    def stream(self, stream: Cuda) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.contextmanager
    def graph(
        self,
        graph: Cuda.CUDAGraph,
        pool: Any,
        stream: Cuda,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads may use the device"
        self.recording = graph
        self.pools.append(pool)
        yield
        self.recording = None
        if self.refuses is not None:
            raise self.refuses


class Recorded(Forward):
    """A step that does as a captured one: what it read then, it reads at each replay."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __call__(self, inputs: Inputs) -> Any:
        assert self.cuda.inside, "the step was warmed up on another stream"
        output = super().__call__(inputs)
        if self.cuda.recording is not None:
            again = super().__call__
            self.cuda.recording.work.append(lambda: output.copy_(again(inputs)))
        return output


def recording(steps: Fixed, cuda: Cuda) -> None:
    """Let a replay copy to where the logits are, as the captured copy would."""
    plain = steps._step

    def step(inputs: Inputs) -> Any:
        output = plain(inputs)
        if cuda.recording is not None:
            made = cuda.recording.work
            (rerun,) = made
            made[:] = [lambda: output.copy_(rerun())]
        return output

    steps._step = step


def test_recorded_steps_are_replayed_on_new_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each shape is warmed up aside, recorded once into one pool, and then replayed."""
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    forward = Recorded(cuda)
    steps = fixed(forward, capture=True)
    recording(steps, cuda)
    first = steps.run([Lane(0, 7, 10, -3)], 1)
    assert first.tolist() == [[7, 0, 10, 7, 11]]
    assert (len(forward.seen), cuda.waits) == (5, 2)
    second = steps.run([Lane(0, 8, 11, -3)], 1)
    assert second.tolist() == [[8, 0, 11, 8, 12]]
    assert first.data_ptr() == second.data_ptr()
    steps.prepare()
    assert steps.captured == len(steps.shapes)
    assert cuda.pools == ["the pool"] * len(steps.shapes)
    assert cuda.streams == 1
    seen = len(forward.seen)
    lanes = [Lane(0, 1, 300, 0), Lane(1, 2, 700, 5)]
    made = steps.run(lanes, 2)
    assert made.tolist() == [[1, 0, 300, 300, 301], [2, 1, 700, 705, 701]]
    # The logits of all shapes lie in the same place.
    assert made.data_ptr() == first.data_ptr()
    assert len(forward.seen) == seen + 1


def test_capture_that_is_refused_is_logged_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was captured goes on as a graph, the rest as it comes; nobody's step fails."""
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    steps = fixed(Recorded(cuda), capture=True)
    recording(steps, cuda)
    steps.run([Lane(0, 7, 10, -3)], 1)
    cuda.refuses = RuntimeError("CUDA error: operation not permitted\nmore of it")
    cuda.inside = 1  # as it comes, on the stream that everything is on
    cuda.waits = 0
    steps.prepare()
    steps.prepare()
    # What was begun aside comes before what runs as it comes.
    assert (cuda.inside, cuda.waits) == (1, 2)
    assert steps.captured == 1
    (record,) = caplog.records
    assert "operation not permitted; steps run without CUDA graphs" in record.message
    lanes = [Lane(0, 1, 300, 0), Lane(1, 2, 700, 5)]
    assert steps.run(lanes, 2).tolist() == [
        [1, 0, 300, 300, 301],
        [2, 1, 700, 705, 701],
    ]
    assert steps.run([Lane(0, 8, 11, -3)], 1).tolist() == [[8, 0, 11, 8, 12]]


def test_shapes_are_made_for_batches_and_not_for_slots(
    model: Any, prepared: list[Any], expected: list[Any]
) -> None:
    """With conversations resting in the other slots, no step is wider than a batch."""
    steps = fixed(Forward(), slots=32, max_length=256, widest=6)
    steps.prepare()
    assert sorted(steps._shapes) == [(1, 256), (2, 256), (4, 256), (6, 256)]
    assert (steps.width(6), steps.width(7)) == (6, 32)

    runner = TransformersRunner(
        model, slots=6, max_batch=2, max_length=512, graphs="fake"
    )
    scheduler = Scheduler(runner, max_batch=2, chunk=16)
    tokens: dict[str, list[int]] = {}
    for number in range(12):
        key, prompt = f"k{number}", prepared[number % 2]
        tokens[key] = []
        session = {"session": f"s{number % 5}", "max_tokens": 24}
        scheduler.start(key, prompt.request | session, {})
    while scheduler.busy:
        for output in scheduler.step():
            for item in output.items:
                tokens[output.key] += item if type(item) is list else []
    assert all(tokens[f"k{n}"] == expected[n % 2] for n in range(12))
    assert scheduler.status()["slots_kept"] == 5
    assert isinstance(runner._steps, Fixed)
    assert {width for width, _ in runner._steps._shapes} == {1, 2}


class FromHost(TorchDispatchMode):
    """Notes what works with memory of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_leaves((args, kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in given):
            self.brought.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_step_asks_nothing_of_the_device(tmp_path: Path, family: str) -> None:
    """On a device without data every question raises, and nothing is brought there.

    A capture fails by either.
    """
    model = load_model(build(tmp_path, family), device="cpu", dtype="float32")
    runner = TransformersRunner(
        model.to("meta"), slots=3, max_length=600, graphs="fake"
    )
    runner.capture()
    assert runner.status() == {"kv_bytes": runner.cache.nbytes, "graphs": 0}
    inputs = Inputs(2, 300, reserved=3, device=model.device)
    with torch.inference_mode(), FromHost() as host:
        runner._passes.step(inputs)
    assert host.brought == []


def test_graphs_without_cuda_raise(model: Any) -> None:
    """Capture needs a CUDA device, and says so."""
    with pytest.raises(ValueError, match="need cuda"):
        TransformersRunner(model, slots=1, max_length=64, graphs="on")
