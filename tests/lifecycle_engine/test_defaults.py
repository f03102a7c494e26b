"""How requests draw that do not say: as the checkpoint's own files have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


pytest.importorskip("transformers")


from engine_kit import Kit  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lifecycle_engine import ChatDefaults, defaults_of  # noqa: E402
from lifecycle_engine.cli import cli  # noqa: E402

PLAIN = ChatDefaults()
SILENT = SimpleNamespace(temperature=None, top_p=None, top_k=None, min_p=None)


def of(folder: Path, name: str = "generation_config", **options: Any) -> ChatDefaults:
    """The defaults of a checkpoint whose file of this name has these options."""
    (folder / f"{name}.json").write_text(json.dumps(options))
    return defaults_of(folder)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, PLAIN),
        ({"temperature": None, "top_k": None, "eos_token_id": 3}, PLAIN),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            ChatDefaults(temperature=0.7, top_p=0.8, top_k=20),
        ),
        (
            {"temperature": 1e-6, "min_p": 0.1},
            ChatDefaults(temperature=1e-6, min_p=0.1),
        ),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8},
            ChatDefaults(temperature=0.0, top_p=0.8),
        ),
        ({"typical_p": 1.0, "eta_cutoff": 0.0, "top_h": None}, PLAIN),
    ],
)
def test_takes_what_the_file_says_and_no_more(
    tmp_path: Path, options: dict[str, Any], wanted: ChatDefaults
) -> None:
    """What it leaves out is as OpenAI's, whatever a class of transformers fills in."""
    assert of(tmp_path, **options) == wanted


def test_takes_the_config_of_the_model_where_there_is_no_other(tmp_path: Path) -> None:
    """As in older checkpoints."""
    assert of(tmp_path, "config", top_k=7) == ChatDefaults(top_k=7)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": -1}, "temperature of -1; expected 0 to 100"),
        ({"temperature": "0.7"}, "temperature of '0.7'"),
        ({"top_p": True}, "top_p of True; expected 0 to 1"),
        ({"top_k": 20.5}, "top_k of 20.5"),
        ({"min_p": 2}, "min_p of 2"),
        ({"typical_p": 0.9}, "has typical_p, which is not supported"),
        ({"epsilon_cutoff": 0.01}, "has epsilon_cutoff"),
    ],
)
def test_refuses_what_it_cannot_draw_by(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    """With how to serve it all the same."""
    with pytest.raises(ValueError, match=told) as caught:
        of(tmp_path, **options)
    assert "--sampling-defaults openai" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_refuses_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    """By its name."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^generation_config.json is n"):
        defaults_of(tmp_path)


def test_serve_says_what_it_cannot_draw_by(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """Before anything is started."""
    kit = kits("qwen3").copied(tmp_path, generation_config={"typical_p": 0.9})
    result = CliRunner().invoke(cli, ["serve", "--checkpoint", str(kit.folder)])
    assert result.exit_code == 1
    assert "cannot be served: generation_config.json has typical_p" in result.stderr


def test_request_goes_before_defaults() -> None:
    """Each option for itself; 0 is said, too, and -1 is as good as 0."""
    defaults = ChatDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)
    assert defaults.sampling(SILENT) == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.1,
    }
    said = SimpleNamespace(temperature=0.0, top_p=None, top_k=-1, min_p=0.0)
    wanted = {"temperature": 0.0, "top_p": 0.8, "top_k": 0, "min_p": 0.0}
    assert defaults.sampling(said) == wanted
    assert ChatDefaults(top_k=-1).sampling(SILENT)["top_k"] == 0
