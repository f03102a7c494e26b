"""Text models: attention windows, rotary positions and model families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_kit import Kit, family_of  # noqa: E402

from lifecycle_engine import Prompt, Sampling  # noqa: E402

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
    """Layers with full attention beside layers with a window of twenty positions."""
    text = config.get_text_config()
    text.use_sliding_window, text.sliding_window = True, 20
    text.layer_types = ["full_attention", "sliding_attention"]


def around_windows(config: Any) -> None:
    """A vision model over a text model with a window of thirty positions."""
    config.text_config = other("Mistral", sliding_window=30)(config.text_config)


def growing(config: Any) -> None:
    """Frequencies that depend on the length beyond the supported one."""
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config.max_position_embeddings = 512


def two_sets(config: Any) -> None:
    """Other frequencies after 512 of 4096 positions."""
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


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA3 = {"sliding_window": 9, "head_dim": 24, "final_logit_softcapping": 5.0}
GEMMA3 |= {"tie_word_embeddings": False}
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
    "cohere": ("qwen3", other("Cohere", logit_scale=0.3, use_qk_norm=True)),
    "cohere2": ("qwen3", other("Cohere2", logit_scale=0.3, sliding_window=9)),
    "gemma3": ("qwen3", other("Gemma3Text", **GEMMA3)),
    "glm": ("qwen3", other("Glm", head_dim=16, attention_bias=True)),
    "glm4": ("qwen3", other("Glm4", head_dim=16)),
    "granite": (
        "qwen3",
        other("Granite", logits_scaling=3.0, residual_multiplier=0.5),
    ),
    "mixtral-window": (
        "qwen3",
        other("Mixtral", num_local_experts=4, sliding_window=9),
    ),
    "olmo": ("qwen3", other("Olmo", clip_qkv=0.3)),
    "olmo3": ("qwen3", other("Olmo3", sliding_window=9)),
    "qwen2-moe": ("qwen3", other("Qwen2Moe", **EXPERTS)),
    "qwen3-moe": ("qwen3", other("Qwen3Moe", head_dim=24, **EXPERTS)),
    "stablelm": ("qwen3", other("StableLm", qk_layernorm=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_text_model_matches_generate(
    tmp_path: Path, picture: Callable[..., bytes], case: str
) -> None:
    """In any chunks and batches, with any attention: the tokens of `generate`."""
    torch.set_num_threads(1)
    family, change = CASES[case]
    kit = Kit(tmp_path, family, change=change)
    prepared = [kit.prepare("see"), kit.prepare("and what of a long one? " * 3)]
    if kit.images:
        prepared.append(kit.prepare("see", picture(50, 80), picture(40, 33)))
    wanted = [kit.generate(each) for each in prepared]
    for chunk, graphs in ((7, "off"), (512, "fake"), (1, "fake")):
        assert kit.serve(prepared, chunk=chunk, graphs=graphs) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 3
    if not kit.images:
        _check_logits(kit)


def _check_logits(kit: Kit) -> None:
    """The reported log probabilities are the model's own, including its scale."""
    each = kit.prepare("see", logprobs=0)
    ids = torch.tensor([each.request["input_ids"]])
    with torch.inference_mode():
        logits = kit.model(ids).logits[0, -1]
    runner = kit.runner()
    prompt = Prompt(each.request["input_ids"], {}, Sampling(logprobs=0))
    made = runner.prefill(0, prompt, 0, ids.shape[1])
    likeliest = torch.log_softmax(logits, dim=-1).max().item()
    assert made.item["logprob"] == pytest.approx(likeliest, abs=1e-4)


@pytest.mark.parametrize("change", [growing, two_sets])
def test_rope_frequencies_are_frozen(tmp_path: Path, change: Any) -> None:
    """Lengths that change other requests' tokens are rejected; no step synchronises."""
    kit = Kit(tmp_path, "llama", change=change)
    assert kit.runner(max_length=None).max_length == 512
    with pytest.raises(ValueError, match="max_length is 513; the model takes 2 to 512"):
        kit.runner(max_length=513)
    kit.model.to("meta")
    kit.runner(graphs="fake").capture()


def test_layers_of_an_unknown_kind_are_refused() -> None:
    """They would run with the wrong mask."""
    config = transformers.Qwen3Config(num_hidden_layers=1)
    config.layer_types = ["chunked_attention"]
    with pytest.raises(ValueError, match="layers of chunked_attention; known are full"):
        family_of(config)


def test_scale_of_a_text_model_is_left_out_behind_images(
    tmp_path: Path, picture: Callable[..., bytes]
) -> None:
    """As in transformers, whose LLaVA has its own head."""

    def around(config: Any) -> None:
        config.text_config = other("Granite", logits_scaling=3.0)(config.text_config)

    kit = Kit(tmp_path, "llava", change=around)
    _check_logits(kit)
    each = kit.prepare("see", picture(50, 80))
    assert kit.serve([each], chunk=9) == [kit.generate(each)]
