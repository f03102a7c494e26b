"""The structure of image files, checked before Pillow opens them.

Pillow creates an object for each chunk of a file, searches for each page among all
pages before it, decodes each scan of a JPEG over the whole image and each tile of a
TIFF whole: kilobytes can become gigabytes, or hours in a thread that cannot be stopped.
So chunks are counted first. Only lengths are read; where a file is inconsistent the
check ends, and Pillow reports the error.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

# A GIF has one chunk for each 255 bytes, so this allows more than 64 MiB.
_MAX_CHUNKS = 2**18
# Each may inflate to a megabyte, and Pillow inflates them to read the header.
_MAX_PNG_TEXTS = 16
# Progressive encoders write about ten.
_MAX_JPEG_SCANS = 100
_MAX_JPEG_EXIF = 2**18
_MAX_TIFF_PAGES = 256
_MAX_TIFF_TILE = 2**22
# Pillow expands these in Python.
_MAX_BMP_RUNS = 2**20

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"zTXt", b"iTXt", b"iCCP")
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_JPEG_AFTER_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_JPEG_WITHOUT_LENGTH = {0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
_JPEG_END, _JPEG_SCAN = 0xD9, 0xDA
_TIFF_ORDER = {b"II": "<", b"MM": ">"}
_TIFF_TILE_SIDES = (322, 323)
_TIFF_SIDES = {3: 2, 4: 4}
_TIFF_BYTES = (1, 2, 6, 7)
# Directories of Exif, GPS and interoperability.
_TIFF_LINKS = (34665, 34853, 40965)


def structure_error(encoded: bytes) -> str | None:
    """Return why Pillow must not open a file; ``None`` if it may."""
    for magic, check in _STRUCTURE_CHECKS:
        if encoded.startswith(magic):
            try:
                return check(encoded)
            except (struct.error, IndexError):  # truncated
                return None
    return None


def _too_many(count: int, limit: int, what: str) -> str | None:
    if count <= limit:
        return None
    return f"has more than {limit} {what}; encode it again, without metadata"


def _png(encoded: bytes) -> str | None:
    chunks, texts, at = 0, 0, len(_PNG)
    while at + 8 <= len(encoded) and chunks <= _MAX_CHUNKS:
        length, kind = struct.unpack_from(">I4s", encoded, at)
        texts += kind in _PNG_TEXTS
        chunks += 1
        at += 12 + length
    return _too_many(texts, _MAX_PNG_TEXTS, "text chunks") or _too_many(
        chunks, _MAX_CHUNKS, "chunks"
    )


def _jpeg(encoded: bytes) -> str | None:
    chunks = scans = exif = at = 0
    while chunks <= _MAX_CHUNKS and scans <= _MAX_JPEG_SCANS:
        # Data and restart markers within a scan are not chunks.
        found = (_JPEG_AFTER_SCAN if scans else _JPEG_MARKER).search(encoded, at)
        start = len(encoded) if found is None else found.start()
        chunks += 1 if scans else 1 + start - at
        if found is None or (scans and encoded[start + 1] == _JPEG_END):
            break
        at, kind = start + 2, encoded[start + 1]
        scans += kind == _JPEG_SCAN
        if kind not in _JPEG_WITHOUT_LENGTH:
            (length,) = struct.unpack_from(">H", encoded, at)
            # Pillow concatenates them.
            exif += length if encoded.startswith(b"Exif\0", at + 2) else 0
            at += max(2, length)
    return (
        _too_many(scans, _MAX_JPEG_SCANS, "scans")
        or _too_many(chunks, _MAX_CHUNKS, "chunks")
        or _too_many(exif, _MAX_JPEG_EXIF, "bytes of Exif")
    )


def _gif(encoded: bytes) -> str | None:
    chunks, at = 0, 13 + _gif_colours(encoded[10])
    while at < len(encoded) and chunks <= _MAX_CHUNKS:
        kind = encoded[at]
        at += 1
        chunks += 1
        if kind == ord(";"):
            break
        if kind == ord(","):
            at += 10 + _gif_colours(encoded[at + 8])
        elif kind == ord("!"):
            at += 1
        else:
            continue
        while encoded[at] and chunks <= _MAX_CHUNKS:
            chunks += 1
            at += 1 + encoded[at]
        at += 1
    return _too_many(chunks, _MAX_CHUNKS, "chunks")


def _gif_colours(flags: int) -> int:
    return 3 << (flags % 8 + 1) if flags & 0x80 else 0


def _tiff(encoded: bytes) -> str | None:
    order = _TIFF_ORDER[encoded[:2]]
    if b"*" not in encoded[2:4]:
        return "is a BigTIFF; encode it as another format"
    try:
        return _tiff_directories(encoded, order)
    except struct.error:  # Pillow would read on
        return "is damaged or truncated; encode it again"


def _tiff_directories(encoded: bytes, order: str) -> str | None:
    values, seen = 0, set[int]()
    links = [*struct.unpack_from(f"{order}I", encoded, 4)]
    while links:
        at = links.pop()
        if at in seen or not at:
            continue
        seen.add(at)
        if len(seen) > _MAX_TIFF_PAGES:
            return _too_many(len(seen), _MAX_TIFF_PAGES, "pages")
        (count,) = struct.unpack_from(f"{order}H", encoded, at)
        end = at + 2 + 12 * count
        sides = [1, 1]
        for entry in struct.iter_unpack(f"{order}HHII", encoded[at + 2 : end]):
            tag, type_, number, value = entry
            values += 0 if type_ in _TIFF_BYTES else number
            if tag in _TIFF_LINKS:
                links.append(value)
            elif tag in _TIFF_TILE_SIDES:
                sides.append(_tiff_side(order, type_, number, value))
        if math.prod(sorted(sides)[-2:]) > _MAX_TIFF_TILE:
            return f"has tiles of more than {_MAX_TIFF_TILE} pixels; encode it again"
        links += struct.unpack_from(f"{order}I", encoded, end)
    return _too_many(values, _MAX_CHUNKS, "chunks")


def _tiff_side(order: str, type_: int, number: int, value: int) -> int:
    """A side of the tiles; above every limit if it is encoded in another way."""
    if type_ not in _TIFF_SIDES or number != 1:
        return _MAX_TIFF_TILE + 1
    # A two-byte value is at the lower address in either byte order.
    return value >> 16 if order == ">" and _TIFF_SIDES[type_] == 2 else value


def _bmp(encoded: bytes) -> str | None:
    head, compression = struct.unpack_from("<I12xI", encoded, 14)
    runs = len(encoded) if head >= 40 and compression in (1, 2) else 0
    return _too_many(runs, _MAX_BMP_RUNS, "bytes of run-length data")


_STRUCTURE_CHECKS: tuple[tuple[bytes, Callable[[bytes], str | None]], ...] = (
    (_PNG, _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"GIF8", _gif),
    (b"II", _tiff),
    (b"MM", _tiff),
    (b"BM", _bmp),
)
