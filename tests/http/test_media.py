"""Image headers, data URLs and request bodies, without a server."""

from __future__ import annotations

import json
import resource
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial

import pytest
from http_kit import data_url, encoded, png, png_chunk
from hypothesis import given, settings, strategies as st

from lifecycle_asgi import ImageSize, estimate_memory
from lifecycle_engine import (
    ApiError,
    ChatDefaults,
    MediaLimits,
    RequestParser,
    read_image_size,
)

LIMITS = MediaLimits()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_reads_size_of_every_format(kind: str) -> None:
    """Width times height comes from the header of each known format (S8)."""
    image = encoded(37, 21, kind)
    decoder = 9 * 37 * 21 if kind == "WEBP" else 0
    assert read_image_size(image, LIMITS, param="x") == ImageSize(
        len(image), 37 * 21, 1, decoder
    )


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
def test_counts_every_frame(kind: str) -> None:
    """Animations and pages weigh as much as all their frames (reliability 9)."""
    from PIL import Image

    frames = [Image.new("RGB", (20, 10), (50 * i, 99, 200 - 50 * i)) for i in range(5)]
    extra = {"save_all": True, "append_images": frames[1:]}
    image = encoded(20, 10, kind, **extra)
    assert read_image_size(image, LIMITS, param="x").frames == 5
    assert read_image_size(image, LIMITS, param="x").pixels == 5 * 200


def test_estimates_files_pixels_and_tensors() -> None:
    """The estimate is the file, 15 bytes of work and 24 of tensor a pixel."""
    assert estimate_memory([]).total == 0
    assert (
        estimate_memory([ImageSize(100, 10, 1), ImageSize(7, 2, 2)]).total
        == 107 + 12 * 39
    )


def test_decodes_nothing_to_measure() -> None:
    """Measuring forty megapixels takes no more memory than their file (fault-17)."""
    image = png(8000, 5000)
    read_image_size(encoded(), LIMITS, param="x")  # the imports
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_image_size(image, LIMITS, param="x").pixels == 40_000_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak < 1_000_000
    assert after - before < 5 * 1024


def test_inflates_no_bomb_of_notes() -> None:
    """A small PNG whose notes inflate to 60 MB is refused before they do."""
    note = png_chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 1_000_000))
    whole = encoded()
    few, many = (whole[:33] + note * n + whole[33:] for n in (2, 60))
    assert read_image_size(few, LIMITS, param="x").pixels == 32 * 24
    tracemalloc.start()
    with pytest.raises(ApiError) as caught:
        read_image_size(many, LIMITS, param="x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code == "invalid_image"
    assert peak < 100_000


@given(
    st.binary(max_size=300),
    st.integers(0, 299),
    st.sampled_from(["PNG", "GIF", "TIFF", "WEBP", "BMP", "JPEG"]),
)
@settings(max_examples=400, deadline=None)
def test_fails_on_damaged_headers_in_one_way(junk: bytes, at: int, kind: str) -> None:
    """Whatever stands in a header, it is measured or refused with a 4xx."""
    image = bytearray(encoded(16, 16, kind))
    image[at : at + len(junk)] = junk
    status = refusal_of(lambda: read_image_size(bytes(image), LIMITS, param="x"))
    assert status in (None, 400, 413)


def refusal_of(call: Callable[[], object]) -> int | None:
    """The status that *call* is refused with, if it is."""
    try:
        call()
    except ApiError as error:
        return error.status
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "image_url", "url", "role", "content", "x"]
            ),
            children,
            max_size=4,
        )
    ),
    max_leaves=8,
)
FIELDS = ["model", "messages", "max_tokens", "stream", "stream_options", "n", "seed"]


FIELDS += ["stop", "tools", "user", "temperature", "response_format", "logit_bias"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
@settings(max_examples=200, deadline=None)
def test_accepts_or_refuses_any_document(document: dict[str, object]) -> None:
    """Whatever JSON comes, it is a request or a 4xx of ours, and nothing else."""
    base = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
    for body in (document, {**base, **document}):
        raw = json.dumps(body).encode()
        assert refusal_of(partial(INTAKE.parse, raw)) in (None, 400, 404, 413)


INTAKE = RequestParser("sim", limits=LIMITS, defaults=ChatDefaults(), limiter=None)  # type: ignore[arg-type]


def test_turns_request_into_chat() -> None:
    """Text, images, roles and limits arrive in the processor's own terms."""
    image = encoded()
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": data_url(image)}},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "seen"}]},
    ]
    ask = {"model": "sim", "messages": messages, "max_completion_tokens": 4}
    ask |= {"max_tokens": 9, "temperature": 0, "seed": 5, "ignore_eos": True}
    incoming = INTAKE.parse(json.dumps(ask).encode())
    assert incoming.images == 1
    assert estimate_memory(incoming.image_sizes).total == len(image) + 32 * 24 * 39
    assert incoming.chat.nbytes == len(image)
    assert "seen" not in repr(incoming)
    chat = incoming.chat.take()
    assert [m.role for m in chat.messages] == ["system", "user", "assistant"]
    assert [list(m.content) for m in chat.messages] == [
        ["be brief"],
        ["see", image],
        ["seen"],
    ]
    assert (chat.max_tokens, chat.temperature, chat.seed) == (4, 0, 5)
    assert chat.ignore_eos


def test_fills_in_defaults() -> None:
    """A request that says nothing gets 256 tokens at temperature 1, not streamed."""
    ask = {"model": "sim", "messages": [{"role": "user", "content": ""}]}
    incoming = INTAKE.parse(json.dumps(ask).encode())
    chat = incoming.chat.take()
    assert (chat.max_tokens, chat.temperature, chat.seed) == (256, 1.0, None)
    assert not incoming.stream
    assert incoming.image_sizes == ()
