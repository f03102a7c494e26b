"""Models of text: what their layers see, how positions turn, and who makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_kit import Kit  # noqa: E402

from lifecycle_engine.models.families import family_of  # noqa: E402

_ALIKE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_ALIKE += ("num_attention_heads", "num_key_value_heads", "initializer_range")
_ALIKE += ("eos_token_id",)


def other(name: str, **options: Any) -> Callable[[Any], Any]:
    """The same sizes as another model of text."""

    def change(config: Any) -> Any:
        sizes = {each: getattr(config, each) for each in _ALIKE}
        ends = {"pad_token_id": 0, "bos_token_id": None}
        return getattr(transformers, f"{name}Config")(**sizes | ends | options)

    return change


def some_windows(config: Any) -> None:
    """Layers that see everything beside layers that see twenty positions."""
    text = config.get_text_config()
    text.use_sliding_window, text.sliding_window = True, 20
    text.layer_types = ["full_attention", "sliding_attention"]


def around_windows(config: Any) -> None:
    """Pictures in front of a text model that sees thirty positions."""
    config.text_config = other("Mistral", sliding_window=30)(config.text_config)


def growing(config: Any) -> None:
    """Frequencies that grow behind as many positions as are taken."""
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config.max_position_embeddings = 512


def two_sets(config: Any) -> None:
    """Other frequencies behind 512 positions of 4096."""
    half = config.hidden_size // config.num_attention_heads // 2
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1 + at / 10 for at in range(half)],
        "long_factor": [2 + at / 3 for at in range(half)],
        "original_max_position_embeddings": 512,
        "factor": 8.0,
    }
    config.max_position_embeddings = 4096


CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "mistral": ("llama", other("Mistral")),
    "mistral-window": ("llama", other("Mistral", sliding_window=9)),
    "qwen2-windows": ("qwen3", some_windows),
    "qwen2.5-vl-windows": ("qwen2_5_vl", some_windows),
    "llava-window": ("llava", around_windows),
    "dynamic": ("llama", growing),
    "longrope": ("llama", two_sets),
    "phi3-window": ("llama", other("Phi3", sliding_window=9)),
    "phi": ("qwen3", other("Phi")),
    "gemma": ("qwen3", other("Gemma", head_dim=24)),
    "olmo2": ("qwen3", other("Olmo2")),
    "smollm3": ("qwen3", other("SmolLM3")),
    "starcoder2-window": ("qwen3", other("Starcoder2", sliding_window=9)),
}


@pytest.mark.parametrize("case", CASES)
def test_text_model_matches_generate(
    tmp_path: Path, picture: Callable[..., bytes], case: str
) -> None:
    """In chunks and steps, together, whatever its layers see: the oracle's tokens."""
    torch.set_num_threads(1)
    family, change = CASES[case]
    kit = Kit(tmp_path, family, change=change)
    prepared = [kit.prepare("see"), kit.prepare("and what of a long one? " * 3)]
    if kit.images:
        prepared.append(kit.prepare("see", picture(50, 80), picture(40, 33)))
    wanted = [kit.generate(each) for each in prepared]
    for chunk, graphs in ((7, "off"), (512, "fake"), (1, "fake")):
        assert kit.serve(prepared, chunk=chunk, graphs=graphs) == wanted


@pytest.mark.parametrize("change", [growing, two_sets])
def test_frequencies_stay_where_they_are(tmp_path: Path, change: Any) -> None:
    """No length at which others' tokens would change is taken; a step asks nothing."""
    kit = Kit(tmp_path, "llama", change=change)
    assert kit.runner(max_length=None).max_length == 512
    with pytest.raises(ValueError, match="max_length is 513; the model takes 2 to 512"):
        kit.runner(max_length=513)
    kit.model.to("meta")
    kit.runner(graphs="fake").capture()


def test_layers_of_an_unknown_kind_are_refused() -> None:
    """They would run, and see what they should not."""
    config = transformers.Qwen3Config(num_hidden_layers=1)
    config.layer_types = ["chunked_attention"]
    with pytest.raises(ValueError, match="layers of chunked_attention; known are full"):
        family_of(config)
