"""Media: finds the images, video, audio and files in a request of any format.

A gate over bytes, limits on media, and metrics have to agree on which requests are
text only, so all of them use `find_media`. Requests may be JSON, pydantic models,
dataclasses or msgspec structs, with the content parts of OpenAI's, Anthropic's and
Google's APIs, and the raw bytes, arrays and images that engines take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lifecycle_asgi.json_body import LongText

Kind = Literal["image", "video", "audio", "time_series", "file"]
Data = str | LongText | bytes | bytearray | memoryview

_IMAGES: Final = ("image", "image_url", "input_image", "image_file")
_VIDEOS: Final = ("video", "video_url", "input_video")
_AUDIOS: Final = ("audio", "audio_url", "input_audio")
_TIME_SERIES: Final = ("time_series", "time_series_url", "input_time_series")
# Kinds by the ``type`` of a part.
KIND_BY_TYPE: Final[Mapping[str, Kind]] = {
    **dict.fromkeys((*_IMAGES, "image_generation_call"), "image"),
    **dict.fromkeys(_VIDEOS, "video"),
    **dict.fromkeys(_AUDIOS, "audio"),
    **dict.fromkeys(_TIME_SERIES, "time_series"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
_TEXT_TYPES: Final = frozenset({"text", "input_text", "output_text", "refusal"})
# Fields beside a prompt, where one of the names above may be a setting.
_PROMPT_FIELDS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("images", "image_data", "image_embeds"), "image"),
    **dict.fromkeys(("videos", "video_data"), "video"),
    **dict.fromkeys(("audios", "audio_data"), "audio"),
    "time_series_data": "time_series",
}
# Kinds by the field that a part without a type is in.
KIND_BY_FIELD: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(_IMAGES, "image"),
    **dict.fromkeys(_VIDEOS, "video"),
    **dict.fromkeys(_AUDIOS, "audio"),
    **dict.fromkeys(_TIME_SERIES, "time_series"),
    **_PROMPT_FIELDS,
}
_MIME_FIELDS: Final = ("media_type", "mime_type", "mimeType")
_DATA_FIELDS: Final = ("url", "data", "uri", "fileUri", "file_data", "bytes", "base64")
# Fields of a whole request that can contain media; tools and metadata are skipped.
_REQUEST_FIELDS: Final = frozenset(
    {"messages", "input", "inputs", "system", "instructions", "prompt", "prompts"}
    | {"contents", "multi_modal_data"}
    | _PROMPT_FIELDS.keys()
)
_KNOWN_FIELDS: Final = (
    _REQUEST_FIELDS | KIND_BY_FIELD.keys() | {"content", "parts", "source", "output"}
)
_MAX_DEPTH: Final = 32
_SCALARS: Final = (str, LongText, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Media:
    """One part of a request that is not text.

    Attributes:
        kind: Kind of media.
        path: Path in the request, such as ``messages[0].content[1]``. Unknown field
            names, which the client chose, are replaced by ``*``.
        data: A URL, a data URL, base64 or bytes; ``None`` if it is none of these.
    """

    kind: Kind
    path: str
    data: Data | None = field(default=None, repr=False)


class TooDeep(ValueError):
    """A request is nested too deeply, or has too many values, to be searched."""


def find_media(request: object, *, max_values: int = 2**18) -> list[Media]:
    """Return the media of a request, in order; an empty list for a text request.

    A data URL within a text is text. Iterators are not searched, as they could be read
    only once: convert them to lists first.

    Args:
        request: A whole request, its messages, one message, or one part; JSON or
            objects.
        max_values: Maximum number of values.

    Raises:
        TooDeep: The request exceeds that, or is nested more than 32 deep.
    """
    search = _MediaSearch(max_values)
    fields = _fields(request)
    if fields is not None and not _REQUEST_FIELDS.isdisjoint(fields):
        searched = {
            name: value for name, value in fields.items() if name in _REQUEST_FIELDS
        }
        search.search_fields(searched, None, _MAX_DEPTH)
    else:
        search.search_value(request, None, _MAX_DEPTH)
    return search.found


# A path as a linked list from the innermost step: a field name or an index.
_Path = tuple["_Path | None", object] | None


class _MediaSearch:
    """Searches one request; written for speed, as most of a request is text."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values_left = max_values
        self._classes: dict[type, str] = {list: "items", tuple: "items", dict: "fields"}
        self._classes.update((scalar, "scalar") for scalar in _SCALARS)
        self.found: list[Media] = []

    def search_value(self, value: Any, path: _Path, depth: int) -> None:
        how = self._classes.get(type(value)) or self._classify(type(value))
        if how == "scalar":
            return
        self._check_limits(depth, 1)
        if how == "items":
            self._check_limits(depth, len(value))
            for index, each in enumerate(value):
                self.search_value(each, (path, index), depth - 1)
        elif how == "fields":
            self.search_fields(_fields(value) or {}, path, depth)
        else:
            self._add("image", path, value if how == "bytes" else None)

    def _classify(self, kind: type) -> str:
        """Return how to search values of a type; cached, as it takes long."""
        how = "fields"
        if issubclass(kind, _SCALARS):
            how = "scalar"
        elif issubclass(kind, bytes | bytearray | memoryview):
            how = "bytes"
        # Asked of the type: on an image, reading this attribute copies the pixels.
        elif hasattr(kind, "__array_interface__") or hasattr(kind, "__array__"):
            how = "array"
        elif issubclass(kind, Sequence):
            how = "items"
        self._classes[kind] = how
        return how

    def search_fields(self, fields: Mapping[Any, Any], path: _Path, depth: int) -> None:
        part_type = fields.get("type")
        if isinstance(part_type, str):
            if part_type in _TEXT_TYPES:
                return
            kind = KIND_BY_TYPE.get(part_type)
            if kind is not None:
                self._add(kind, path, _data(fields))
                return
        kind = _mime_kind(fields)
        if kind is not None:
            self._add(kind, path, _data(fields))
            return
        self._check_limits(depth, len(fields))
        for name, value in fields.items():
            kind = KIND_BY_FIELD.get(name) if isinstance(name, str) else None
            if kind is not None:
                self._add_field(kind, value, (path, name), depth - 1)
            else:
                self.search_value(value, (path, name), depth - 1)

    def _add_field(self, kind: Kind, value: object, path: _Path, depth: int) -> None:
        """Add the media in a field whose name gives their kind."""
        self._check_limits(depth, 1)
        if isinstance(value, list | tuple) and not _numbers(value):
            for index, each in enumerate(value):
                self._add_field(kind, each, (path, index), depth - 1)
        elif value is not None and value is not False and not _empty(value):
            self._add(kind, path, _data(value))

    def _add(self, kind: Kind, path: _Path, data: Data | None) -> None:
        self.found.append(Media(kind, _format_path(path), data))

    def _check_limits(self, depth: int, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0 or depth < 0:
            raise TooDeep(
                f"the request is nested more than {_MAX_DEPTH} deep or has more "
                f"than {self._max_values} values; send less"
            )


def _fields(value: object) -> Mapping[Any, Any] | None:
    """Return the fields of a mapping or an object; ``None`` if it has none."""
    if type(value) is dict:
        return value
    own: Mapping[Any, Any] | None = getattr(value, "__dict__", None)
    if isinstance(value, Mapping):
        return value
    if own is None:  # a class with slots
        names = getattr(value, "__struct_fields__", None)  # msgspec
        if dataclasses.is_dataclass(value):
            names = [each.name for each in dataclasses.fields(value)]
        return names and {name: getattr(value, name, None) for name in names}
    if isinstance(value, type):
        return None
    extra = getattr(value, "__pydantic_extra__", None)
    return {**own, **extra} if extra else own


def _numbers(values: Sequence[object]) -> bool:
    """Whether *values* are samples, of one sound or one series."""
    return bool(values) and type(values[0]) in (int, float)


def _mime_kind(fields: Mapping[Any, Any]) -> Kind | None:
    for name in _MIME_FIELDS:
        if name in fields:
            kind = str(fields[name]).partition("/")[0]
            if kind in ("image", "video", "audio"):
                return kind  # type: ignore[return-value]
    return None


def _data(value: object, depth: int = 4) -> Data | None:
    """Return the data of a part, from whichever field has them."""
    if isinstance(value, Data):
        return value
    fields = None if isinstance(value, _SCALARS) or not depth else _fields(value)
    if fields is None:
        return None
    for name in (*_DATA_FIELDS, *KIND_BY_FIELD, "source", "file"):
        found = _data(fields.get(name), depth - 1)
        if found is not None and not _empty(found):
            return found
    return None


def _empty(value: object) -> bool:
    return isinstance(value, str | bytes | bytearray | dict) and not value


def _format_path(path: _Path) -> str:
    steps = []
    while path is not None:
        path, step = path
        if isinstance(step, int):
            steps.append(f"[{step}]")
        else:
            known = isinstance(step, str) and step in _KNOWN_FIELDS
            steps.append(f".{step}" if known else ".*")
    return "".join(reversed(steps)).removeprefix(".")
