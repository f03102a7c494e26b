"""What a checkpoint's own generation config asks for: kept to, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_kit import Kit, tokens_of  # noqa: E402

from lifecycle_engine.chats.chat_processor import ChatProcessor  # noqa: E402
from lifecycle_engine.models.generation import Ruled, Rules  # noqa: E402
from lifecycle_engine.models.loading import load_config, load_model  # noqa: E402
from lifecycle_engine.scheduler import Scheduler  # noqa: E402

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
def test_generation_config_is_kept_to(
    kits: Callable[[str], Kit], tmp_path: Path, rules: str
) -> None:
    """With whatever it asks for, in any chunks, slots and company: the same tokens."""
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
def test_penalty_is_kept_to_beside_images(
    kits: Callable[[str], Kit],
    tmp_path: Path,
    picture: Callable[..., bytes],
    family: str,
) -> None:
    """As in released ones, where the tokens of images count as any others."""
    penalty = {"repetition_penalty": 1.1}
    kit = kits(family).copied(tmp_path, generation_config=penalty)
    prepared = [kit.prepare("see"), kit.prepare("see", picture(50, 80))]
    served = kit.serve(prepared, chunk=9, graphs="fake")
    assert served == [kit.generate(each) for each in prepared]


def test_penalty_counts_what_a_kept_slot_holds(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """A second turn, read from where the first one ended, is penalised for all of it."""
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
    """The tokens of a request that is alone."""
    scheduler.start(key, request, {})
    tokens: list[int] = []
    while scheduler.busy:
        tokens += [token for output in scheduler.step() for token in tokens_of(output)]
    return tokens


def test_log_probabilities_are_the_models_own(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """What is forbidden is told with what the model gave it, never as minus infinity."""
    never = {"suppress_tokens": list(range(1000))}
    kit = kits("qwen3").copied(tmp_path, generation_config=never)
    scheduler = Scheduler(kit.runner(), chunk=64)
    each = kit.prepare("see", logprobs=20, ignore_eos=True)
    scheduler.start("a", each.request, {})
    told = []
    while scheduler.busy:
        for output in scheduler.step():
            told += [item for item in output.items if "token" in item]
    assert len(told) == each.request["max_tokens"]
    assert all(item["token"] >= 1000 for item in told)
    values = [value for item in told for _, value in item["top"]]
    assert all(-1e9 < value <= 0 for value in values)
    assert min(token for item in told for token, _ in item["top"]) < 1000


def test_rules_in_half_precision_are_those_of_generate() -> None:
    """Where a penalty, rounded to eight bits, would make two tokens level."""
    logits = torch.tensor([[3.015625, 2.75, 0.0]], dtype=torch.bfloat16)
    ruled = Ruled(
        Rules(penalty=1.0965), slots=1, vocab_size=3, device=torch.device("cpu")
    )
    penalised = ruled.first(0, [0], logits)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.0965)
    wanted = processor(torch.tensor([[0]]), logits.float())
    assert torch.equal(penalised, wanted)
    assert penalised[0, 0] != penalised[0, 1]


REFUSED: dict[str, Any] = {
    "bad_words_ids": [[5]],
    "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [3, 1.5],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 2,
    "guidance_scale": 1.5,
    "no_repeat_ngram_size": 2,
    "num_beams": 3,
    "sequence_bias": [[[5], 10.0]],
    "stop_strings": ["a"],
    "token_healing": True,
    "watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_option_that_would_change_tokens_is_refused(
    kits: Callable[[str], Kit], tmp_path: Path, name: str
) -> None:
    """Before anything is loaded, with what is known and what to do."""
    config = transformers.GenerationConfig()
    for each, value in REFUSED.items():
        setattr(config, each, value if each == name else getattr(config, each))
    with pytest.raises(ValueError, match=f"has {name}, .* known are .*take it out"):
        Rules.of(config)
    (tmp_path / "config.json").write_text(
        (kits("qwen3").folder / "config.json").read_text()
    )
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({name: REFUSED[name]}))
    with pytest.raises(ValueError, match=f"has {name}, "):
        load_config(tmp_path)


def test_options_that_leave_tokens_alone_are_taken() -> None:
    """Those of sampling, which each request has of its own, and those that are off."""
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.3, top_k=5, num_beams=1, no_repeat_ngram_size=0
    )
    assert Rules.of(config) == Rules()
    for penalty in (0, -1.0):
        config.repetition_penalty = penalty
        with pytest.raises(ValueError, match="must be above 0"):
            Rules.of(config)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"eos_token_id": "x"}, "eos_token_id of other than token ids"),
        ({"eos_token_id": [[2]]}, "eos_token_id of other than token ids"),
        ({"eos_token_id": 2.0}, "eos_token_id of other than token ids"),
        ({"suppress_tokens": ["1"]}, "suppress_tokens of other than token ids"),
        ({"begin_suppress_tokens": [None]}, "begin_suppress_tokens of other than"),
        ({"min_length": "x"}, "min_length is 'x'; it must be a count"),
        ({"min_new_tokens": 1.5}, "min_new_tokens is 1.5; it must be"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty is '1.1'; it must be"),
    ],
)
def test_options_of_a_wrong_type_are_refused_in_a_sentence(
    kits: Callable[[str], Kit], tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    """Some failed at the first request only, others in a traceback."""
    shutil.copytree(kits("qwen3").folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(options))
    with pytest.raises(ValueError, match=told):
        load_config(tmp_path)
    if "eos_token_id" in options:
        with pytest.raises(ValueError, match=told):
            ChatProcessor(tmp_path)


def test_model_without_generation_config_ends_where_its_config_says(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """As `generate` does; an end that the vocabulary does not have is none."""
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


def test_end_that_only_the_class_of_a_config_has_is_none(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """Where neither file names one, the tokenizer's: `generate` knows of none then."""
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


def test_option_among_those_of_the_model_is_refused_before_it_is_loaded(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """Where older checkpoints have it, and `generate` looks without another file."""
    config = json.loads((kits("qwen3").folder / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"no_repeat_ngram_size": 3}))
    with pytest.raises(
        ValueError, match="has no_repeat_ngram_size, .*or of config.json"
    ):
        load_config(tmp_path)
