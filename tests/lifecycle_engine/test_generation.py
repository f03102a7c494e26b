"""The options of a checkpoint's generation config: applied, or rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_kit import Kit, load_config, load_model, tokens_of  # noqa: E402

from lifecycle_engine import (  # noqa: E402
    ChatProcessor,
    Scheduler,
)

TEXTS = ("see", "and what of a longer one? " * 3, "Hello there.")
# Options by the tokens that are written without them, so that they change something.
RULES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "penalty": lambda _: {"repetition_penalty": 1.3},
    "reward": lambda _: {"repetition_penalty": 0.8},
    "min-length": lambda made: {"min_length": 45, "eos_token_id": made},
    "min-new-tokens": lambda made: {"min_new_tokens": 3, "eos_token_id": made},
    "never": lambda made: {"suppress_tokens": [*made[:9], 99999, -1]},
    "never-first": lambda made: {"begin_suppress_tokens": made},
    "all": lambda made: {
        "repetition_penalty": 1.2,
        "min_new_tokens": 5,
        "suppress_tokens": made[:2],
        "begin_suppress_tokens": made[2:],
        "eos_token_id": [*made, 576, 31],
    },
    "ends-outside": lambda made: {"eos_token_id": [made[5], 99999, -1]},
}


@pytest.mark.parametrize("rules", RULES)
def test_generation_config_is_applied(
    kits: Callable[[str], Kit], tmp_path: Path, rules: str
) -> None:
    """With any option, chunk size and batch: the tokens of `generate`."""
    plain = kits("qwen3")
    prepared = [plain.prepare(text) for text in TEXTS]
    free = [plain.generate(each) for each in prepared]
    asked = RULES[rules]([token for tokens in free for token in tokens])
    kit = plain.copied(tmp_path, generation_config=asked)
    prepared = [kit.prepare(text) for text in TEXTS]
    wanted = [kit.generate(each) for each in prepared]
    assert wanted != free
    for chunk, slots, graphs in ((7, 4, "off"), (512, 1, "off"), (1, 3, "fake")):
        served = kit.serve(prepared, chunk=chunk, slots=slots, graphs=graphs)
        assert served == wanted


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_penalty_is_applied_to_image_prompts(
    kits: Callable[[str], Kit],
    tmp_path: Path,
    picture: Callable[..., bytes],
    family: str,
) -> None:
    """Image tokens count as any others."""
    penalty = {"repetition_penalty": 1.1}
    kit = kits(family).copied(tmp_path, generation_config=penalty)
    prepared = [kit.prepare("see"), kit.prepare("see", picture(50, 80))]
    served = kit.serve(prepared, chunk=9, graphs="fake")
    assert served == [kit.generate(each) for each in prepared]


def test_penalty_counts_the_contents_of_a_cached_slot(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """A resumed turn is penalised for all tokens of the conversation."""
    penalty = {"repetition_penalty": 1.3}
    kit = kits("qwen3").copied(tmp_path, generation_config=penalty)
    scheduler = Scheduler(kit.runner(slots=1), chunk=8)
    first, second = kit.prepare("see"), kit.prepare("see")
    said = answered(scheduler, "a", first.request | {"session": "talk"})
    second.request["input_ids"] += [*said, 300, 301, 302]
    again = answered(scheduler, "b", second.request | {"session": "talk"})
    assert again == kit.generate(second)
    assert scheduler.status()["tokens_resumed"] > 0


def answered(scheduler: Scheduler, key: str, request: dict[str, Any]) -> list[int]:
    """The tokens of a request that runs alone."""
    scheduler.start(key, request, {})
    tokens: list[int] = []
    while scheduler.busy:
        tokens += [token for output in scheduler.step() for token in tokens_of(output)]
    return tokens


def test_log_probabilities_are_the_models_own(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """A suppressed token is reported with the model's probability, not minus infinity."""
    never = {"suppress_tokens": list(range(1000))}
    kit = kits("qwen3").copied(tmp_path, generation_config=never)
    scheduler = Scheduler(kit.runner(), chunk=64)
    each = kit.prepare("see", logprobs=20, ignore_eos=True)
    scheduler.start("a", each.request, {})
    items = []
    while scheduler.busy:
        for output in scheduler.step():
            items += [item for item in output.items if "token" in item]
    assert len(items) == each.request["max_tokens"]
    assert all(item["token"] >= 1000 for item in items)
    values = [value for item in items for _, value in item["top"]]
    assert all(-1e9 < value <= 0 for value in values)
    assert min(token for item in items for token, _ in item["top"]) < 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id must be one token id"),
        ({"eos_token_id": [[2]]}, "eos_token_id must be one token id"),
        ({"eos_token_id": 2.0}, "eos_token_id must be one token id"),
        ({"suppress_tokens": ["1"]}, "suppress_tokens must be one token id"),
        ({"begin_suppress_tokens": [None]}, "begin_suppress_tokens must be one"),
        ({"min_length": "x"}, "min_length is 'x'; it must be a count"),
        ({"min_new_tokens": 1.5}, "min_new_tokens is 1.5; it must be"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty is '1.1'; it must be"),
    ],
)
def test_options_of_a_wrong_type_are_rejected(
    kits: Callable[[str], Kit], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Otherwise some fail only at the first request."""
    shutil.copytree(kits("qwen3").folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(options))
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path)
    if "eos_token_id" in options:
        with pytest.raises(ValueError, match=message):
            ChatProcessor(tmp_path)


def test_model_without_generation_config_ends_where_its_config_says(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """As `generate`; an end token outside the vocabulary is ignored."""
    plain = kits("qwen3")
    free = plain.generate(plain.prepare("see"))
    ends = {"eos_token_id": [free[5], 99999]}
    folder = plain.copied(tmp_path, config=ends).folder
    (folder / "generation_config.json").unlink()
    processor = ChatProcessor(folder)
    assert processor._stop_ids == [free[5]]
    kit = object.__new__(Kit)
    kit.processor, kit.model = processor, load_model(folder, device="cpu", dtype="auto")
    each = kit.prepare("see")
    (served,) = kit.serve([each], chunk=64)
    assert served == kit.generate(each) == free[: free.index(free[5])]


def test_default_end_token_of_a_config_class_is_ignored(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """Where neither file names an end token, the tokenizer's is used."""
    plain = kits("qwen3")
    shutil.copytree(plain.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"model_type": "llama"}
    values.pop("eos_token_id", None)
    path.write_text(json.dumps(values))
    processor = ChatProcessor(tmp_path)
    ends = processor._tokenizer.eos_token_id
    assert load_config(tmp_path).eos_token_id not in (ends, None)
    model = load_model(tmp_path, device="cpu", dtype="float32")
    assert model.generation_config.eos_token_id is None
    assert processor._stop_ids == [ends]


def test_option_in_the_model_config_is_refused_before_loading(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """Older checkpoints have their generation options there."""
    config = json.loads((kits("qwen3").folder / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"no_repeat_ngram_size": 3}))
    with pytest.raises(
        ValueError, match="has no_repeat_ngram_size, .*or of config.json"
    ):
        load_config(tmp_path)
