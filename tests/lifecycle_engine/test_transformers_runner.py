from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lifecycle_engine import (  # noqa: E402
    Emitted,
    Prompt,
    Sampling,
    Scheduler,
    TransformersRunner,
)

COUNT = 24


def prompt_of(prepared: Any, **sampling: Any) -> Prompt:
    """Build the prompt of a prepared chat."""
    ids = prepared.request["input_ids"]
    return Prompt(ids, dict(prepared.tensors), Sampling(**sampling))


def prefill(runner: Any, slot: int, prompt: Prompt) -> int:
    """Run a whole prompt as one chunk."""
    return runner.prefill(slot, prompt, 0, len(prompt.input_ids)).token


def decode(runner: Any, slots: list[int]) -> list[int]:
    """One token of each slot."""
    return [emitted.token for emitted in runner.decode(slots)]


def stream(
    runner: Any, prompt: Prompt, *, slot: int = 0, count: int = COUNT
) -> list[int]:
    """Prefill and decode one request alone."""
    tokens = [prefill(runner, slot, prompt)]
    while len(tokens) < count:
        tokens += decode(runner, [slot])
    runner.free(slot)
    return tokens


def tokens_of(scheduler: Scheduler) -> list[int]:
    """Step to the end and collect the tokens of running requests."""
    items = []
    while scheduler.busy:
        items += [item for output in scheduler.step() for item in output.items]
    return [token for item in items if type(item) is list for token in item]


@pytest.mark.parametrize("index", range(6))
def test_single_request_matches_generate(
    model: Any, prepared: list[Any], expected: list[Any], index: int
) -> None:
    """Text, one image and two images give the tokens of `generate`."""
    runner = TransformersRunner(model, slots=2, max_length=512)
    runner.check(prompt_of(prepared[index]))
    assert stream(runner, prompt_of(prepared[index]), slot=1) == expected[index]


@pytest.mark.parametrize(
    ("graphs", "buckets"), [("off", ()), ("fake", ()), ("fake", (8,)), ("fake", (5,))]
)
def test_batch_matches_generate(
    model: Any,
    prepared: list[Any],
    expected: list[Any],
    graphs: Any,
    buckets: tuple[int, ...],
) -> None:
    """Six requests decoded together are each what they are alone, padded or not."""
    runner = TransformersRunner(
        model, slots=8, max_length=512, graphs=graphs, buckets=buckets
    )
    order = [5, 2, 0, 4, 1, 3]
    streams = {
        slot: [prefill(runner, slot, prompt_of(prepared[index]))]
        for slot, index in enumerate(order)
    }
    for _ in range(COUNT - 1):
        slots = sorted(streams)
        drawn = decode(runner, slots)
        for slot, token in zip(slots, drawn, strict=True):
            streams[slot].append(token)
    assert [streams[order.index(index)] for index in range(6)] == expected


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_go_match_generate(
    model: Any, prepared: list[Any], expected: list[Any], seed: int
) -> None:
    """Joining, finishing, cancelling and ending at random change no tokens."""
    rng = random.Random(seed)
    graphs: Any = "fake" if seed % 2 else "off"
    runner = TransformersRunner(model, slots=4, max_length=512, graphs=graphs)
    scheduler = Scheduler(runner, chunk=rng.choice([1, 7, 16, 512]))
    wanted: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    completed: set[str] = set()
    leaving: list[tuple[int, str]] = []
    pending, step = 20, 0
    while pending or scheduler.busy:
        step += 1
        if pending and rng.random() < 0.5:
            pending -= 1
            key, index = f"r{pending}", rng.randrange(6)
            count = rng.randint(1, COUNT)
            request = prepared[index].request | {"max_tokens": count}
            scheduler.start(key, request, prepared[index].tensors)
            wanted[key], got[key] = expected[index][:count], []
            if rng.random() < 0.4:
                leaving.append((step + rng.randrange(60), key))
        for _, key in [each for each in leaving if each[0] == step]:
            leave = scheduler.cancel if rng.random() < 0.5 else scheduler.end
            leave(key)
        for output in scheduler.step():
            got[output.key] += [
                i for item in output.items if type(item) is list for i in item
            ]
            if output.finish is not None and output.finish.reason == "completed":
                completed.add(output.key)
    assert len(completed) >= 8, "the schedule cancelled nearly everything"
    for key, tokens in got.items():
        whole = wanted[key] if key in completed else wanted[key][: len(tokens)]
        assert tokens == whole
    assert scheduler.status()["slots_free"] == 4
    assert not runner._rows


def test_rope_deltas_stay_off_the_module(model: Any, prepared: list[Any]) -> None:
    """Positions of a request are kept with it, where a later one cannot reach."""
    model.model.rope_deltas = None
    runner = TransformersRunner(model, slots=2, max_length=512)
    prompts = [prompt_of(prepared[2]), prompt_of(prepared[5])]
    for slot, prompt in enumerate(prompts):
        prefill(runner, slot, prompt)
    deltas = [prompt.tensors["mrope"]["position_deltas"] for prompt in prompts]
    assert model.model.rope_deltas is None
    assert deltas[0] != deltas[1]
    assert all(delta < 0 for delta in deltas)


@pytest.mark.parametrize("index", [2, 3, 4, 5])
def test_lost_position_deltas_change_the_tokens(
    model: Any, prepared: list[Any], expected: list[Any], index: int
) -> None:
    """The deltas matter: a runner that drops them diverges from `generate`."""

    class Forgetful(TransformersRunner):
        def prefill(self, *args: Any) -> Emitted | None:
            emitted = super().prefill(*args)
            self._rows[0].delta = 0
            return emitted

    runner = Forgetful(model, slots=1, max_length=512)
    assert stream(runner, prompt_of(prepared[index])) != expected[index]


def test_text_runs_while_images_are_prefilled(
    model: Any, prepared: list[Any], expected: list[Any]
) -> None:
    """A prefill between two steps of another request does not disturb it."""
    runner = TransformersRunner(model, slots=2, max_length=512)
    tokens = [prefill(runner, 0, prompt_of(prepared[0]))]
    while len(tokens) < COUNT:
        prefill(runner, 1, prompt_of(prepared[4]))
        tokens += decode(runner, [0])
        runner.free(1)
    assert tokens == expected[0]


def test_padded_lanes_write_only_the_reserved_row(
    model: Any, prepared: list[Any]
) -> None:
    """Padding a step to its bucket touches no row that a request could hold."""
    runner = TransformersRunner(
        model, slots=3, max_length=512, graphs="fake", buckets=(3,)
    )
    prefill(runner, 1, prompt_of(prepared[0]))
    layer = runner.cache.layers[0]
    rows = layer.keys[1:3].clone()
    decode(runner, [1])
    assert runner.cache.reserved == 3
    assert layer.keys.shape[0] == 4
    assert layer.keys[0].any()
    assert layer.keys[1:3].equal(rows)
    assert layer.keys[3, :, 0].any()


def test_freed_slot_is_zeroed(model: Any, prepared: list[Any]) -> None:
    """Nothing of a request stays in its row, so a NaN cannot reach the next one."""
    runner = TransformersRunner(model, slots=1, max_length=512)
    stream(runner, prompt_of(prepared[1]))
    assert not any(layer.keys[0].any() for layer in runner.cache.layers)
    assert not any(layer.values[0].any() for layer in runner.cache.layers)


def test_nan_pixels_fail_alone(
    model: Any, prepared: list[Any], expected: list[Any]
) -> None:
    """A payload of NaN fails its own request and leaves the slot fit for the next."""
    runner = TransformersRunner(model, slots=1, max_length=512)
    scheduler = Scheduler(runner)
    bad = dict(prepared[4].tensors)
    bad["pixel_values"] = bad["pixel_values"] * float("nan")
    scheduler.start("bad", prepared[4].request, bad)
    scheduler.start("good", prepared[0].request | {"max_tokens": COUNT}, {})
    tokens: list[int] = []
    while scheduler.busy:
        for output in scheduler.step():
            if output.key == "bad":
                assert output.finish is not None
                assert output.finish.code == "prefill_failed"
                assert "FloatingPointError" in output.finish.message
            tokens += [i for item in output.items if type(item) is list for i in item]
    assert tokens == expected[0]


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_failing_model_leaves_the_runner_fit(
    model: Any, prepared: list[Any], expected: list[Any], step: str
) -> None:
    """After an error inside the model the next request runs as if nothing was."""
    runner = TransformersRunner(model, slots=1, max_length=512)
    scheduler = Scheduler(runner)
    scheduler.start("bad", prepared[2].request, dict(prepared[2].tensors))
    if step == "decode":
        scheduler.step()

    def choke(*_: Any) -> None:
        raise RuntimeError("choked")

    handle = model.model.language_model.layers[1].register_forward_hook(choke)
    try:
        (output,) = scheduler.step()
    finally:
        handle.remove()
    assert output.finish is not None
    assert output.finish.code == f"{step}_failed"
    assert not any(layer.keys[0].any() for layer in runner.cache.layers)
    scheduler.start("good", prepared[0].request | {"max_tokens": COUNT}, {})
    assert tokens_of(scheduler) == expected[0]


def test_single_token_prompt_matches_generate(
    model: Any, prepare: Callable[..., Any], generate: Callable[..., list[int]]
) -> None:
    """The shortest prompt there is works like any other."""
    one = prepare("x")
    one.request["input_ids"] = [65]
    runner = TransformersRunner(model, slots=1, max_length=64)
    assert stream(runner, prompt_of(one), count=8) == generate(one, 8)


def test_last_position_of_a_slot_is_usable(
    model: Any, prepared: list[Any], expected: list[Any]
) -> None:
    """A request may fill its slot to the last position."""
    length = len(prepared[0].request["input_ids"])
    runner = TransformersRunner(model, slots=1, max_length=length + COUNT)
    scheduler = Scheduler(runner)
    scheduler.start("a", prepared[0].request | {"max_tokens": COUNT}, {})
    assert tokens_of(scheduler) == expected[0]


def test_seeded_sampling_is_reproducible(model: Any, prepared: list[Any]) -> None:
    """The same seed draws the same tokens, alone or with others; another one not."""
    runner = TransformersRunner(model, slots=2, max_length=512)
    options = {"temperature": 1.5, "seed": 11}
    alone = stream(runner, prompt_of(prepared[2], **options))
    prefill(runner, 1, prompt_of(prepared[0], temperature=2.0))
    tokens = [prefill(runner, 0, prompt_of(prepared[2], **options))]
    while len(tokens) < COUNT:
        tokens.append(decode(runner, [1, 0])[1])
    assert tokens == alone
    other = prompt_of(prepared[2], temperature=1.5, seed=12)
    runner.free(0)
    assert stream(runner, other) != alone


def test_greedy_stream_does_not_end_by_itself(expected: list[Any]) -> None:
    """A random checkpoint writes on until max_tokens, and not one token for ever."""
    assert all(len(tokens) == COUNT for tokens in expected)
    assert all(len(set(tokens)) > COUNT // 3 for tokens in expected)


def test_random_checkpoint_writes_readable_text(
    processor: Any, expected: list[Any]
) -> None:
    """What a random checkpoint writes is nonsense, but printable."""
    for tokens in expected:
        detokenizer = processor.detokenizer()
        text = detokenizer.push(tokens) + detokenizer.flush()
        assert text.isascii()
        assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_rows_that_do_not_fit_raise(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """Too many slots for the device are a mistake in the configuration, too."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ValueError, match="7 KV slots of 64 positions do not fit"):
        TransformersRunner(model, slots=7, max_length=64)


def test_max_length_beyond_the_model_raises(model: Any) -> None:
    """A slot longer than the model's positions is a mistake in the configuration."""
    with pytest.raises(ValueError, match="the model takes"):
        TransformersRunner(model, slots=1, max_length=1_000_000)


@pytest.mark.parametrize("graphs", ["off", "fake"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_lane_without_finite_logits_fails_alone(
    model: Any, prepared: list[Any], expected: list[Any], graphs: Any, value: float
) -> None:
    """In the middle of a batch, with any report beside its tokens, the rest is right."""
    runner = TransformersRunner(model, slots=3, max_length=512, graphs=graphs)
    scheduler = Scheduler(runner)
    fields: dict[str, Any] = {
        "a": {},
        "bad": {"logprobs": 2, "temperature": 0.5},
        "b": {"logprobs": 1},
    }
    for key, more in fields.items():
        request = prepared[0].request | {"max_tokens": COUNT} | more
        scheduler.start(key, request, {})
        scheduler.step()
    row = runner._rows[1].row

    def spoil(_module: Any, _args: Any, logits: Any) -> Any:
        logits = logits.clone()
        logits[row, ..., 5] = value
        return logits

    tokens: dict[str, list[int]] = {key: [] for key in fields}
    with model.lm_head.register_forward_hook(spoil):
        outputs = scheduler.step()
    (failed,) = (output for output in outputs if output.key == "bad")
    assert failed.finish is not None
    assert failed.finish.code == "decode_failed"
    assert failed.finish.message == "decode failed: FloatingPointError"
    while scheduler.busy:
        for output in scheduler.step():
            tokens[output.key] += token_ids(output)
    assert expected[0][-len(tokens["b"]) :] == tokens["b"]
    assert len(tokens["b"]) > 5
    assert tokens["a"]
    assert scheduler.status()["slots_free"] == 3


def token_ids(output: Any) -> list[int]:
    """The tokens of an output, with log probabilities or without."""
    tokens: list[int] = []
    for item in output.items:
        if type(item) is list:
            tokens += item
        elif "token" in item:
            tokens.append(item["token"])
    return tokens
