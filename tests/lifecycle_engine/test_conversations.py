from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_kit import COUNT, Kit, tokens_of  # noqa: E402

from lifecycle_engine import (  # noqa: E402
    Chat,
    Message,
    Scheduler,
)
from tiny_checkpoint import FAMILIES  # noqa: E402

# Of each conversation; what is none has another.
TENANTS: dict[str | None, str] = {"x": "a", "y": "a", "z": "c"}
WITH_IMAGES = [name for name in FAMILIES if name not in ("llama", "qwen3")]


class Talk:
    """A conversation with its whole history, as a client sends it each turn."""

    def __init__(self, kit: Kit, name: str) -> None:
        self._kit, self._name = kit, name
        self._messages: list[Message] = []

    def ask(self, text: str, *pictures: bytes) -> Any:
        """Prepare the next turn, which names the conversation."""
        self._messages.append(Message("user", [*pictures, text]))
        chat = Chat(list(self._messages), COUNT, session=self._name)
        return self._kit.processor.prepare(chat)

    def hear(self, tokens: list[int]) -> None:
        """Take note of the answer."""
        detokenizer = self._kit.processor.detokenizer()
        said = detokenizer.push(tokens) + detokenizer.flush()
        self._messages.append(Message("assistant", [said.replace("<", "")]))

    def change(self, *pictures: bytes) -> None:
        """Send other pictures with the first question from now on."""
        text = self._messages[0].content[-1]
        self._messages[0] = Message("user", [*pictures, text])


def serve(scheduler: Scheduler, prepared: Any) -> list[int]:
    """Run one turn to its end."""
    scheduler.start("turn", prepared.request, dict(prepared.tensors))
    tokens: list[int] = []
    while scheduler.busy:
        for output in scheduler.step():
            tokens += tokens_of(output) if output.key == "turn" else []
    scheduler.end("turn")
    return tokens


@pytest.mark.parametrize("graphs", ["off", "fake"])
@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_turn_matches_generate_of_the_whole(
    kits: Callable[[str], Kit],
    picture: Callable[..., bytes],
    family: str,
    chunk: int,
    graphs: str,
) -> None:
    """Text, then one picture, then two more: only new tokens are prefilled."""
    kit = kits(family)
    scheduler = Scheduler(kit.runner(max_length=1024, graphs=graphs), chunk=chunk)
    talk = Talk(kit, "s")
    read = before = 0
    for number in range(4):
        pictures = [picture(40, 60 + n, seed=9 * number + n) for n in range(number)]
        each = talk.ask(f"What now, {number}?", *pictures if kit.images else ())
        tokens = serve(scheduler, each)
        assert tokens == kit.generate(each)
        talk.hear(tokens)
        resumed = scheduler.status()["tokens_resumed"]
        # All of what was asked before, and what is alike of the answer.
        assert resumed - read >= before
        read, before = resumed, each.prompt_tokens - 8


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_text_alone_match_generate(
    kits: Callable[[str], Kit], family: str
) -> None:
    """A vision model serves conversations without images."""
    kit = kits(family)
    scheduler = Scheduler(kit.runner(slots=1, max_length=1024))
    talk = Talk(kit, "s")
    for _ in range(3):
        each = talk.ask("And then?")
        tokens = serve(scheduler, each)
        assert tokens == kit.generate(each)
        talk.hear(tokens)
    assert scheduler.status()["tokens_resumed"] > 40


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_only_new_or_changed_pictures_are_encoded(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str
) -> None:
    """The same picture is not encoded again; a changed one is."""
    kit = kits(family)
    runner = kit.runner(max_length=1024)
    encode, encoded = runner._family.encode, []

    def noting(model: Any, tensors: Any, index: int, upload: Any) -> Any:
        encoded.append(index)
        return encode(model, tensors, index, upload)

    runner._family.encode = noting
    scheduler = Scheduler(runner)
    talk = Talk(kit, "s")
    for pictures, wanted in (
        ((picture(60, 60, seed=1), picture(50, 90, seed=2)), [0, 1]),
        ((), []),
        ((), []),
        ((picture(70, 60, seed=3),), [2]),
    ):
        each = talk.ask("And?", *pictures)
        tokens = serve(scheduler, each)
        assert tokens == kit.generate(each)
        assert encoded == wanted
        encoded.clear()
        talk.hear(tokens)
    talk.change(picture(60, 60, seed=1), picture(50, 90, seed=5))
    each = talk.ask("And now?")
    assert serve(scheduler, each) == kit.generate(each)
    assert encoded == [1, 2]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_among_others_match_generate(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str, seed: int
) -> None:
    """Turns of several conversations, with evictions, cancels and preemptions."""
    rng = random.Random(f"{family} {seed}")
    kit = kits(family)
    graphs: Any = rng.choice(["off", "fake"])
    runner = kit.runner(slots=4, max_length=1024, graphs=graphs)
    scheduler = Scheduler(runner, chunk=rng.choice([5, 16, 64]))
    talks = {name: Talk(kit, name) for name in "xyz"}
    live: dict[str, tuple[Any, list[int], list[int]]] = {}
    for number in range(24):
        name = rng.choice("xyz") if rng.random() < 0.75 else None
        key = name or f"k{number}"
        if key not in live:
            pictures = [picture(50, 70, seed=number)] * rng.choice([0, 0, 1])
            talk = talks[name] if name else Talk(kit, "once")
            each = talk.ask("So?", *pictures if kit.images else ())
            request = each.request | {"tenant": TENANTS.get(name, "b"), "max_tokens": 6}
            if name is None:
                request |= {"session": None}
            scheduler.start(key, request, dict(each.tensors))
            live[key] = talk, kit.generate(each, 6), []
        for _ in range(rng.randint(1, 9)):
            step(scheduler, live)
        if live and rng.random() < 0.2:
            gone = rng.choice(list(live))
            scheduler.end(gone)
            live[gone][0].hear([])
            del live[gone]
    while scheduler.busy:
        step(scheduler, live)
    status = scheduler.status()
    assert status["tokens_resumed"] > 0
    assert status["slots_free"] == 4


def step(
    scheduler: Scheduler, live: dict[str, tuple[Any, list[int], list[int]]]
) -> None:
    """Take one step, and compare its outputs."""
    for output in scheduler.step():
        talk, wanted, got = live[output.key]
        got += tokens_of(output)
        assert got == wanted[: len(got)]
        if output.finish is not None:
            assert got == wanted
            talk.hear(got)
            scheduler.end(output.key)
            del live[output.key]


@pytest.mark.parametrize("chunk", [3, 11])
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_prompt_matches_generate(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str, chunk: int
) -> None:
    """Preempted at any step before its image is prefilled, for several tenants."""
    kit = kits(family)
    pictures = [picture(60, 70, seed=1), picture(50, 30, seed=2)] if kit.images else []
    long = kit.prepare("What do you see in all of these, and why?", *pictures)
    short = kit.prepare("So?", *pictures[1:])
    wanted = {False: kit.generate(long), True: kit.generate(short, 1)}
    runner = kit.runner(slots=2)
    preempted = 0
    for steps in range(1, 9, 2):
        scheduler = Scheduler(runner, chunk=chunk)
        got: dict[str, list[int]] = {}
        for key in ("a1", "a2", *(f"b{n}" for n in range(2))):
            got[key] = []
            each = short if key[0] == "b" else long
            count = 1 if key[0] == "b" else COUNT
            request = each.request | {"tenant": key[0], "max_tokens": count}
            if key[0] == "b":
                request["tenant"] = key
            scheduler.start(key, request, dict(each.tensors))
            for _ in range(steps if key != "a1" else 0):
                for output in scheduler.step():
                    got[output.key] += tokens_of(output)
        while scheduler.busy:
            for output in scheduler.step():
                got[output.key] += tokens_of(output)
        assert got == {key: wanted[key[0] == "b"] for key in got}
        preempted += scheduler.status()["preempted"]
        assert scheduler.status()["payload_bytes"] == 0
    assert preempted >= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_zeroed_after_their_request(
    kits: Callable[[str], Kit], family: str
) -> None:
    """A shorter turn zeroes the rest of its row, and an eviction the whole row."""
    kit = kits(family)
    runner = kit.runner(slots=2)
    scheduler = Scheduler(runner)
    long = kit.processor.prepare(
        Chat([Message("user", ["word " * 40])], COUNT, session="s")
    )
    short = kit.processor.prepare(Chat([Message("user", ["word"])], 1, session="s"))
    serve(scheduler, long)
    serve(scheduler, short)
    rows = torch.stack(
        [layer.keys[:2].abs().sum((1, 3)) for layer in runner.cache.layers]
    )
    written = (rows.sum((0, 1)) > 0).sum()
    assert written <= short.prompt_tokens + 1
    for key in ("a", "b"):
        scheduler.start(key, short.request | {"session": None}, {})
    while scheduler.busy:
        scheduler.step()
    assert scheduler.status()["slots_free"] == 2
    assert not any(layer.keys[:2].any() for layer in runner.cache.layers)
