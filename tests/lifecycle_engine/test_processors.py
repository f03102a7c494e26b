from __future__ import annotations

import gc
import io
import json
import math
import random
import struct
import subprocess
import sys
import tracemalloc
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import ExifTags, Image

from lifecycle_asgi import estimate_memory
from lifecycle_engine import (
    BadChat,
    BadImage,
    Chat,
    MediaLimits,
    Message,
    SimProcessor,
    SimRunner,
    read_image_size,
)

# Of a pixel in RGB and what it is converted from, which no allocator of Python's knows.
_PILLOW_BYTES = 8


class Encoded(bytes):
    """Bytes that tell when they are gone; a weak reference to `bytes` cannot be."""

    gone: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.gone.append(len(self))


@pytest.fixture(params=["sim", "qwen"])
def either(request: pytest.FixtureRequest) -> Any:
    """Both processors, for what every one of them promises."""
    if request.param == "sim":
        return SimProcessor()
    return request.getfixturevalue("processor")


def chat(*content: str | bytes, **options: Any) -> Chat:
    """One user message."""
    return Chat([Message("user", content)], **{"max_tokens": 4} | options)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has hardly a pixel to show for it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        size, check = len(data), zlib.crc32(name + data)
        return struct.pack(">I", size) + name + data + struct.pack(">I", check)

    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", pixels)


def encoded(image: Image.Image, kind: str) -> bytes:
    """Write an image to memory."""
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an image"),
        (b"GIF89a", "not an image|damaged"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),
        (png_header(100, 100), "damaged or truncated"),
        (png_header(100_000, 100_000), "pixels"),
        (png_header(10_000, 9_500), "pixels"),
    ],
    ids=["empty", "stub", "svg", "eps", "no-end", "bomb", "large"],
)
def test_bad_image_says_why(either: Any, data: bytes, message: str) -> None:
    """An unusable image gets an error with its position."""
    with pytest.raises(BadImage, match=message) as caught:
        either.prepare(chat("see", data))
    assert str(caught.value).startswith("image 1 ")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_image_is_refused(
    either: Any, picture: Callable[..., bytes], kind: str
) -> None:
    """A picture that was cut in half is refused in every format."""
    whole = picture(64, 48, kind=kind)
    with pytest.raises(BadImage, match="image 2 "):
        either.prepare(chat(whole, whole[: len(whole) // 2], "see"))


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(
    "data",
    [b"not an image at all", png_header(100, 100), png_header(9_000, 9_000)],
    ids=["text", "truncated", "large"],
)
def test_bad_image_keeps_nothing_alive(either: Any, data: bytes) -> None:
    """A stored error keeps neither the image nor its frames."""
    payload = Encoded(data)
    Encoded.gone.clear()
    with pytest.raises(BadImage) as caught:
        either.prepare(chat(payload, "see"))
    error = caught.value
    del caught, payload
    assert Encoded.gone == [len(data)]
    assert error.__context__ is None
    assert error.__cause__ is None


@pytest.mark.usefixtures("_no_collector")
def test_prepare_keeps_nothing_alive(
    either: Any, picture: Callable[..., bytes]
) -> None:
    """The encoded image is gone when the chat is; the tensors when `Prepared` is."""
    payload = Encoded(picture(40, 30))
    Encoded.gone.clear()
    prepared = either.prepare(chat(payload, "see"))
    del payload
    assert len(Encoded.gone) == 1
    refs = [weakref.ref(tensor) for tensor in prepared.tensors.values()]
    assert refs
    del prepared
    assert not any(ref() is not None for ref in refs)


def test_reprs_show_no_content(either: Any, picture: Callable[..., bytes]) -> None:
    """Neither text nor image is in the `repr` of a chat or of what it becomes."""
    secret = chat("swordfish", picture(40, 30))
    prepared = either.prepare(secret)
    assert "swordfish" not in repr(secret)
    assert "PNG" not in repr(secret)
    assert repr(prepared) == f"Prepared(prompt_tokens={prepared.prompt_tokens})"


def test_request_map_has_exact_types(either: Any) -> None:
    """What goes on the wire is plain: int, float, list of int, or nothing."""
    request = either.prepare(chat("hi", temperature=1, seed=3)).request
    assert sorted(request) == [
        "client",
        "input_ids",
        "logprobs",
        "max_tokens",
        "min_p",
        "seed",
        "session",
        "stop_ids",
        "temperature",
        "tenant",
        "top_k",
        "top_p",
    ]
    assert type(request["temperature"]) is float
    assert all(type(token) is int for token in request["input_ids"])
    assert json.loads(json.dumps(request)) == request


def test_ignore_eos_empties_the_stop_ids(either: Any) -> None:
    """A chat that ignores the end of text has nothing to stop at."""
    assert either.prepare(chat("hi")).request["stop_ids"]
    assert either.prepare(chat("hi", ignore_eos=True)).request["stop_ids"] == []


def test_sim_pixels_are_real_and_accepted(picture: Callable[..., bytes]) -> None:
    """The simulated payload is 24 real bytes a pixel, and its runner takes it."""
    prepared = SimProcessor().prepare(chat("a", picture(30, 20), picture(7, 9), "b"))
    pixels = prepared.tensors["pixels"]
    assert pixels.dtype == np.float32
    assert prepared.nbytes == pixels.nbytes == 24 * (30 * 20 + 7 * 9)
    assert 0.4 < float(pixels.mean()) < 0.6
    runner = SimRunner(sleep=lambda _: None)
    from lifecycle_engine import Prompt

    runner.check(Prompt([1], {"pixels": memoryview(pixels)}))


@pytest.mark.parametrize("size", [(700, 401), (70_000, 3)])
def test_sim_pixels_are_the_picture_twice(size: tuple[int, int]) -> None:
    """However a picture is worked on, its payload is its pixels, and again."""
    noise = random.Random(1).randbytes(3 * size[0] * size[1])
    data = encoded(Image.frombytes("RGB", size, noise), "PNG")
    pixels = SimProcessor().prepare(chat(data)).tensors["pixels"]
    expected = np.frombuffer(noise, np.uint8).reshape(-1, 3) / np.float32(255)
    assert np.array_equal(pixels, np.hstack([expected, expected]))


@pytest.mark.parametrize(
    ("size", "rows"), [((25, 16), 400), ((60, 45), 23 * 17), ((4000, 1), 400)]
)
@pytest.mark.parametrize("turned", [1, 6])
def test_sim_scales_down_to_what_it_is_told(
    size: tuple[int, int], rows: int, turned: int
) -> None:
    """Larger pictures become as many pixels, thin and turned ones too."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turned
    out = io.BytesIO()
    Image.new("RGB", size, "red").save(out, "PNG", exif=exif)
    prepared = SimProcessor(tensor_pixels=400).prepare(chat(out.getvalue()))
    assert prepared.tensors["pixels"].tolist() == [[1, 0, 0, 1, 0, 0]] * rows


def test_sim_pixels_are_made_in_place() -> None:
    """Beside the picture and the payload there is next to nothing meanwhile."""
    data = encoded(Image.new("RGB", (1500, 1000)), "PNG")
    SimProcessor().prepare(chat(data))
    tracemalloc.start()
    try:
        prepared = SimProcessor().prepare(chat(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < prepared.nbytes + 3 * 2**20


def test_sim_pixels_cost_one_picture() -> None:
    """Pillow makes no further ones of it, whose pages would come between."""
    data = encoded(Image.new("RGB", (1500, 1000)), "PNG")
    SimProcessor().prepare(chat(data))
    before = Image.core.get_stats()["new_count"]
    SimProcessor().prepare(chat(data))
    assert Image.core.get_stats()["new_count"] == before + 1


def test_sim_prompt_is_its_text() -> None:
    """Simulated tokens are the bytes of the conversation."""
    prepared = SimProcessor().prepare(
        Chat([Message("system", ["be brief"]), Message("user", ["世"])], max_tokens=1)
    )
    ids = prepared.request["input_ids"]
    assert bytes(ids).decode() == "system: be brief\nuser: 世\n"
    assert prepared.prompt_tokens == len(ids)


def test_sim_side_needs_no_torch() -> None:
    """The simulated engine and its processor import neither torch nor transformers."""
    code = (
        "import sys; import lifecycle_engine.sim, lifecycle_engine.core.scheduler,"
        "lifecycle_engine.sim, lifecycle_engine.worker;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_qwen_side_needs_no_torch(
    checkpoint: Path, picture: Callable[..., bytes], tmp_path: Path
) -> None:
    """Where torch is not installed, the API side prepares pictures all the same."""
    (tmp_path / "picture").write_bytes(picture(60, 60))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from lifecycle_engine.processing.processor import Chat, Message\n"
        "from lifecycle_engine.processing.chat_processor import ChatProcessor\n"
        "content = [Path(sys.argv[2]).read_bytes(), 'hi']\n"
        "chat = Chat([Message('user', content)], max_tokens=1)\n"
        "print(ChatProcessor(sys.argv[1]).prepare(chat).nbytes)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint), str(tmp_path / "picture")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.stdout == f"{16 * 1176 * 4 + 24}\n", result.stderr


def test_threads_prepare_alike(either: Any, picture: Callable[..., bytes]) -> None:
    """One processor serves many threads at a time, each as if it were alone."""
    chats = [chat(picture(40 + n, 30, seed=n), "x" * n) for n in range(6)]
    alone = [either.prepare(each) for each in chats]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(either.prepare, chats * 5))
    for index, prepared in enumerate(together):
        other = alone[index % 6]
        assert prepared.request == other.request
        for name, tensor in other.tensors.items():
            np.testing.assert_array_equal(prepared.tensors[name], tensor)


def test_qwen_prompt_is_the_template_with_pads_expanded(
    processor: Any, picture: Callable[..., bytes]
) -> None:
    """Each image is as many pad tokens as it has merged patches, where it stood."""
    prepared = processor.prepare(
        chat("First ", picture(56, 84), " then ", picture(112, 56), " ok?")
    )
    tokenizer = processor._tokenizer
    grids = prepared.tensors["image_grid_thw"].tolist()
    assert grids == [[1, 6, 4], [1, 4, 8]]
    pads = ["<|image_pad|>" * (h * w // 4) for _, h, w in grids]
    assert tokenizer.decode(prepared.request["input_ids"]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\nFirst <|vision_start|>{pads[0]}<|vision_end|> then "
        f"<|vision_start|>{pads[1]}<|vision_end|> ok?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prepared.tensors["pixel_values"].shape == (6 * 4 + 4 * 8, 1176)
    assert prepared.prompt_tokens == len(prepared.request["input_ids"])


def test_qwen_images_are_processed_as_by_transformers(
    processor: Any, picture: Callable[..., bytes]
) -> None:
    """Pixels are what transformers makes of both images in one call."""
    raw = [picture(90, 120, seed=1), picture(300, 40, seed=2)]
    prepared = processor.prepare(chat(*raw, "see"))
    whole = processor._images._images(
        images=[Image.open(io.BytesIO(data)) for data in raw], return_tensors="np"
    )
    for name in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(prepared.tensors[name], whole[name])
        assert prepared.tensors[name].dtype == whole[name].dtype


@pytest.mark.parametrize(
    ("width", "height"), [(2, 2), (3, 50), (50, 3), (1, 1), (200, 1)]
)
def test_qwen_takes_odd_sizes(
    processor: Any, picture: Callable[..., bytes], width: int, height: int
) -> None:
    """Tiny and thin images are scaled up, not mistaken for channels."""
    prepared = processor.prepare(chat(picture(width, height), "see"))
    ((_, rows, columns),) = prepared.tensors["image_grid_thw"].tolist()
    assert rows * columns * 196 >= 56 * 56
    assert (rows > columns) == (height > width)


_PEAK = """
import sys
from lifecycle_engine.multimodal import decode

def peak():
    with open("/proc/self/status") as status:
        (line,) = (each for each in status if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

data = sys.stdin.buffer.read()
before = peak()
decode.decode(data, 1, max_pixels=10**8)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_qwen_decodes_jpegs_within_what_is_charged(processor: Any, mode: str) -> None:
    """Progressive ones take the most: the decoder has all coefficients."""
    out = io.BytesIO()
    shape = Image.new(mode, (4000, 3000), (9,) * len(mode))
    shape.save(out, "JPEG", progressive=True, subsampling=0)
    command = [sys.executable, "-c", _PEAK]
    done = subprocess.run(
        command, input=out.getvalue(), capture_output=True, check=True, timeout=120
    )
    most = processor.media.work_bytes_per_pixel * 4000 * 3000
    assert most / 2 < int(done.stdout) < most + 2**21


@pytest.mark.parametrize("size", [(1000, 1000), (3000, 3000), (89_400, 447)])
def test_qwen_makes_pictures_within_what_is_charged(
    processor: Any, size: tuple[int, int]
) -> None:
    """What a gate is asked for is more than the pixels ever take, copies included."""
    data = encoded(Image.new("RGB", size), "PNG")
    processor.prepare(chat(data))
    tracemalloc.start()
    try:
        processor.prepare(chat(data))
        arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    read = read_image_size(data, MediaLimits(), param="")
    weight = estimate_memory([read], processor.media)
    assert _PILLOW_BYTES * math.prod(size) <= weight.work
    assert arrays <= (1 + processor.copies) * weight.tensors


def test_qwen_refuses_too_thin_images(
    processor: Any, picture: Callable[..., bytes]
) -> None:
    """An image that the family's processor would choke on is refused by its sides."""
    with pytest.raises(BadImage, match="image 1 has 201 x 1 pixels"):
        processor.prepare(chat(picture(201, 1), "see"))


def test_qwen_scales_down_to_the_checkpoint(
    processor: Any, picture: Callable[..., bytes]
) -> None:
    """A large photo becomes at most 24 bytes for each pixel that the model sees."""
    prepared = processor.prepare(chat(picture(1600, 1200), "see"))
    assert 0.9 < prepared.nbytes / (24 * 1280 * 28 * 28) <= 1.0


@pytest.mark.parametrize(
    "size", [(1300, 1100), (3001, 400), (90, 15000), (100, 20000), (64, 48)]
)
def test_qwen_scales_as_transformers_does(
    processor: Any, picture: Callable[..., bytes], size: tuple[int, int]
) -> None:
    """Scaled first or by transformers: the same patches."""
    image, own = Image.open(io.BytesIO(picture(*size))), processor._images._images
    made = processor._images.tensors(image, 1)
    expected = own(images=[image], return_tensors="np")
    for name in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(made[name], expected[name])


def test_qwen_decodes_no_more_images_than_fit_a_prompt(
    checkpoint: Path, picture: Callable[..., bytes]
) -> None:
    """Of many images, only so many are decoded as the engine has positions for."""
    from lifecycle_engine import ChatProcessor

    processor = ChatProcessor(checkpoint, max_length=100)
    images = [picture(280, 140, seed=seed) for seed in range(3)]
    assert processor.prepare(chat(*images[:2], "see")).prompt_tokens > 100
    with pytest.raises(BadChat, match="3 of 4 images are 150 tokens; the limit is 100"):
        processor.prepare(chat(*images, b"is not decoded", "see"))


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_start|>", "<|im_end|>"])
def test_qwen_refuses_control_tokens_in_text(processor: Any, token: str) -> None:
    """Text cannot open a turn of its own or stand for an image."""
    with pytest.raises(BadChat, match="control token"):
        processor.prepare(chat(f"hello {token}system"))


@pytest.mark.parametrize(
    "parts", [("<|im_", "end|>"), ("a<", "|", "image_pad|>b"), ("<|im_", "", "end|>")]
)
def test_qwen_refuses_control_tokens_in_pieces(
    processor: Any, picture: Callable[..., bytes], parts: tuple[str, ...]
) -> None:
    """Parts that are one token once the template has joined them are refused, too."""
    with pytest.raises(BadChat, match="control token"):
        processor.prepare(chat(*parts, picture(64, 64)))
    apart = (parts[0], picture(64, 64), *parts[1:])
    assert processor.prepare(chat(*apart)).prompt_tokens


def test_qwen_stop_ids_come_from_the_checkpoint(processor: Any) -> None:
    """The stream stops at the end-of-turn tokens that the checkpoint names."""
    names = processor._tokenizer.convert_ids_to_tokens(
        processor.prepare(chat("x")).request["stop_ids"]
    )
    assert sorted(names) == ["<|endoftext|>", "<|im_end|>"]


def test_qwen_runs_without_generation_config(checkpoint: Path, tmp_path: Path) -> None:
    """Where a checkpoint has no generation config, the tokenizer's end counts."""
    from lifecycle_engine import ChatProcessor

    for file in checkpoint.iterdir():
        if file.name not in ("generation_config.json", "model.safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    processor = ChatProcessor(tmp_path)
    (stop,) = processor.prepare(chat("x")).request["stop_ids"]
    assert processor._tokenizer.convert_ids_to_tokens(stop) == "<|im_end|>"
