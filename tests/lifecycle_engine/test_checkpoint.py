from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lifecycle_engine import (  # noqa: E402
    Chat,
    ChatProcessor,
    Message,
    Prompt,
    TransformersRunner,
)
from tiny_checkpoint import FAMILIES, Sizes, build, cached  # noqa: E402

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
    """Building uses its own seed and leaves the global generator unchanged."""
    torch.manual_seed(1)
    wanted = torch.rand(3).tolist()
    torch.manual_seed(1)
    build(tmp_path, seed=9, sizes=SMALL)
    assert torch.rand(3).tolist() == wanted


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m tiny_checkpoint`."""
    return subprocess.run(
        [sys.executable, "-m", "tiny_checkpoint", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_names_families_in_its_help() -> None:
    """The help of the command lists every family."""
    done = command("--help")
    assert [name for name in FAMILIES if name not in done.stdout] == []


def test_says_that_no_checkpoint_can_be_written() -> None:
    """The error names the folder, without a traceback."""
    done = command("/dev/null/x")
    assert done.returncode == 1
    assert "name another DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_refuses_unknown_family(tmp_path: Path) -> None:
    """The error for an unknown family lists the known ones."""
    done = command(tmp_path / "x", "--family", "nope")
    assert done.returncode == 2
    assert "qwen2_5_vl" in done.stderr
    assert not (tmp_path / "x").exists()


def test_builds_cached_checkpoint_once(tmp_path: Path) -> None:
    """The cached checkpoint is built once and then reused."""
    folder = cached("llama", tmp_path)
    built = (folder / "config.json").stat()
    assert cached("llama", tmp_path) == folder
    assert (folder / "config.json").stat() == built
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def test_build_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Building writes nothing to the terminal."""
    build(tmp_path, sizes=SMALL)
    assert capfd.readouterr() == ("", "")


def test_checkpoint_is_small_and_names_real_classes(checkpoint: Path) -> None:
    """The folder has the files of a downloaded one, in a few megabytes."""
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
    """Nothing depends on the default sizes."""
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
    """The error for an unknown family lists the known ones."""
    with pytest.raises(ValueError, match="known are qwen2_5_vl"):
        build(tmp_path / "x", "gpt")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 299}, {"heads": 3}, {"hidden_size": 65}]
)
def test_sizes_that_do_not_fit_raise(sizes: dict[str, int]) -> None:
    """Impossible sizes are rejected at once."""
    with pytest.raises(ValueError, match=r"must be|needed"):
        Sizes(**sizes)
