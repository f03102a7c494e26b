"""The size of media is computed from headers and limits, whatever they claim."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from lifecycle_asgi import MediaProfile, MemoryEstimate, estimate

LIMITS = MediaProfile(image_pixels=10_000, assumed_pixels=10_000)
CAP = 10_000
KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]


def encoded(width: int, height: int, kind: str, **save: Any) -> bytes:
    """An image in one of Pillow's formats."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(out, kind, **save)
    return out.getvalue()


def asking(*parts: Any) -> dict[str, Any]:
    """A request of these parts."""
    return {"messages": [{"role": "user", "content": ["see", *parts]}]}


def image(data: bytes) -> dict[str, Any]:
    """A part with *data* as a data URL."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@given(st.sampled_from(KINDS), st.integers(2, 90), st.integers(2, 90))
@settings(max_examples=60, deadline=None)
def test_charges_images_by_their_headers(kind: str, width: int, height: int) -> None:
    """The pixels of each format are charged as they are, as a part or as bytes."""
    data, pixels = encoded(width, height, kind), width * height
    for part in (image(data), data, bytearray(data), memoryview(data)):
        weight = estimate(asking(part), LIMITS)
        assert weight.tensors == 24 * pixels
        each = 24 if kind == "WEBP" else 15
        assert each * pixels < weight.work <= each * pixels + 2 * len(data) + 100


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_charges_every_frame(kind: str) -> None:
    """Animations and pages are charged for each of theirs."""
    frames = [Image.new("RGB", (20, 10), (40 * i, 9, 200 - 40 * i)) for i in range(5)]
    data = encoded(20, 10, kind, save_all=True, append_images=frames[1:])
    assert estimate(asking(image(data)), LIMITS).tensors == 24 * 200 * 5


ODD: list[Any] = [
    b"",
    b"no image",
    b"\x89PNG\r\n\x1a\n",
    encoded(300, 300, "PNG"),
    encoded(1, 90, "PNG"),
    encoded(30, 30, "JPEG")[:40],
    {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
    {"type": "image_url", "image_url": {"url": "data:image/png,%89PNG"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
    {"type": "input_image", "file_id": "file-7"},
    {"type": "file", "file": {"file_id": "file-7"}},
    Image.new("RGB", (3, 3)),
]


@pytest.mark.parametrize("part", ODD)
def test_charges_what_it_cannot_read_the_most_there_may_be(part: Any) -> None:
    """Odd, huge and remote images weigh what the limits let one weigh."""
    weight = estimate(asking(part), LIMITS)
    assert weight.tensors == 24 * CAP
    assert weight.work >= 15 * CAP


def test_charges_video_and_audio_by_their_limits() -> None:
    """What they say of themselves is not believed; what is declared is."""
    limits = MediaProfile(video_frames=4, frame_pixels=100, audio_seconds=10)
    video = {"type": "video_url", "video_url": {"url": "https://example.org/x.mp4"}}
    weight = estimate(asking(video), limits)
    assert weight.tensors == 24 * 400
    assert 15 * 400 <= weight.work < 15 * 400 + 100
    audio = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    weight = estimate(asking(audio), limits)
    assert (weight.work, weight.tensors) == (2 + 640_000, 512_000)


def test_adds_up_and_charges_text_nothing() -> None:
    """Several media weigh as much as each of them; text weighs nothing."""
    one = estimate(asking(image(encoded(10, 10, "PNG"))), LIMITS)
    many = estimate(asking(*[image(encoded(10, 10, "PNG"))] * 3), LIMITS)
    assert many == one + one + one
    assert estimate(asking(), LIMITS) == estimate("x" * 10**6) == MemoryEstimate()
