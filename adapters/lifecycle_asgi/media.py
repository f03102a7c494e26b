"""Which parts of a request are images, video, audio or files, whatever its form.

A gate over bytes, limits on media and metrics have to agree on what a request of text
alone is; so they ask here. Requests may be JSON, models of pydantic, dataclasses or
structs of msgspec, with the parts of OpenAI's, Anthropic's and Google's APIs, and the
raw bytes, arrays and pictures that engines take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["image", "video", "audio", "file"]
Data = str | bytes | bytearray | memoryview

_IMAGES: Final = ("image", "image_url", "input_image", "image_file")
_VIDEOS: Final = ("video", "video_url", "input_video")
_AUDIOS: Final = ("audio", "audio_url", "input_audio")
# By the type that a part says it is of.
_TYPES: Final[Mapping[str, Kind]] = {
    **dict.fromkeys((*_IMAGES, "image_generation_call"), "image"),
    **dict.fromkeys(_VIDEOS, "video"),
    **dict.fromkeys(_AUDIOS, "audio"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
# Beside a prompt, where what is one of the above may be a setting.
_BESIDE: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("images", "image_data", "image_embeds"), "image"),
    **dict.fromkeys(("videos", "video_data"), "video"),
    **dict.fromkeys(("audios", "audio_data"), "audio"),
}
# By the name that a part stands under, where it has no type.
_KEYS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(_IMAGES, "image"),
    **dict.fromkeys(_VIDEOS, "video"),
    **dict.fromkeys(_AUDIOS, "audio"),
    **_BESIDE,
}
_MIME: Final = ("media_type", "mime_type", "mimeType")
_WHERE: Final = ("url", "data", "uri", "fileUri", "file_data", "bytes", "base64")
# What of a whole request can hold media; tools and metadata are not looked into.
_ENTRIES: Final = frozenset(
    {"messages", "input", "inputs", "system", "instructions", "prompt", "prompts"}
    | {"contents", "multi_modal_data"}
    | _BESIDE.keys()
)
_NAMES: Final = _ENTRIES | _KEYS.keys() | {"content", "parts", "source", "output"}
_ATOMS: Final = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Media:
    """One piece of a request that is not text.

    Attributes:
        kind: What it is.
        path: Where it stands, such as ``messages[0].content[1]``. Names that the
            client made up are a ``*``.
        data: A URL, a data URL, base64 or bytes; ``None`` if it is none of these.
    """

    kind: Kind
    path: str
    data: Data | None = field(default=None, repr=False)


class TooDeep(ValueError):
    """A request is nested too deeply, or has too many values, to be looked through."""


def find_media(
    request: object, *, max_depth: int = 32, max_values: int = 2**18
) -> list[Media]:
    """The media of a request, in order; empty if it is text alone.

    A data URL within a text is text. Iterators are not looked into, as they could be
    read once only: make lists of them.

    Args:
        request: A whole request, its messages, one of them, or one part; JSON or
            objects.
        max_depth: How deep it may be nested.
        max_values: How many values it may have.

    Raises:
        TooDeep: It passes one of these limits.
    """
    walk = _Walk(max_depth, max_values)
    fields = _fields(request)
    if fields is not None and not _ENTRIES.isdisjoint(fields):
        fields = {name: value for name, value in fields.items() if name in _ENTRIES}
        walk.fields(fields, None, max_depth)
    else:
        walk.value(request, None, max_depth)
    return walk.found


# Where something stands: a name or an index, below where the next one stands.
_At = tuple["_At | None", object] | None


class _Walk:
    """Looks through one request; written for speed, as most of it is text."""

    def __init__(self, max_depth: int, max_values: int) -> None:
        self._max_depth = max_depth
        self._max_values = max_values
        self._left = max_values
        self._hows: dict[type, str] = {list: "items", tuple: "items", dict: "fields"}
        self._hows.update((atom, "atom") for atom in _ATOMS)
        self.found: list[Media] = []

    def value(self, value: Any, at: _At, depth: int) -> None:
        how = self._hows.get(type(value)) or self._look_at(type(value))
        if how == "atom":
            return
        self._spend(depth, 1)
        if how == "items":
            self._spend(depth, len(value))
            for index, each in enumerate(value):
                self.value(each, (at, index), depth - 1)
        elif how == "fields":
            self.fields(_fields(value) or {}, at, depth)
        else:
            self._find("image", at, value if how == "bytes" else None)

    def _look_at(self, kind: type) -> str:
        """How values of a type are looked at; asked once, as it takes long."""
        how = "fields"
        if issubclass(kind, _ATOMS):
            how = "atom"
        elif issubclass(kind, bytes | bytearray | memoryview):
            how = "bytes"
        # Of a picture, this attribute is a copy of its pixels: asked of the type.
        elif hasattr(kind, "__array_interface__") or hasattr(kind, "__array__"):
            how = "array"
        elif issubclass(kind, Sequence):
            how = "items"
        self._hows[kind] = how
        return how

    def fields(self, fields: Mapping[Any, Any], at: _At, depth: int) -> None:
        word = fields.get("type")
        if isinstance(word, str):
            if word in _TEXTS:
                return
            kind = _TYPES.get(word)
            if kind is not None:
                self._find(kind, at, _data(fields))
                return
        kind = _mime_kind(fields)
        if kind is not None:
            self._find(kind, at, _data(fields))
            return
        self._spend(depth, len(fields))
        for name, value in fields.items():
            named = _KEYS.get(name) if isinstance(name, str) else None
            if named is not None:
                self._named(named, value, (at, name), depth - 1)
            else:
                self.value(value, (at, name), depth - 1)

    def _named(self, kind: Kind, value: object, at: _At, depth: int) -> None:
        """What stands under a name that says what it is."""
        self._spend(depth, 1)
        if isinstance(value, list | tuple):
            for index, each in enumerate(value):
                self._named(kind, each, (at, index), depth - 1)
        elif value is not None and value is not False and not _empty(value):
            self._find(kind, at, _data(value))

    def _find(self, kind: Kind, at: _At, data: Data | None) -> None:
        self.found.append(Media(kind, _path(at), data))

    def _spend(self, depth: int, values: int) -> None:
        self._left -= values
        if self._left < 0 or depth < 0:
            raise TooDeep(
                f"the request is nested more than {self._max_depth} deep or has more "
                f"than {self._max_values} values; send less"
            )


def _fields(value: object) -> Mapping[Any, Any] | None:
    """The fields of whatever has fields."""
    if type(value) is dict:
        return value
    own: Mapping[Any, Any] | None = getattr(value, "__dict__", None)
    if isinstance(value, Mapping):
        return value
    if own is None:  # it has slots
        names = getattr(value, "__struct_fields__", None)  # of msgspec
        if dataclasses.is_dataclass(value):
            names = [each.name for each in dataclasses.fields(value)]
        return names and {name: getattr(value, name, None) for name in names}
    if isinstance(value, type):
        return None
    extra = getattr(value, "__pydantic_extra__", None)
    return {**own, **extra} if extra else own


def _mime_kind(fields: Mapping[Any, Any]) -> Kind | None:
    for name in _MIME:
        if name in fields:
            kind = str(fields[name]).partition("/")[0]
            if kind in ("image", "video", "audio"):
                return kind  # type: ignore[return-value]
    return None


def _data(value: object, depth: int = 4) -> Data | None:
    """The data of a part, wherever in it they stand."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return value
    fields = None if isinstance(value, _ATOMS) or not depth else _fields(value)
    if fields is None:
        return None
    for name in (*_WHERE, *_KEYS, "source", "file"):
        found = _data(fields.get(name), depth - 1)
        if found is not None and not _empty(found):
            return found
    return None


def _empty(value: object) -> bool:
    return isinstance(value, str | bytes | bytearray | dict) and not value


def _path(at: _At) -> str:
    steps = []
    while at is not None:
        at, step = at
        if isinstance(step, int):
            steps.append(f"[{step}]")
        else:
            known = isinstance(step, str) and step in _NAMES
            steps.append(f".{step}" if known else ".*")
    return "".join(reversed(steps)).removeprefix(".")
