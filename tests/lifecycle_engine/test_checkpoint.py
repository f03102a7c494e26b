from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lifecycle_engine import commands  # noqa: E402
from lifecycle_engine.chats.chat_processor import ChatProcessor  # noqa: E402
from lifecycle_engine.models.checkpoint import FAMILIES, Sizes, build  # noqa: E402
from lifecycle_engine.models.transformers_runner import TransformersRunner  # noqa: E402
from lifecycle_engine.processor import Chat, Message  # noqa: E402
from lifecycle_engine.runner import Prompt  # noqa: E402

SMALL = Sizes(vocab_size=420, hidden_size=32, layers=1, heads=2)


def files(folder: Path) -> dict[str, bytes]:
    """Read a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_builds_same_bytes(tmp_path: Path, family: str) -> None:
    """A checkpoint is a function of its arguments, file by file."""
    first = files(build(tmp_path / "a", family, 3, sizes=SMALL))
    assert files(build(tmp_path / "b", family, 3, sizes=SMALL)) == first
    other = files(build(tmp_path / "c", family, 4, sizes=SMALL))
    assert [name for name in first if first[name] != other[name]] == [
        "model.safetensors"
    ]


def test_build_leaves_global_randomness_alone(tmp_path: Path) -> None:
    """Building draws from its own seed and leaves the process's generator as it was."""
    torch.manual_seed(1)
    wanted = torch.rand(3).tolist()
    torch.manual_seed(1)
    build(tmp_path, seed=9, sizes=SMALL)
    assert torch.rand(3).tolist() == wanted


def test_names_families_in_its_help() -> None:
    """Whoever asks for a checkpoint is told what can be had."""
    options = inspect.signature(commands.checkpoint, eval_str=True).parameters
    (said,) = options["family"].annotation.__metadata__
    assert [name for name in FAMILIES if name not in said.help] == []


def test_build_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Building writes nothing to the terminal."""
    build(tmp_path, sizes=SMALL)
    assert capfd.readouterr() == ("", "")


def test_checkpoint_is_small_and_names_real_classes(checkpoint: Path) -> None:
    """The folder has what a downloaded one has, in a few megabytes."""
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "Qwen2Tokenizer"
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) < 4e6


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(vocab_size=640, hidden_size=96, layers=3, heads=6, vision_hidden_size=64),
        Sizes(hidden_size=32, layers=1, heads=2),
    ],
    ids=["wider", "one-layer"],
)
def test_other_sizes_match_generate(
    tmp_path: Path,
    picture: Callable[..., bytes],
    generate: Callable[..., list[int]],
    sizes: Sizes,
) -> None:
    """Nothing depends on the default sizes: other checkpoints stream alike."""
    runner = TransformersRunner.load(build(tmp_path, sizes=sizes), max_length=256)
    chat = Chat([Message("user", [picture(99, 150), "see"])], max_tokens=16)
    prepared = ChatProcessor(tmp_path).prepare(chat)
    prompt = Prompt(prepared.request["input_ids"], dict(prepared.tensors))
    emitted = [runner.prefill(7, prompt, 0, len(prompt.input_ids))]
    while len(emitted) < 16:
        emitted += runner.decode([7])
    assert [each.token for each in emitted] == generate(
        prepared, 16, model=runner.model
    )


def test_unknown_family_raises(tmp_path: Path) -> None:
    """A family that cannot be built is told with those that can."""
    with pytest.raises(ValueError, match="known are qwen2_5_vl"):
        build(tmp_path / "x", "gpt")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 299}, {"heads": 3}, {"hidden_size": 65}]
)
def test_sizes_that_do_not_fit_raise(sizes: dict[str, int]) -> None:
    """Sizes that no model could have are refused when they are stated."""
    with pytest.raises(ValueError, match=r"must be|needed"):
        Sizes(**sizes)
