"""Image headers, data URLs and request bodies, without a server."""

from __future__ import annotations

import base64
import json
import resource
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial

import pytest
from http_kit import data_url, encoded, png, png_chunk
from hypothesis import given, settings, strategies as st

from lifecycle_engine.api_errors import ApiError
from lifecycle_engine.defaults import ChatDefaults
from lifecycle_engine.dialects.openai_schema import parse_request
from lifecycle_engine.images.media import (
    Measure,
    MediaLimits,
    check_total,
    decode_data_url,
    estimate_bytes,
    measure,
)
from lifecycle_engine.incoming import Intake

LIMITS = MediaLimits()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_reads_size_of_every_format(kind: str) -> None:
    """Width times height comes from the header of each known format (S8)."""
    image = encoded(37, 21, kind)
    assert measure(image, LIMITS, param="x") == Measure(len(image), 37 * 21, 1)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
def test_counts_every_frame(kind: str) -> None:
    """Animations and pages weigh as much as all their frames (reliability 9)."""
    from PIL import Image

    frames = [Image.new("RGB", (20, 10), (50 * i, 99, 200 - 50 * i)) for i in range(5)]
    extra = {"save_all": True, "append_images": frames[1:]}
    image = encoded(20, 10, kind, **extra)
    assert measure(image, LIMITS, param="x").frames == 5
    assert measure(image, LIMITS, param="x").pixels == 5 * 200


def test_estimates_files_pixels_and_tensors() -> None:
    """The estimate is the file, 15 bytes of work and 24 of tensor a pixel."""
    assert estimate_bytes([]) == 0
    assert estimate_bytes([Measure(100, 10, 1), Measure(7, 2, 2)]) == 107 + 12 * 39


def test_decodes_nothing_to_measure() -> None:
    """Measuring forty megapixels takes no more memory than their file (fault-17)."""
    image = png(8000, 5000)
    measure(encoded(), LIMITS, param="x")  # the imports
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert measure(image, LIMITS, param="x").pixels == 40_000_000
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
    assert measure(few, LIMITS, param="x").pixels == 32 * 24
    tracemalloc.start()
    with pytest.raises(ApiError) as caught:
        measure(many, LIMITS, param="x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code == "invalid_image"
    assert peak < 100_000


def test_refuses_one_pixel_too_many() -> None:
    """The limit itself passes, one more does not."""
    limits = MediaLimits(image_pixels=100, request_pixels=150, frames=2)
    assert measure(encoded(10, 10), limits, param="x").pixels == 100
    with pytest.raises(ApiError) as caught:
        measure(encoded(10, 11), limits, param="x")
    assert caught.value.status == 413
    check_total([Measure(1, 100, 1), Measure(1, 50, 1)], limits, param="x")
    for over in ([Measure(1, 100, 1), Measure(1, 51, 1)], [Measure(1, 1, 1)] * 3):
        with pytest.raises(ApiError) as caught:
            check_total(over, limits, param="x")
        assert caught.value.status == 413


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
    status = refusal_of(lambda: measure(bytes(image), LIMITS, param="x"))
    assert status in (None, 400, 413)


def refusal_of(call: Callable[[], object]) -> int | None:
    """The status that *call* is refused with, if it is."""
    try:
        call()
    except ApiError as error:
        return error.status
    return None


@given(st.binary(max_size=60))
def test_decodes_strict_base64_only(data: bytes) -> None:
    """A data URL gives its bytes back; with anything foreign in it, it is refused."""
    text = base64.b64encode(data).decode()
    assert decode_data_url(f"data:image/png;base64,{text}", param="x") == data
    for wrong in (f"{text} ", f"{text}\n", f"{text}=", f"{text}====", f"-{text}"):
        with pytest.raises(ApiError) as caught:
            decode_data_url(f"data:image/png;base64,{wrong}", param="x")
        assert caught.value.code == "invalid_base64"


@pytest.mark.parametrize("size", [3 * 2**20, 3 * 2**20 + 1, 8 * 2**20])
def test_decodes_long_base64_in_slices(size: int) -> None:
    """As strictly as short one: padding ends it, wherever a slice ends."""
    data = bytes(size)
    text = base64.b64encode(data).decode()
    assert decode_data_url(f"data:image/png;base64,{text}", param="x") == data
    whole, rest = text[: 4 * 2**20], text[4 * 2**20 :]
    for wrong in (f"{whole[:-1]}={rest}AAAA", f"{whole[:-2]}=={rest}AAAA"):
        with pytest.raises(ApiError) as caught:
            decode_data_url(f"data:image/png;base64,{wrong}", param="x")
        assert caught.value.code == "invalid_base64"


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


@given(st.binary(max_size=100))
def test_accepts_or_refuses_any_bytes(body: bytes) -> None:
    """Whatever bytes come, they are refused with a 400."""
    with pytest.raises(ApiError) as caught:
        parse_request(body)
    assert caught.value.status == 400


INTAKE = Intake("sim", limits=LIMITS, defaults=ChatDefaults(), limiter=None)  # type: ignore[arg-type]


COUNT = 2_000_000
BOMBS = {
    "lists": b'{"x":[' + b"[]," * COUNT + b"[]]}",
    "numbers": b'{"x":[' + b"1," * COUNT + b"1]}",
    "maps": b'{"x":[' + b"{}," * COUNT + b"{}]}",
    "parts": json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [1] * 100_000}]}
    ).encode(),
    "texts": json.dumps(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": ""}] * 40_000}
            ],
        }
    ).encode(),
    "messages": json.dumps({"model": "m", "messages": [1] * 100_000}).encode(),
    "stop": json.dumps({"model": "m", "messages": [], "stop": [1] * 100_000}).encode(),
    "bias": json.dumps(
        {
            "model": "m",
            "messages": [],
            "logit_bias": {str(i): "" for i in range(70_000)},
        }
    ).encode(),
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_refuses_bomb_of_values(body: bytes) -> None:
    """A body is not unpacked into, or blamed for, millions of values (fault-16)."""
    tracemalloc.start()
    status = refusal_of(lambda: parse_request(body))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status == 400
    assert peak < 32 * 2**20


def test_takes_long_text_of_commas() -> None:
    """What bounds the values leaves room for the text of a long table."""
    table = "1234.5," * (2**20 // 7)
    messages = [{"role": "user", "content": table}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert parse_request(body).messages[0].content[0].text == table


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
    assert incoming.estimate == len(image) + 32 * 24 * 39
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
    assert incoming.estimate == 0
