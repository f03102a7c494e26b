from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from lifecycle_engine import Emitted, Prompt, Scheduler, SimRunner

COUNT = 6


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Run without the garbage collector."""
    gc.disable()
    yield
    gc.enable()


class Payload:
    """Tensors of one request as the link hands them over, and which are alive."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = {name: array.copy() for name, array in arrays.items()}
        self.refs = [weakref.ref(array) for array in self._arrays.values()]

    def hand_over(self) -> dict[str, memoryview]:
        """Give the only references away, as views that keep their array alive."""
        views = {name: memoryview(array) for name, array in self._arrays.items()}
        self._arrays.clear()
        return views

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.refs)


class Recorder:
    """Weak references to the inputs and outputs of the vision tower."""

    def __init__(self, visual: Any) -> None:
        self.refs: list[weakref.ref[Any]] = []
        self._handle = visual.register_forward_hook(self._record)

    def _record(self, module: Any, args: Any, output: Any) -> None:
        self.refs += [weakref.ref(args[0]), weakref.ref(output.last_hidden_state)]

    def close(self) -> None:
        self._handle.remove()

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.refs)


@pytest.fixture
def tower(model: Any) -> Iterator[Recorder]:
    """A recorder on the vision tower."""
    recorder = Recorder(model.model.visual)
    yield recorder
    recorder.close()


@pytest.fixture
def torch_scheduler(model: Any) -> Scheduler:
    """A scheduler over the real model."""
    from lifecycle_engine import TransformersRunner

    return Scheduler(TransformersRunner(model, slots=2, max_length=512))


def request_of(prepared: Any) -> dict[str, Any]:
    """Its request map, a few tokens long."""
    return prepared.request | {"max_tokens": COUNT}


def test_payload_is_freed_after_prefill(
    torch_scheduler: Scheduler,
    tower: Recorder,
    prepared: list[Any],
    expected: list[Any],
) -> None:
    """After prefill, pixels and encoder outputs are freed; decoding continues."""
    payload = Payload(prepared[4].tensors)
    torch_scheduler.start("a", request_of(prepared[4]), payload.hand_over())
    assert payload.alive == 2
    assert torch_scheduler.status()["payload_bytes"] == prepared[4].nbytes
    (output,) = torch_scheduler.step()
    assert payload.alive == 0
    assert len(tower.refs) == 4  # pixels and features of two images
    assert tower.alive == 0
    assert torch_scheduler.status()["payload_bytes"] == 0
    tokens = list(output.items[0])
    while torch_scheduler.busy:
        for output in torch_scheduler.step():
            tokens += output.items[0]
    assert tokens == expected[4][:COUNT]


def test_strip_keeps_only_the_position_deltas(
    model: Any, prepared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prefill one number is left of a request's tensors."""
    from lifecycle_engine import TransformersRunner

    seen: list[Prompt] = []

    class Spy(TransformersRunner):
        def prefill(self, slot: int, prompt: Prompt, *chunk: int) -> Emitted | None:
            seen.append(prompt)
            return super().prefill(slot, prompt, *chunk)

    scheduler = Scheduler(Spy(model, slots=1, max_length=512))
    scheduler.start("a", request_of(prepared[4]), dict(prepared[4].tensors))
    scheduler.step()
    assert list(seen[0].tensors) == ["mrope"]
    assert list(seen[0].tensors["mrope"]) == ["position_deltas"]
    assert type(seen[0].tensors["mrope"]["position_deltas"]) is int
    scheduler.end("a")
    assert not seen[0].tensors


def test_payload_lives_as_long_as_a_chunk_needs_it(
    model: Any, prepare: Callable[..., Any], picture: Any
) -> None:
    """Pixels are freed after the last image token, features after their image."""
    from lifecycle_engine import TransformersRunner

    runner = TransformersRunner(model, slots=1, max_length=512)
    encode, encoded = runner._family.encode, []

    def recording(*args: Any) -> Any:
        made = encode(*args)
        encoded.append(weakref.ref(made.features))
        return made

    runner._family.encode = recording
    scheduler = Scheduler(runner, chunk=4)
    made = prepare("And now some text.", picture(64, 64), picture(90, 60, seed=2))
    ids = made.request["input_ids"]
    token = model.config.image_token_id
    behind = len(ids) - ids[::-1].index(token)
    payload = Payload(made.tensors)
    scheduler.start("a", request_of(made), payload.hand_over())
    del made
    for stop in range(4, len(ids) + 4, 4):
        scheduler.step()
        assert payload.alive == (2 if stop < behind else 0)
        inside = ids[stop - 1 : stop + 1] == [token, token]
        assert sum(ref() is not None for ref in encoded) == inside
    assert len(encoded) == 2
    assert scheduler.status()["running"] == 1


@pytest.mark.parametrize("leave", ["cancel", "end"])
@pytest.mark.parametrize("chunks", [1, 4, 8])
def test_payload_is_freed_by_cancel_and_end_in_prefill(
    model: Any,
    tower: Recorder,
    prepared: list[Any],
    leave: str,
    chunks: int,
) -> None:
    """A cancel between two chunks frees pixels and encoder outputs."""
    from lifecycle_engine import TransformersRunner

    runner = TransformersRunner(model, slots=1, max_length=512)
    scheduler = Scheduler(runner, chunk=5)
    payload = Payload(prepared[4].tensors)
    scheduler.start("a", request_of(prepared[4]), payload.hand_over())
    for _ in range(chunks):
        scheduler.step()
    assert payload.alive == 2
    getattr(scheduler, leave)("a")
    assert (payload.alive, tower.alive) == (0, 0)
    assert not any(layer.keys.any() for layer in runner.cache.layers)


@pytest.mark.parametrize("layer", [0, 1])
def test_payload_is_freed_after_failing_prefill(
    torch_scheduler: Scheduler,
    tower: Recorder,
    prepared: list[Any],
    model: Any,
    layer: int,
) -> None:
    """An error deep in the model leaves no frame behind that holds the pixels."""

    def choke(*args: Any) -> None:
        raise RuntimeError("choked")

    module = [model.model.visual.merger, model.model.language_model.layers[1]][layer]
    handle = module.register_forward_hook(choke)
    payload = Payload(prepared[4].tensors)
    try:
        torch_scheduler.start("a", request_of(prepared[4]), payload.hand_over())
        (output,) = torch_scheduler.step()
    finally:
        handle.remove()
    assert output.finish is not None
    assert output.finish.code == "prefill_failed"
    assert (payload.alive, tower.alive) == (0, 0)


class Cyclic(SimRunner):
    """Fails with an error that refers to itself and to the payload, chained."""

    def prefill(self, slot: int, prompt: Prompt, *chunk: int) -> Emitted | None:
        pixels = prompt.tensors["pixels"]
        try:
            raise KeyError(pixels.nbytes)
        except KeyError as error:
            kept = error
            raise ValueError("chained") from kept


def sim_payload() -> Payload:
    """Ten simulated pixels."""
    return Payload({"pixels": np.ones((10, 6), np.float32)})


def test_payload_is_freed_after_cyclic_error() -> None:
    """Errors that form a cycle with their frames do not keep the payload."""
    scheduler = Scheduler(Cyclic(sleep=lambda _: None))
    payload = sim_payload()
    scheduler.start("a", {"input_ids": [1], "max_tokens": 9}, payload.hand_over())
    (output,) = scheduler.step()
    assert output.finish is not None
    assert output.finish.reason == "failed"
    assert payload.alive == 0


@pytest.mark.parametrize("leave", ["cancel", "end"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_payload_is_freed_by_cancel_and_end_in_the_queue(
    leave: str, ahead: int
) -> None:
    """A cancel or END of a waiting request frees its payload at once."""
    scheduler = Scheduler(SimRunner(slots=1, sleep=lambda _: None))
    for number in range(ahead):
        scheduler.start(f"x{number}", {"input_ids": [1], "max_tokens": 50}, {})
        scheduler.step()
    payload = sim_payload()
    scheduler.start("a", {"input_ids": [1], "max_tokens": 9}, payload.hand_over())
    assert payload.alive == 1
    getattr(scheduler, leave)("a")
    assert payload.alive == 0


def test_payload_is_freed_when_rejected() -> None:
    """The scheduler keeps nothing of a rejected request."""
    scheduler = Scheduler(SimRunner(sleep=lambda _: None))
    payload = sim_payload()
    refused: Sequence[Callable[[], None]] = [
        lambda: scheduler.start(
            "a", {"input_ids": [1], "max_tokens": 0}, payload.hand_over()
        ),
    ]
    for act in refused:
        with pytest.raises(Exception, match="max_tokens is 0"):
            act()
    assert payload.alive == 0


def test_waiting_payload_can_still_run() -> None:
    """Until its prefill a request keeps its payload, however long it waits."""
    scheduler = Scheduler(SimRunner(slots=1, sleep=lambda _: None))
    scheduler.start("x", {"input_ids": [1], "max_tokens": 5}, {})
    payload = sim_payload()
    scheduler.start("a", {"input_ids": [1], "max_tokens": 1}, payload.hand_over())
    for _ in range(4):
        scheduler.step()
        assert payload.alive == 1
    while scheduler.busy:
        scheduler.step()
    assert payload.alive == 0
