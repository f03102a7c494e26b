"""How requests draw that do not say: as the checkpoint's own files have it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_kit import Kit  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lifecycle_engine.cli import cli  # noqa: E402
from lifecycle_engine.defaults import ChatDefaults, defaults_of  # noqa: E402
from lifecycle_engine.models.sampling import Sampler, choose  # noqa: E402
from lifecycle_engine.runner import Sampling  # noqa: E402

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
        ({"typical_p": 0.9}, "has typical_p, which is not known here"),
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


CUTS = [
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "temperature": 1.7},
    {"top_k": 9999},
    {"top_k": 1, "top_p": 0.1, "min_p": 1.0},
]


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_draws_as_often_as_generate(
    kits: Callable[[str], Kit],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Of a model's own logits: each token at as many of all chances as its share."""
    kit = kits("qwen3")
    prepared = kit.prepare("see")
    output = kit.model.generate(
        input_ids=torch.tensor([prepared.request["input_ids"]]),
        max_new_tokens=1,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **{"top_k": 0, **options},
    )
    shares = torch.softmax(output.scores[0][0].double(), dim=-1)
    asked = Sampling(**{"temperature": 1.0, "seed": 1, **options})
    lanes = 2000
    chances = iter([(at + 0.5) / lanes for at in range(lanes)])
    monkeypatch.setattr(Sampler, "chance", lambda _: next(chances))
    logits = output.logits[0].expand(lanes, -1)
    drawn = choose(logits, [Sampler(asked)] * lanes)
    counts = Counter(each.token for each in drawn)
    for token, share in enumerate(shares.tolist()):
        assert abs(counts[token] / lanes - share) < 1.5 / lanes
    assert sum(counts.values()) == lanes


def test_tokens_that_are_as_likely_as_the_last_are_drawn_from() -> None:
    """As `generate` does, whichever of them comes first."""
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    sampler = Sampler(Sampling(1.0, seed=1, top_k=2))
    drawn = {choose(logits, [sampler])[0].token for _ in range(300)}
    assert drawn == {0, 1, 2, 4}


def test_cuts_of_neighbours_change_no_draws() -> None:
    """Each lane is cut by its own request alone."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 0.5]])
    own = {"temperature": 1.0, "seed": 3, "top_k": 3, "min_p": 0.05}

    def draws(beside: list[Sampling]) -> list[int | None]:
        samplers = [*map(Sampler, beside), Sampler(Sampling(**own))]
        lanes = logits.expand(len(samplers), -1)
        return [choose(lanes, samplers)[-1].token for _ in range(60)]

    alone = draws([])
    assert draws([Sampling(1.0, top_k=1), Sampling(1.0, min_p=0.9)]) == alone
    assert set(alone) == {1, 2, 4}
