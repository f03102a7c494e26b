"""One tiny checkpoint and one loaded model for the whole run."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint, built once."""
    pytest.importorskip("torch").set_num_threads(1)
    pytest.importorskip("transformers")
    from tiny_checkpoint import build

    return build(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Any:
    """The model of that checkpoint; runners of one test share nothing else."""
    from lifecycle_engine import TransformersRunner

    return TransformersRunner.load(checkpoint, slots=1, max_length=64).model


@pytest.fixture(scope="session")
def processor(checkpoint: Path) -> Any:
    """Tokenizer and image processor of that checkpoint."""
    from lifecycle_engine import ChatProcessor

    return ChatProcessor(checkpoint)


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A function that gives the kit of a family, built once."""
    pytest.importorskip("torch").set_num_threads(1)
    from engine_kit import Kit

    made: dict[str, Kit] = {}

    def kit(family: str) -> Kit:
        if family not in made:
            made[family] = Kit(tmp_path_factory.mktemp(family), family)
        return made[family]

    return kit


@pytest.fixture(scope="module")
def prompts(
    kits: Callable[[str], Any], picture: Callable[..., bytes]
) -> Callable[[str], list[tuple[Any, list[int]]]]:
    """Return a function from a family to prompts and the tokens of `generate`."""
    made: dict[str, list[tuple[Any, list[int]]]] = {}

    def prompts(family: str) -> list[tuple[Any, list[int]]]:
        kit = kits(family)
        if family not in made:
            prepared = [
                kit.prepare("Hello there."),
                kit.prepare("Write a long story about a heap, and mind the order."),
            ]
            if kit.images:
                prepared += [
                    kit.prepare("What is this?", picture(90, 120, seed=1)),
                    kit.prepare("And this?", picture(211, 61, seed=2)),
                    kit.prepare(
                        "Compare.", picture(64, 64, seed=3), picture(131, 90, seed=4)
                    ),
                    kit.prepare("", *[picture(30, 41, seed=n) for n in range(4)]),
                ]
            made[family] = [(each, kit.generate(each)) for each in prepared]
        return made[family]

    return prompts


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    """A function that encodes a noisy picture; the same arguments, the same bytes."""
    image_module = pytest.importorskip("PIL.Image")

    def make(width: int, height: int, *, seed: int = 0, kind: str = "PNG") -> bytes:
        noise = random.Random(seed).randbytes(width * height * 3)
        image = image_module.frombytes("RGB", (width, height), noise)
        out = io.BytesIO()
        image.save(out, kind)
        return out.getvalue()

    return make


@pytest.fixture(scope="session")
def prepare(processor: Any) -> Callable[..., Any]:
    """A function from a text and pictures to a `Prepared`."""
    from lifecycle_engine import Chat, Message

    def make(text: str, *pictures: bytes, max_tokens: int = 24) -> Any:
        chat = Chat([Message("user", [*pictures, text])], max_tokens=max_tokens)
        return processor.prepare(chat)

    return make


@pytest.fixture(scope="session")
def prepared(prepare: Callable[..., Any], picture: Callable[..., bytes]) -> list[Any]:
    """Six prompts: text, one image, two images, each short and longer."""
    return [
        prepare("Hello there."),
        prepare("Write a long story about a heap and a queue, and mind the order."),
        prepare("What is this?", picture(90, 120, seed=1)),
        prepare("And this?", picture(200, 61, seed=2)),
        prepare("Compare.", picture(64, 64, seed=3), picture(130, 90, seed=4)),
        prepare("Which is larger?", picture(30, 300, seed=5), picture(28, 28, seed=6)),
    ]


@pytest.fixture(scope="session")
def generate(model: Any) -> Callable[..., list[int]]:
    """Greedy tokens by transformers' own `generate`, the oracle."""
    torch = pytest.importorskip("torch")
    on_cpu = model

    def run(prepared: Any, count: int, *, model: Any = on_cpu) -> list[int]:
        ids = torch.tensor([prepared.request["input_ids"]], device=model.device)
        extra = {
            name: torch.from_numpy(tensor).to(model.device)
            for name, tensor in prepared.tensors.items()
        }
        if extra:
            extra["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            **extra,
        )
        model.model.rope_deltas = None
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    return run


@pytest.fixture(scope="session")
def expected(prepared: list[Any], generate: Callable[..., list[int]]) -> list[Any]:
    """The oracle's 24 tokens for each of the six prompts."""
    return [generate(each, 24) for each in prepared]
