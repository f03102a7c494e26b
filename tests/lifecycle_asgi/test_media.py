"""Media are found in every form of request."""

from __future__ import annotations

import collections
import dataclasses
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image
from pydantic import BaseModel, ConfigDict

from lifecycle_asgi import TooDeep, find_media

URL = "data:image/png;base64,AAAA"


def kinds(request: object) -> list[str]:
    """The kinds of what is found."""
    return [each.kind for each in find_media(request)]


class Part(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None
    image_url: dict[str, str] | None = None


@dataclass
class Turn:
    role: str
    content: Any


def turn(*content: Any) -> dict[str, Any]:
    """One message of a user."""
    return {"role": "user", "content": list(content)}


IMAGES: dict[str, Any] = {
    "chat": {"type": "image_url", "image_url": {"url": URL}},
    "chat without a type": {"image_url": {"url": URL}},
    "chat with a bare url": {"type": "image_url", "image_url": URL},
    "responses": {"type": "input_image", "image_url": URL},
    "responses by file": {"type": "input_image", "file_id": "f"},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    },
    "messages of a tool": {
        "type": "tool_result",
        "content": [{"type": "image", "source": {"type": "url", "url": URL}}],
    },
    "generated before": {"type": "image_generation_call", "result": "AAAA"},
    "screenshot": {
        "type": "computer_call_output",
        "output": {"type": "computer_screenshot", "image_url": URL},
    },
    "google": {"inline_data": {"mime_type": "image/png", "data": "AAAA"}},
    "google in camels": {"fileData": {"mimeType": "image/png", "fileUri": "gs://x"}},
    "transformers": {"type": "image", "image": Image.new("RGB", (1, 1))},
    "pydantic": Part(type="image_url", image_url={"url": URL}),
    "pydantic with more fields": Part(type="odd", image=URL),  # type: ignore[call-arg]
    "bytes": b"\x89PNG",
    "bytearray": bytearray(b"\x89PNG"),
    "memoryview": memoryview(b"\x89PNG"),
    "picture": Image.new("RGB", (1, 1)),
    "array": np.zeros(3),
    "object": types.SimpleNamespace(type="image_url", image_url=URL),
    "tuple": ("x", [{"type": "image", "source": URL}]),
    "mapping": collections.UserDict({"type": "image", "image": URL}),
}


@pytest.mark.parametrize("part", IMAGES.values(), ids=IMAGES)
def test_finds_an_image_in_whatever_form(part: Any) -> None:
    """One part is one image: alone, in a message, in messages and in a request."""
    forms = [part, [part], turn("see", part), Turn("user", [part])]
    forms += [{"messages": [turn("x"), turn(part)]}, {"input": [turn(part)]}]
    forms += [types.SimpleNamespace(messages=[turn(part)], model="m")]
    for form in forms:
        assert kinds(form) == ["image"]


OTHERS = {
    "video": {"type": "video_url", "video_url": {"url": "https://x/y.mp4"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    "time_series": {
        "type": "time_series_url",
        "time_series_url": {"url": "https://x/y.csv", "sampling_rate": 100},
    },
    "file": {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA"}},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_finds_video_audio_and_files(kind: str) -> None:
    """Other media are reported by kind, so that they can be refused or charged."""
    (found,) = find_media({"messages": [turn("x", OTHERS[kind])]})
    assert (found.kind, found.path) == (kind, "messages[0].content[1]")
    assert found.data


def test_finds_a_series_of_numbers_once() -> None:
    """Samples in a list are one series or sound, not one for each number."""
    data = {"time_series": [0.5, 1.0, 1.5], "audio": [1, 2]}
    found = find_media({"prompt": "x", "multi_modal_data": data})
    assert [(each.kind, each.path) for each in found] == [
        ("time_series", "multi_modal_data.time_series"),
        ("audio", "multi_modal_data.audio"),
    ]


TEXTS: list[Any] = [
    "see data:image/png;base64,AAAA",
    turn("x"),
    turn({"type": "text", "text": URL}),
    turn({"type": "text", "text": "x", "image_url": {"url": URL}}),
    [{"type": "input_text", "text": URL}],
    {"role": "user", "content": "image_url"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
    {"messages": [turn("x")], "images": [], "audio": {"voice": "alloy"}},
    {"messages": [turn("x")], "tools": [{"type": "image", "image_url": URL}]},
    {"messages": [turn("x")], "metadata": {"image": URL}},
    {"type": "image_urls", "image_url": None},
    Part(type="text", text=URL),
    Part(type="other"),
    Turn("user", "x"),
    None,
    7,
    [],
    {},
    Part,
    iter([b"x"]),
]


@pytest.mark.parametrize("request_", TEXTS)
def test_takes_text_for_text(request_: Any) -> None:
    """Text is text, whatever it says, and so is what merely stands beside it."""
    assert find_media(request_) == []


def test_finds_media_beside_a_prompt() -> None:
    """Engines that take media beside the prompt are understood, too."""
    ask = {"prompt": "x", "multi_modal_data": {"image": [np.zeros(1), URL]}}
    assert kinds(ask) == ["image", "image"]
    assert kinds({"text": "x", "prompt": "y", "image_data": [URL, URL]}) == 2 * [
        "image"
    ]
    assert kinds({"prompt": "x", "images": ["AAAA"], "audio_data": "AA"}) == [
        "image",
        "audio",
    ]


def test_has_path_and_kind_but_shows_no_data() -> None:
    """Paths are of known names, and a `repr` shows nothing of the client's."""
    part = {"canary": {"type": "image", "source": {"data": "canary"}}}
    (found,) = find_media({"messages": [turn(part)]})
    assert found.path == "messages[0].content[0].*"
    assert found.data == "canary"
    assert "canary" not in repr(found)


def test_refuses_what_is_too_deep_or_too_much() -> None:
    """Nesting and values are bounded, for circles as for bombs."""
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    circle: list[Any] = []
    circle += [circle, circle]
    named: dict[str, Any] = {}
    named["images"] = [named["images"]] if named else []
    named["images"].append(named["images"])
    for form in (deep, circle, {"messages": deep}, named, ["x"] * 2**19):
        with pytest.raises(TooDeep, match="send less"):
            find_media(form)
    while isinstance(deep, list):  # not by recursion, as a deallocation would be
        deep = deep.pop()


ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(
    [
        "type",
        "text",
        "image_url",
        "image",
        "content",
        "url",
        "source",
        "data",
        "images",
        "messages",
        "role",
        "media_type",
        "input_audio",
        "x",
    ]
)
VALUES = st.sampled_from(
    ["text", "image_url", "image", "input_audio", "image/png", URL]
)
ODD = st.recursive(
    ATOMS | VALUES | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | ATOMS, inner, max_size=4)
        | st.builds(Turn, st.just("user"), inner)
        | st.builds(lambda x: types.SimpleNamespace(content=x), inner)
        | st.tuples(inner)
    ),
    max_leaves=15,
)


@given(ODD)
@settings(max_examples=500, deadline=None)
def test_answers_for_anything(form: Any) -> None:
    """Whatever comes, there is an answer, the same each time."""
    assert find_media(form) == find_media(form)


@given(ODD, st.sampled_from(sorted(IMAGES)))
@settings(max_examples=300, deadline=None)
def test_finds_what_is_put_beside_anything(beside: Any, name: str) -> None:
    """An image among odd neighbours is one more than without it."""
    without, with_ = turn(beside), turn(beside, IMAGES[name])
    assert len(find_media(with_)) == len(find_media(without)) + 1


@given(ODD.filter(lambda form: not isinstance(form, types.SimpleNamespace)))
@settings(max_examples=300, deadline=None)
def test_finds_the_same_in_objects_as_in_json(form: Any) -> None:
    """A model and the JSON that it was made of are the same request."""
    as_turn = Turn("user", [form])
    assert kinds(dataclasses.asdict(as_turn)) == kinds(as_turn)
