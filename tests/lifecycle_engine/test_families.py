from __future__ import annotations

import io
import json
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")


pytest.importorskip("transformers")


from engine_kit import COUNT, Kit, family_of, load_model, tokens_of  # noqa: E402
from hypothesis import HealthCheck, given, settings, strategies as st  # noqa: E402
from more_examples import TIMES  # noqa: E402

from lifecycle_asgi import estimate_memory  # noqa: E402
from lifecycle_engine import (  # noqa: E402
    BadChat,
    BadImage,
    Chat,
    ChatProcessor,
    MediaLimits,
    Message,
    Prompt,
    Scheduler,
    read_image_size,
)
from tiny_checkpoint import FAMILIES, Sizes  # noqa: E402

SEE = {"type": "text", "text": "see"}


WITH_IMAGES = [name for name in FAMILIES if name not in ("llama", "qwen3")]


@pytest.mark.parametrize("graphs", ["off", "fake"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_matches_generate(
    kits: Callable[[str], Kit],
    prompts: Callable[[str], Any],
    family: str,
    chunk: int,
    graphs: str,
) -> None:
    """Text and images, joining one by one, in any chunks: the tokens of `generate`."""
    pairs = prompts(family)
    kit = kits(family)
    served = kit.serve([each for each, _ in pairs], chunk=chunk, graphs=graphs)
    assert served == [expected for _, expected in pairs]


@pytest.mark.parametrize("family", FAMILIES)
def test_single_request_matches_generate(
    kits: Callable[[str], Kit], prompts: Callable[[str], Any], family: str
) -> None:
    """Each prompt alone gives the tokens of `generate`."""
    for each, expected in prompts(family):
        assert kits(family).serve([each], chunk=16, slots=1) == [expected]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_come_and_go_match_generate(
    kits: Callable[[str], Kit], prompts: Callable[[str], Any], family: str, seed: int
) -> None:
    """Random cancels and ENDs, in any phase, change no other tokens."""
    rng = random.Random(f"{family} {seed}")
    graphs: Any = rng.choice(["off", "fake"])
    runner = kits(family).runner(slots=3, graphs=graphs)
    scheduler = Scheduler(runner, chunk=rng.choice([1, 5, 16, 64]))
    pairs = prompts(family)
    wanted: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    leaving: list[tuple[int, str]] = []
    completed, pending, step = set(), 15, 0
    while pending or scheduler.busy:
        step += 1
        if pending and rng.random() < 0.5:
            pending -= 1
            each, expected = rng.choice(pairs)
            key, count = f"r{pending}", rng.randint(1, COUNT)
            scheduler.start(key, each.request | {"max_tokens": count}, each.tensors)
            wanted[key], got[key] = expected[:count], []
            if rng.random() < 0.4:
                leaving.append((step + rng.randrange(50), key))
        for _, key in [each for each in leaving if each[0] == step]:
            rng.choice([scheduler.cancel, scheduler.end])(key)
        for output in scheduler.step():
            got[output.key] += tokens_of(output)
            if output.finish is not None and output.finish.reason == "completed":
                completed.add(output.key)
    assert len(completed) >= 5
    for key, tokens in got.items():
        whole = wanted[key] if key in completed else wanted[key][: len(tokens)]
        assert tokens == whole
    assert not runner._rows
    assert not any(layer.keys[:3].any() for layer in runner.cache.layers)


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_tokens_depend_on_the_pixels(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str
) -> None:
    """Two pictures of one size give two texts, so equal tokens are meaningful."""
    kit = kits(family)
    a, b = (kit.prepare("?", picture(90, 90, seed=seed)) for seed in (1, 2))
    assert kit.generate(a) != kit.generate(b)


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_keep_list_is_all_that_decoding_needs(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str
) -> None:
    """After the last image only the keep list is left, and decoding continues."""
    kit = kits(family)
    runner = kit.runner()
    each = kit.prepare("And now?", picture(90, 90))
    prompt = Prompt(each.request["input_ids"], dict(each.tensors))
    scheduler = Scheduler(runner, chunk=512)
    scheduler.start("a", each.request, dict(each.tensors))
    (output,) = scheduler.step()
    (task,) = scheduler._running.values()
    left = task.request.prompt.tensors
    paths = [f"{name}.{key}" for name, nested in left.items() for key in nested]
    assert paths == list(runner.keep)
    tokens = tokens_of(output)
    while scheduler.busy:
        tokens += [token for out in scheduler.step() for token in tokens_of(out)]
    assert tokens == kit.generate(each)
    assert runner.needs_tensors_until(prompt) < len(prompt.input_ids)


@pytest.mark.parametrize("stop", [5, 20, 30])
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_prefill_can_restart_before_the_strip(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str, stop: int
) -> None:
    """A partly prefilled prompt restarts, in the same slot or another."""
    kit = kits(family)
    runner = kit.runner()
    each = kit.prepare("And now?", picture(90, 90), picture(60, 60))
    prompt = Prompt(each.request["input_ids"], dict(each.tensors))
    assert stop < runner.needs_tensors_until(prompt)
    for slot in (0, 0, 1):
        runner.prefill(slot, prompt, 0, stop)
    length = len(prompt.input_ids)
    tokens = [runner.prefill(1, prompt, stop, length).token]
    while len(tokens) < COUNT:
        tokens += [emitted.token for emitted in runner.decode([1])]
    assert tokens == kit.generate(each)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rope_deltas_stay_off_the_module(
    kits: Callable[[str], Kit], prompts: Callable[[str], Any], family: str
) -> None:
    """Positions are stored with their request, where later ones cannot overwrite them."""
    kit = kits(family)
    pairs = prompts(family)
    kit.serve([each for each, _ in pairs], chunk=16)
    assert kit.model.model.rope_deltas is None


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_text_is_the_tokenizers_own(
    kits: Callable[[str], Kit], prompts: Callable[[str], Any], family: str
) -> None:
    """Token by token, the text equals that of the whole sequence."""
    kit = kits(family)
    for _, tokens in prompts(family):
        detokenizer = kit.processor.detokenizer()
        pieces = [detokenizer.push([token]) for token in tokens]
        whole = "".join(pieces) + detokenizer.flush()
        assert whole == kit.processor._tokenizer.decode(tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_text_model_refuses_images(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str
) -> None:
    """A text model rejects an image before decoding it."""
    kit = kits(family)
    with pytest.raises(BadChat, match="takes no images"):
        kit.prepare("What is this?", b"no image at all")
    with pytest.raises(ValueError, match="takes no images"):
        kit.runner().check(Prompt([1], {"pixel_values": memoryview(b"")}))


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_prices_photos_by_what_the_model_sees(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str
) -> None:
    """The tensors of a photo take what was charged for them, or nearly."""
    kit, photo = kits(family), picture(1600, 1200)
    size = read_image_size(photo, MediaLimits(), param="")
    charged = estimate_memory([size], kit.processor.media).tensors
    assert 0.9 < kit.prepare("see", photo).nbytes / charged <= 1.0


@pytest.mark.parametrize("family", WITH_IMAGES)
@pytest.mark.parametrize("size", [(2, 2), (31, 45)])
def test_prices_icons_by_what_the_model_scales_them_to(
    kits: Callable[[str], Kit],
    picture: Callable[..., bytes],
    family: str,
    size: tuple[int, int],
) -> None:
    """The tensors of many tiny pictures take no more than was charged for them."""
    kit, icon = kits(family), picture(*size)
    sizes = [read_image_size(icon, MediaLimits(), param="")] * 4
    charged = estimate_memory(sizes, kit.processor.media).tensors
    assert kit.prepare("see", *[icon] * 4).nbytes <= charged


@pytest.mark.parametrize("size", [(4, 720), (1100, 6), (199, 30), (150, 29), (33, 40)])
def test_llava_scales_no_more_of_a_thin_picture_than_it_sees(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], size: tuple[int, int]
) -> None:
    """The middle is that of transformers, which scales all of it up first."""
    images: Any = kits("llava").processor._images
    image = Image.open(io.BytesIO(picture(*size)))
    expected = images._images(images=[image], return_tensors="np")["pixel_values"]
    tracemalloc.start()
    try:
        made = images.tensors(image, 1)["pixel_values"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(made, expected, atol=0.1)  # of rounding: a few shades
    assert peak < 6 * made.nbytes


def test_llava_refuses_what_is_too_thin(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], tmp_path: Path
) -> None:
    """Also where it would be padded to a square."""
    folder = tmp_path / "copy"
    shutil.copytree(kits("llava").folder, folder)
    line, banner = (
        Chat([Message("user", [picture(side, 50)])], max_tokens=1)
        for side in (10_050, 7000)
    )
    processor = ChatProcessor(folder)
    with pytest.raises(BadImage, match="200 times the shorter one: crop it"):
        processor.prepare(line)
    assert len(processor.prepare(banner).tensors["pixel_values"]) == 1
    path = folder / "preprocessor_config.json"
    options = json.loads(path.read_text())
    options |= {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    path.write_text(json.dumps(options))
    with pytest.raises(BadImage, match="padded to 7000 x 7000 pixels"):
        ChatProcessor(folder).prepare(banner)


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_copies_no_photo_to_cut_it(
    kits: Callable[[str], Kit],
    picture: Callable[..., bytes],
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a thin picture is cut; a copy of any other was not charged."""
    kit, photo = kits(family), picture(160, 120)
    monkeypatch.delattr(Image.Image, "crop")
    assert kit.prepare("see", photo).nbytes


def test_llava_is_prepared_as_by_transformers(
    kits: Callable[[str], Kit], picture: Callable[..., bytes]
) -> None:
    """Tokens and pixels equal those of transformers' own processor."""
    from transformers import LlavaProcessor

    kit = kits("llava")
    own = LlavaProcessor(
        image_processor=kit.processor._images._images,
        tokenizer=kit.processor._tokenizer,
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    raw = [picture(90, 120, seed=1), picture(33, 40, seed=2)]
    text = kit.processor._tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}] * 2 + [SEE]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    opened = [Image.open(io.BytesIO(data)) for data in raw]
    whole = own(images=opened, text=text, return_tensors="np")
    made = kit.prepare("see", *raw)
    assert made.request["input_ids"] == whole["input_ids"][0].tolist()
    np.testing.assert_array_equal(made.tensors["pixel_values"], whole["pixel_values"])


@settings(
    max_examples=TIMES * 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), family=st.sampled_from(WITH_IMAGES))
def test_images_of_any_size_and_number_match_generate(
    kits: Callable[[str], Kit],
    picture: Callable[..., bytes],
    data: st.DataObject,
    family: str,
) -> None:
    """Odd sizes, several images or none, in any chunk: the tokens of `generate`."""
    side = st.integers(1, 150)
    sizes = data.draw(st.lists(st.tuples(side, side), max_size=4))
    chunk = data.draw(st.integers(1, 90))
    kit = kits(family)
    pictures = [picture(w, h, seed=w * h) for w, h in sizes]
    each = kit.prepare("Hm?", *pictures)
    assert kit.serve([each], chunk=chunk) == [kit.generate(each)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(vocab_size=640, hidden_size=96, layers=3, heads=6, vision_hidden_size=64),
        Sizes(vocab_size=2000, hidden_size=32, layers=1, heads=2, image_side=28),
        Sizes(hidden_size=128, heads=2, max_pixels=8 * 3136, image_side=98),
    ],
    ids=["wider", "one-layer", "wide-heads"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_sizes_match_generate(
    tmp_path: Path, picture: Callable[..., bytes], family: str, sizes: Sizes
) -> None:
    """Nothing depends on the default sizes."""
    kit = Kit(tmp_path, family, sizes)
    prepared = [kit.prepare("see")]
    if kit.images:
        prepared += [kit.prepare("see", picture(99, 150), picture(40, 33))]
    served = kit.serve(prepared, chunk=11, graphs="fake")
    assert served == [kit.generate(each) for each in prepared]


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_check_refuses_what_does_not_fit(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], family: str
) -> None:
    """Wrong counts, types and shapes of images are rejected."""
    kit = kits(family)
    runner = kit.runner()
    each = kit.prepare("?", picture(90, 90))
    ids, tensors = each.request["input_ids"], each.tensors
    token = kit.model.config.image_token_id
    runner.check(Prompt(ids, dict(tensors)))
    pixels = tensors["pixel_values"]
    wrong: list[tuple[list[int], dict[str, Any]]] = [
        ([*ids, token], tensors),
        ([one for one in ids if one != token], tensors),
        (ids, {}),
        (ids, tensors | {"pixel_values": pixels.astype("float16")}),
        (ids, tensors | {"pixel_values": pixels[..., :-1].copy()}),
        (ids, tensors | {"more": pixels}),
        (ids, {"other": pixels}),
    ]
    for other_ids, other in wrong:
        with pytest.raises(ValueError, match=r"expected|need|no tensors"):
            runner.check(Prompt(other_ids, dict(other)))


def qwen2(config: Any) -> Any:
    """The same text model as a Qwen2, with its biases."""
    from transformers import Qwen2Config

    return Qwen2Config(**sizes_of(config), eos_token_id=config.eos_token_id)


def mistral(config: Any) -> Any:
    """The same text model as a Mistral without a window."""
    from transformers import MistralConfig

    return MistralConfig(**sizes_of(config), sliding_window=None)


def sizes_of(config: Any) -> dict[str, Any]:
    """What all text configs have in common."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "initializer_range")
    return {name: getattr(config, name) for name in names}


def one_kv_head(config: Any) -> None:
    """All heads share their keys, which are wider than usual; a bias; tied ends."""
    text = config.get_text_config()
    text.num_key_value_heads, text.head_dim = 1, 32
    text.attention_bias = True
    config.tie_word_embeddings = text.tie_word_embeddings = True


def scaled_rope(config: Any) -> None:
    """Positions stretched as Llama 3 does it."""
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def every_head(config: Any) -> None:
    """As many key heads as heads; the tower looks at windows in all its layers."""
    config.text_config.num_key_value_heads = config.text_config.num_attention_heads
    config.vision_config.fullatt_block_indexes = []


def plain_deep(config: Any) -> None:
    """Features for one further layer, and patches merged three by three."""
    config.vision_config.deepstack_visual_indexes = [1]
    config.text_config.num_hidden_layers = 3


def full_tower(config: Any) -> None:
    """All tokens of the tower, of two of its layers, for another text model."""
    config.vision_feature_select_strategy = "full"
    config.vision_feature_layer = [-2, -1]
    config.text_config = qwen2(config.text_config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", qwen2),
        ("llama", mistral),
        ("llama", one_kv_head),
        ("llama", scaled_rope),
        ("qwen3", one_kv_head),
        ("qwen2_5_vl", every_head),
        ("qwen3_vl", plain_deep),
        ("qwen3_vl", one_kv_head),
        ("llava", full_tower),
    ],
)
def test_other_options_match_generate(
    tmp_path: Path, picture: Callable[..., bytes], family: str, change: Any
) -> None:
    """Checkpoints of a family with other options are read as they are."""
    kit = Kit(tmp_path, family, change=change)
    prepared = [kit.prepare("see"), kit.prepare("and what of a longer one?")]
    if kit.images:
        prepared += [kit.prepare("see", picture(99, 150), picture(40, 33))]
    for graphs in ("off", "fake"):
        served = kit.serve(prepared, chunk=13, graphs=graphs)
        assert served == [kit.generate(each) for each in prepared]


@pytest.mark.parametrize("dtype", ["float33", "nn", ""])
def test_unknown_dtype_is_refused(kits: Callable[[str], Kit], dtype: str) -> None:
    """The error for an unknown dtype lists the known ones."""
    with pytest.raises(ValueError, match="use auto, float32"):
        load_model(kits("llama").folder, device="cpu", dtype=dtype)


def test_unknown_families_are_refused() -> None:
    """A checkpoint that cannot be served as by `generate` is refused before loading."""
    from transformers import (
        GPT2Config,
        LlamaConfig,
        LlavaConfig,
        LlavaNextConfig,
        PixtralVisionConfig,
    )

    assert family_of(LlamaConfig()).keep == ()
    for config, message in (
        (LlavaNextConfig(), "llava_next; known are"),
        (GPT2Config(), "gpt2; known are"),
        (LlavaConfig(vision_config=PixtralVisionConfig()), "tower is a pixtral"),
    ):
        with pytest.raises(ValueError, match=message):
            family_of(config)
