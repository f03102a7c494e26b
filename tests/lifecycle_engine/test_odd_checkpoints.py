from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_kit import Kit, family_of  # noqa: E402
from odd_configs import change_for  # noqa: E402

from tiny_checkpoint import FAMILIES  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_unreleased_checkpoint_matches_generate(
    tmp_path: Path, picture: Callable[..., bytes], family: str, seed: int
) -> None:
    """Any sizes and options of a family, text and odd pictures: the tokens of `generate`."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    kit = Kit(tmp_path, family, change=change_for(family, tmp_path, seed))
    prepared = [kit.prepare("see"), kit.prepare("and what of a longer one?")]
    if kit.images:
        odd = picture(rng.randint(20, 200), rng.randint(20, 200))
        prepared += [kit.prepare("see", odd, picture(40, 33)), kit.prepare("", odd)]
    wanted = [kit.generate(each) for each in prepared]
    for graphs in ("off", "fake"):
        chunk = rng.choice([1, 7, 13, 50])
        assert kit.serve(prepared, chunk=chunk, graphs=graphs) == wanted


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])
def test_model_without_any_state_to_cache_matches_generate(
    tmp_path: Path, picture: Callable[..., bytes], family: str
) -> None:
    """A cache without layers still has rows, which are packed, cached and freed."""

    def empty(config: Any) -> None:
        text = config.get_text_config()
        text.num_hidden_layers = 0
        if getattr(text, "layer_types", None):
            text.layer_types = []

    kit = Kit(tmp_path, family, change=empty)
    prepared = [kit.prepare("see"), kit.prepare("and what?")]
    if kit.images:
        prepared.append(kit.prepare("see", picture(50, 60)))
    assert kit.runner().cache.nbytes == 0
    for graphs in ("off", "fake"):
        served = kit.serve(prepared, chunk=5, graphs=graphs)
        assert served == [kit.generate(each) for each in prepared]


def test_llava_around_an_unknown_text_model_is_refused() -> None:
    """Its text model may transform the logits in an unsupported way."""
    from transformers import Gemma2Config, LlavaConfig, Qwen2Config

    assert family_of(LlavaConfig(text_config=Qwen2Config())).image_token is not None
    with pytest.raises(ValueError, match="text model is a gemma2; known are cohere, "):
        family_of(LlavaConfig(text_config=Gemma2Config()))
