"""The media of a request body: JSON, a form, or a file."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from lifecycle_asgi.asgi_types import Scope
from lifecycle_asgi.json_body import parse_json
from lifecycle_asgi.media import Kind, Media, TooDeep, find_media
from lifecycle_asgi.media_memory import MediaProfile, MemoryEstimate, estimate_media

_BOUNDARY: Final = re.compile(rb'boundary="?([^";,]+)"?', re.IGNORECASE)
_PART_TYPE: Final = re.compile(
    rb"^content-type:\s*([a-z]+)/", re.IGNORECASE | re.MULTILINE
)
_KINDS: Final[dict[bytes, Kind]] = {
    b"image": "image",
    b"video": "video",
    b"audio": "audio",
}
_FILE: Final = re.compile(
    rb"^content-disposition:.*filename", re.IGNORECASE | re.MULTILINE
)
# The first bytes of files, for parts whose type says nothing.
_MAGIC: Final[tuple[tuple[re.Pattern[bytes], Kind], ...]] = (
    (re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II\*\0|MM\0\*"), "image"),
    (
        re.compile(rb"RIFF....WEBP|....ftyp(?:avif|avis|hei|hev|mif1)", re.DOTALL),
        "image",
    ),
    (re.compile(rb"(?s)RIFF....AVI |....ftyp|\x1aE\xdf\xa3"), "video"),
    (re.compile(rb"(?s)RIFF....WAVE|ID3|fLaC|OggS|\xff[\xf2\xf3\xfb]"), "audio"),
)
_MAX_PART_HEAD: Final = 4096
_MAX_PARTS: Final = 1024
# Bodies that a server may unpack; the second is SGLang's.
_ENCODINGS: Final = (b"content-encoding", b"x-body-compressed")
_PLAIN: Final = frozenset({b"", b"identity"})
_MAX_OPENED: Final = 1024
# The event loop waits for the parser, so JSON of more values is not parsed. Between two
# values there is a comma.
_MAX_VALUES: Final = 2**18
# One of these is in each field or type that `find_media` knows. The last two are in any
# JSON that spells them otherwise: an escape, and a zero byte of UTF-16 or UTF-32.
_WORDS_OF_MEDIA: Final = (
    *(b"image", b"video", b"audio", b"time_series", b"file", b"document"),
    *(b"\\u", b"\0"),
)
# An object or a list, in UTF-8, or with a mark or a zero byte of UTF-16 or UTF-32.
_BEGINS_JSON: Final = re.compile(
    rb"(?:\xef\xbb\xbf)?[ \t\r\n]*[\[{]|.{0,3}\0|\xff\xfe|\xfe\xff", re.DOTALL
)
_LONGEST_WORD: Final = max(map(len, _WORDS_OF_MEDIA))
_STEP: Final = 2**18


class BodyEstimator:
    """Estimates the memory that the media of request bodies need.

    Without Pillow, images count as the profile assumes, which is logged once.
    """

    __slots__ = ("_profile", "_warned")

    def __init__(self, profile: MediaProfile) -> None:
        self._profile = profile
        self._warned = False

    def estimate(self, scope: Scope, body: bytes) -> MemoryEstimate:
        """Return what the media of a whole body need; nothing for what is no media."""
        total = MemoryEstimate()
        if not (found := _media_of(scope, body)):
            return total
        for media in found[:_MAX_OPENED]:
            total += self._estimate_one(media)
        # Opening takes time, and the event loop waits: the rest counts as assumed.
        rest = Counter(media.kind for media in found[_MAX_OPENED:])
        for kind, count in rest.items():
            total += self._estimate_one(Media(kind, "")) * count
        return total

    def _estimate_one(self, media: Media) -> MemoryEstimate:
        try:
            return estimate_media(media, self._profile)
        except ImportError as error:
            if not self._warned:
                self._warned = True
                message = "%s; until then, each image counts as %d pixels"
                pixels = self._profile.assumed_pixels
                logging.getLogger("lifecycle").warning(message, error, pixels)
            return estimate_media(Media(media.kind, media.path), self._profile)


def _media_of(scope: Scope, body: bytes) -> list[Media]:
    if _is_encoded(scope):
        return [Media("image", "")]  # not searched, as with TooDeep
    content_type = _header(scope, b"content-type")
    kind = _KINDS.get(content_type.partition(b"/")[0].strip().lower())
    if kind is not None:
        return [Media(kind, "", body)]
    boundary = _BOUNDARY.search(content_type)
    if boundary is not None and content_type.lstrip().lower().startswith(b"multipart/"):
        return list(_form_media(body, boundary[1]))
    if not _BEGINS_JSON.match(body):
        return _file(body)
    if _is_text_alone(body):
        return []
    # In steps, between which other threads get their turn.
    commas = (body.count(b",", at, at + _STEP) for at in range(0, len(body), _STEP))
    if sum(commas) > _MAX_VALUES:
        return [Media("image", "")]  # not searched, as with TooDeep
    try:
        return find_media(parse_json(body, json.loads), max_values=_MAX_VALUES)
    except TooDeep:
        return [Media("image", "")]
    except (ValueError, RecursionError):  # the server refuses it, or it is a file
        return _file(body)


def _is_text_alone(body: bytes) -> bool:
    """Whether *body* is JSON, or nonsense, without any word that media come by.

    Most requests are, and are not parsed here and by the application once more.
    """
    if body[:64].lstrip()[:1] not in (b"{", b"["):
        return False
    # In steps, between which other threads get their turn.
    return not any(
        body.find(word, start, start + _STEP + _LONGEST_WORD) >= 0
        for start in range(0, len(body), _STEP)
        for word in _WORDS_OF_MEDIA
    )


def _file(body: bytes) -> list[Media]:
    kind = _sniff(body, 0)
    return [] if kind is None else [Media(kind, "", body)]


def _sniff(body: bytes, start: int) -> Kind | None:
    """Return the kind of a file by its first bytes; ``None`` for what is no media."""
    found = (kind for magic, kind in _MAGIC if magic.match(body, start))
    return next(found, None)


def _form_media(body: bytes, boundary: bytes) -> Iterator[Media]:
    """Yield the media among the parts of a form."""
    mark, at = b"--" + boundary, 0
    for _ in range(_MAX_PARTS):
        start = body.find(mark, at)
        if start < 0:
            return
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_PART_HEAD)
        at = start + len(mark)
        if head_end < 0:
            continue
        found = _PART_TYPE.search(body, start, head_end)
        kind = _KINDS.get(found[1].lower()) if found is not None else None
        if kind is None and _FILE.search(body, start, head_end):
            kind = _sniff(body, head_end + 4)
        end = body.find(b"\r\n" + mark, head_end)
        at = end if end >= 0 else len(body)  # no byte is in two parts
        if kind is not None:
            yield Media(kind, "", memoryview(body)[head_end + 4 : at])
    yield Media("image", "")  # not searched to its end, as with TooDeep


def _is_encoded(scope: Scope) -> bool:
    """Whether any of the encodings that all headers list changes the body."""
    listed = b",".join(value for name, value in scope["headers"] if name in _ENCODINGS)
    return any(each.strip().lower() not in _PLAIN for each in listed.split(b","))


def _header(scope: Scope, wanted: bytes) -> bytes:
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value)
    return b""
