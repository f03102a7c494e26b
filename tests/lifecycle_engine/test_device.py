"""Steps of fixed shape and their CUDA graphs, and copies to a device."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from engine_kit import load_model  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from lifecycle_engine import (  # noqa: E402
    DeviceLost,
    Prompt,
    Scheduler,
    TransformersRunner,
)
from lifecycle_engine.model import forward_pass  # noqa: E402
from lifecycle_engine.model.cuda_graphs import (  # noqa: E402
    FixedShapeSteps,
    Lane,
    StepInputs,
    StepShape,
)
from lifecycle_engine.model.device_copies import (  # noqa: E402
    PendingCopies,
    TorchDevice,
    detect_device_loss,
    pin,
    small_tensor,
    unpin,
)
from lifecycle_zmq import Arena, ArenaView  # noqa: E402
from lifecycle_zmq.shared_memory.tensors import Place  # noqa: E402
from tiny_checkpoint import FAMILIES, build  # noqa: E402

CPU = torch.device("cpu")


class Forward:
    """A step whose logits show its inputs, and which records them."""

    def __init__(self) -> None:
        self.seen: list[StepInputs] = []

    def __call__(self, inputs: StepInputs) -> Any:
        self.seen.append(inputs)
        columns = (inputs.ids, inputs.rows, inputs.positions, inputs.rotary)
        visible = inputs.mask[:, 0].sum(-1)
        return torch.stack([*columns, visible], dim=-1).float()


def fixed(forward: Forward, **options: Any) -> FixedShapeSteps:
    """Steps of fixed shapes, without capture."""
    options = {"slots": 6, "max_length": 1000, "capture": False} | options
    return FixedShapeSteps(forward, device=CPU, **options)


def test_batch_is_padded_up_to_its_bucket() -> None:
    """Padded lanes write to the reserved row at position 0 and attend to nothing else."""
    steps = fixed(Forward())
    width = steps.width(3)
    lanes = [Lane(0, [7], 10, -3), Lane(2, [8], 300, 0)]
    logits = steps.run(lanes, width)
    assert logits[:, 0].tolist() == [
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
    """Steps of one shape reuse its inputs and output."""
    forward = Forward()
    steps = fixed(forward)
    first = steps.run([Lane(0, [1], 5, 0)], 1)
    second = steps.run([Lane(0, [2], 6, 0)], 1)
    assert first.data_ptr() == second.data_ptr()
    assert second[:, 0].tolist() == [[2, 0, 6, 6, 7]]
    assert len({id(inputs) for inputs in forward.seen}) == 1
    steps.run([Lane(0, [2], 400, 0)], 1)
    assert len({id(inputs) for inputs in forward.seen}) == 2


def test_recording_touches_the_reserved_row_only() -> None:
    """While a shape is prepared all lanes are padding."""
    rows: list[Any] = []

    def forward(inputs: StepInputs) -> Any:
        rows.append(inputs.rows[:, 0].tolist())
        return torch.zeros(len(inputs.rows), 1, 2)

    steps = FixedShapeSteps(forward, slots=4, max_length=600, device=CPU, capture=False)
    steps.prepare()
    assert len(rows) == len(steps.shapes) == 3 * 3
    assert {row for each in rows for row in each} == {4}
    steps.prepare()
    assert len(rows) == 9


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_graphs_on_or_off_generate_the_same_tokens(
    model: Any, prepared: list[Any], expected: list[Any], count: int
) -> None:
    """The shape of a step does not affect its tokens."""
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
    """The last running request runs alone, whatever its row was, and continues."""
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


def test_row_in_prefill_is_not_touched(
    model: Any, prepared: list[Any], expected: list[Any], generate: Callable[..., Any]
) -> None:
    """Neither packing nor padding touches a row in prefill."""
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
    """If the only row in front is in prefill, the batch runs wider."""
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
    """The part of torch.cuda that capture needs; a replay repeats the recorded steps."""

    def __init__(self) -> None:
        self.recording: Cuda.CUDAGraph | None = None
        self.refuses: Exception | None = None
        self.inside = 0
        self.streams = 0
        self.pools: list[Any] = []
        self.waits = self.emptied = 0

    class CUDAGraph:
        """What was recorded."""

        def __init__(self) -> None:
            self.work: list[Callable[[], Any]] = []

        def replay(self) -> None:
            for each in self.work:
                each()

    def empty_cache(self) -> None:
        self.emptied += 1

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
        pool: Any = None,
        stream: Cuda | None = None,
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
    """A step that behaves like a captured one: it reads the same memory each time."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __call__(self, inputs: StepInputs) -> Any:
        assert self.cuda.inside, "the step was warmed up on another stream"
        output = super().__call__(inputs)
        if self.cuda.recording is not None:
            again = super().__call__
            self.cuda.recording.work.append(lambda: output.copy_(again(inputs)))
        return output


def recording(steps: FixedShapeSteps, cuda: Cuda) -> None:
    """Make a replay copy into the shared logits, as the captured copy would."""
    plain = steps._step

    def step(inputs: StepInputs) -> Any:
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
    """Each shape is warmed up on its own stream, captured once and then replayed."""
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    forward = Recorded(cuda)
    steps = fixed(forward, capture=True)
    recording(steps, cuda)
    first = steps.run([Lane(0, [7], 10, -3)], 1)
    assert first[:, 0].tolist() == [[7, 0, 10, 7, 11]]
    assert (len(forward.seen), cuda.waits) == (5, 2)
    second = steps.run([Lane(0, [8], 11, -3)], 1)
    assert second[:, 0].tolist() == [[8, 0, 11, 8, 12]]
    assert first.data_ptr() == second.data_ptr()
    steps.prepare()
    assert steps.captured == len(steps.shapes)
    assert cuda.pools == ["the pool"] * len(steps.shapes)
    assert cuda.streams == 1
    seen = len(forward.seen)
    lanes = [Lane(0, [1], 300, 0), Lane(1, [2], 700, 5)]
    made = steps.run(lanes, 2)
    assert made[:, 0].tolist() == [[1, 0, 300, 300, 301], [2, 1, 700, 705, 701]]
    # The logits of all shapes lie in the same place.
    assert made.data_ptr() == first.data_ptr()
    assert len(forward.seen) == seen + 1


def test_failed_capture_is_logged_and_steps_run_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Captured steps run as graphs, others without; no step fails."""
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    given_back: list[tuple[Any, ...]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        # A torch for CPU alone has neither.
        give = functools.partial(lambda *call: given_back.append(call), name)
        monkeypatch.setattr(torch._C, name, give, raising=False)
    steps = fixed(Recorded(cuda), capture=True)
    recording(steps, cuda)
    steps.run([Lane(0, [7], 10, -3)], 1)
    cuda.refuses = RuntimeError("CUDA error: operation not permitted\nmore of it")
    cuda.inside = 1  # as it comes, on the stream that everything is on
    cuda.waits = 0
    steps.prepare()
    steps.prepare()
    # What was begun aside comes before what runs as it comes.
    assert (cuda.inside, cuda.waits, cuda.emptied) == (1, 2, 1)
    assert steps.captured == 1
    assert given_back == [
        ("_cuda_endAllocateToPool", 0, "the pool"),
        ("_cuda_releasePool", 0, "the pool"),
    ]
    (record,) = caplog.records
    assert (
        "operation not permitted; further shapes run without CUDA graphs"
        in record.message
    )
    lanes = [Lane(0, [1], 300, 0), Lane(1, [2], 700, 5)]
    assert steps.run(lanes, 2)[:, 0].tolist() == [
        [1, 0, 300, 300, 301],
        [2, 1, 700, 705, 701],
    ]
    after = steps.run([Lane(0, [8], 11, -3)], 1)
    assert after[:, 0].tolist() == [[8, 0, 11, 8, 12]]


def test_shapes_are_prepared_for_batches_not_for_slots(
    model: Any, prepared: list[Any], expected: list[Any]
) -> None:
    """Cached conversations in the other slots do not widen a step."""
    steps = fixed(Forward(), slots=32, max_length=256, max_batch=6)
    steps.prepare()
    assert sorted(steps._shapes) == [(n, 1, 256) for n in (1, 2, 4, 6)]
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
    assert scheduler.status()["slots_cached"] == 5
    assert isinstance(runner._steps, FixedShapeSteps)
    assert {shape.width for shape in runner._steps._shapes} == {1, 2}


class FromHost(TorchDispatchMode):
    """Records operations on CPU memory."""

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
def test_decode_step_does_not_synchronise(tmp_path: Path, family: str) -> None:
    """On the meta device every synchronisation raises, and nothing is copied to it.

    A capture fails by either.
    """
    model = load_model(build(tmp_path, family), device="cpu", dtype="float32")
    runner = TransformersRunner(
        model.to("meta"), slots=3, max_length=600, graphs="fake"
    )
    runner.capture()
    assert runner.status() == {"kv_bytes": runner.cache.nbytes, "graphs": 0}
    inputs = StepInputs(StepShape(2, 1, 300), reserved=3, device=model.device)
    with torch.inference_mode(), FromHost() as host:
        runner.forward.decode(inputs)
    assert host.brought == []


def test_graphs_without_cuda_raise(model: Any) -> None:
    """Capture needs a CUDA device, and says so."""
    with pytest.raises(ValueError, match="need cuda"):
        TransformersRunner(model, slots=1, max_length=64, graphs="on")


class Stream:
    """A device that makes progress only when an event is waited for."""

    def __init__(self) -> None:
        self.started = 0
        self.done = 0
        self.waited: list[int] = []
        self.broken = False

    def copy(self, source: np.ndarray) -> int:
        """Start a copy."""
        self.started += 1
        return self.started

    def record_event(self) -> Any:
        """Return an event after all copies that were started."""
        return Event(self, self.started)


class Event:
    """Waiting for it advances the stream."""

    def __init__(self, stream: Stream, at: int) -> None:
        self.stream, self.at = stream, at

    def synchronize(self) -> None:
        """Advance the stream."""
        if self.stream.broken:
            raise RuntimeError("the device is gone")
        self.stream.waited.append(self.at)
        self.stream.done = self.at


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Run without the garbage collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def lent() -> Iterator[tuple[ArenaView, list[np.ndarray]]]:
    """Three arena tensors as an engine has them, each with its own lease."""
    arena = Arena(2**20, kind="memfd")
    assert arena.descriptor is not None
    view = ArenaView(os.dup(arena.descriptor))
    tensors: list[np.ndarray] = []
    for number in range(3):
        found: dict[str, Any] = {"x": Place(number * 4096, "f", [4, 8])}
        view.resolve((b"", number), found)
        tensors.append(np.asarray(found.pop("x")))
    yield view, tensors
    arena.close()


@pytest.mark.usefixtures("no_collector")
def test_source_is_kept_until_its_copy_is_done(
    lent: tuple[ArenaView, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ends when the copy is done, not when it starts (`peers-68`)."""
    view, tensors = lent
    stream = Stream()
    pending = PendingCopies(stream)
    copies = [pending.start(tensor) for tensor in tensors]
    tensors.clear()
    del tensors
    assert copies == [1, 2, 3]
    assert view.released() == []
    ended: list[int] = []
    synchronize = Event.synchronize

    def check(event: Event) -> None:
        ended.extend(number for _, number in view.released())
        # Later copies are not released early.
        assert ended == list(range(event.at - 1))
        synchronize(event)

    monkeypatch.setattr(Event, "synchronize", check)
    pending.wait()
    assert stream.waited == [1, 2, 3]
    assert view.released() == [(b"", 2)]
    assert view.leases == 0
    pending.wait()
    assert stream.waited == [1, 2, 3]


@pytest.mark.usefixtures("no_collector")
def test_source_is_kept_when_the_device_fails(
    lent: tuple[ArenaView, list[np.ndarray]],
) -> None:
    """What a broken device still reads is unknown."""
    view, tensors = lent
    stream = Stream()
    pending = PendingCopies(stream)
    for tensor in tensors:
        pending.start(tensor)
    tensors.clear()
    del tensor
    stream.broken = True
    with pytest.raises(RuntimeError):
        pending.wait()
    assert view.released() == []
    assert view.leases == 3


@pytest.mark.usefixtures("no_collector")
def test_cpu_uses_the_same_memory() -> None:
    """On the CPU there is no copy, and the tensor keeps the memory alive."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    watch = weakref.ref(array)
    pending = PendingCopies(TorchDevice(torch.device("cpu")))
    tensor = pending.start(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == array.tolist()
    pending.wait()
    del array
    assert watch() is not None
    del tensor
    assert watch() is None


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_small_tensor_is_copied_asynchronously(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is pinned for a CUDA device, so that the copy is asynchronous."""
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
    small_tensor([1, 2], torch.device(kind), torch.float64)
    assert asked == [([1, 2], torch.float64, kind == "cuda"), (kind, True)]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("refused", [False, True])
def test_pinned_arena_is_unpinned(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """It is unpinned by its address; a refusal is cleared."""
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


class _Errors:
    """A CUDA runtime that fails every call with an error, or never."""

    def __init__(self, error: RuntimeError | None) -> None:
        self.error = error

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("error", "then", "lost"),
    [
        (RuntimeError("CUDA error: illegal address"), RuntimeError("assert"), True),
        (RuntimeError("shapes do not match"), None, False),
        (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("assert"), False),
        (RuntimeError("cublas: ALLOC_FAILED"), torch.OutOfMemoryError("full"), False),
    ],
    ids=["sticky", "ordinary", "memory", "memory of a library"],
)
def test_only_a_persistent_error_is_a_lost_device(
    monkeypatch: pytest.MonkeyPatch,
    error: RuntimeError,
    then: RuntimeError | None,
    lost: bool,
) -> None:
    """A CUDA error ends the process only if the next call fails as well."""
    monkeypatch.setattr(torch, "cuda", _Errors(then))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.tensor([0.0]))
    with pytest.raises(DeviceLost if lost else type(error)):
        with detect_device_loss(SimpleNamespace(type="cuda")):
            raise error


@pytest.mark.usefixtures("no_collector")
def test_prefill_returns_when_the_device_is_done(
    monkeypatch: pytest.MonkeyPatch, model: Any, prepared: list[Any]
) -> None:
    """It waits for the copies, then for the pass, so that its time is measured."""
    started: list[str] = []
    waited: list[str] = []

    class Device(TorchDevice):
        """Records the work before each event that is waited for."""

        def copy(self, source: Any) -> Any:
            started.append("copy")
            return super().copy(source)

        def record_event(self) -> Any:
            last = started[-1]
            return SimpleNamespace(synchronize=lambda: waited.append(last))

    text = model.model.language_model
    forward = text.forward

    def run(*args: Any, **options: Any) -> Any:
        started.append("pass")
        return forward(*args, **options)

    monkeypatch.setattr(forward_pass, "TorchDevice", Device)
    monkeypatch.setattr(text, "forward", run)
    runner = TransformersRunner(model, slots=1, max_length=512)
    tensors = dict(prepared[2].tensors)
    prompt = Prompt(prepared[2].request["input_ids"], tensors)
    whole = len(prompt.input_ids)
    runner.prefill(0, prompt, 0, whole - 1)
    assert waited == ["copy", "copy", "pass"]
    runner.prefill(0, prompt, whole - 1, whole)
    assert waited[3:] == ["pass"]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_reads_a_pinned_arena_before_it_is_freed() -> None:
    """The device reads the arena as pinned memory; a free region was read (`design 4`)."""
    pending = PendingCopies(TorchDevice(torch.device("cuda")))
    arena = Arena(64 * 2**20)
    assert arena.descriptor is not None
    view = ArenaView(os.dup(arena.descriptor), writable=True)
    assert pin(view)
    array = arena.empty(32 * 2**20, np.uint8)
    for number in range(8):
        array[:] = number
        found: dict[str, Any] = {"x": Place(0, "B", [array.size])}
        view.resolve((b"", number), found)
        copy = pending.start(np.asarray(found.pop("x")))
        assert view.leases == 1
        pending.wait()
        assert view.released() == [(b"", number)]
        array[:] = 255  # as the next request would
        assert bool((copy == number).all())
    unpin(view)
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_failed_capture_leaves_torch_as_it_was() -> None:
    """Memory goes back to the device, two streams may share it, numbers are drawn."""
    device = torch.device("cuda")
    weights = torch.ones(64, 64, device=device)

    def forward(inputs: StepInputs) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            inputs.ids.sum().item()  # synchronises, which no capture survives
        return inputs.ids[..., None] + torch.rand(1, 64, device=device) @ weights

    def left() -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def on_two_streams() -> None:
        block = torch.ones(2**24, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        block.record_stream(side)
        del block
        torch.cuda.synchronize()
        torch.empty(1, device=device)  # the allocator looks at what others used

    steps = FixedShapeSteps(
        forward, slots=2, max_length=256, device=device, capture=True
    )
    steps.run([Lane(0, [1], 5, 0)], 1)
    assert steps.captured == 0
    on_two_streams()
    before = left()
    for _ in range(3):
        on_two_streams()
    assert left() == before
    assert steps.run([Lane(0, [1], 5, 0)], 1).shape == (1, 1, 64)
    sound = FixedShapeSteps(
        lambda inputs: inputs.ids[..., None] + weights[:1],
        slots=2,
        max_length=256,
        device=device,
        capture=True,
    )
    sound.prepare()
    assert sound.captured == 2
