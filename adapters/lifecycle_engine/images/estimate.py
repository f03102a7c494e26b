"""What the media of a request weigh, before anything is decoded or fetched.

The server knows its own requests better than this. `estimate` is for gates in front of
other engines: whatever form a request has, and whatever its media claim to be.
"""

from __future__ import annotations

import base64
import binascii

from lifecycle_asgi.media import Media, find_media
from lifecycle_engine.api_errors import ApiError

from .media import Measure, MediaLimits, Weight, measure, weigh

# Samples of audio as float32, and what is made of them: 100 frames of 128 mels.
_SAMPLES_PER_SECOND = 16_000
_FEATURE_BYTES_PER_SECOND = 100 * 128 * 4


def estimate(request: object, limits: MediaLimits | None = None) -> Weight:
    """What the media of *request* need in this process, at the most.

    An image is charged by the size in its header. One that cannot be read, is larger
    than the limits let it be, or is elsewhere, is charged what they let it be. Video
    and audio are charged by their limits, whatever they say of themselves. Text is
    free.

    Args:
        request: In any form that `lifecycle_asgi.media.find_media` knows.
        limits: What one request may bring.

    Raises:
        TooDeep: As from `find_media`.
    """
    limits = limits or MediaLimits()
    total = Weight()
    for media in find_media(request):
        total += _weight(media, limits)
    return total


def _weight(media: Media, limits: MediaLimits) -> Weight:
    encoded = _size(media)
    if media.kind == "audio":
        samples = limits.audio_seconds * _SAMPLES_PER_SECOND
        features = limits.audio_seconds * _FEATURE_BYTES_PER_SECOND
        return Weight(encoded + 4 * samples, features)
    if media.kind == "video":
        pixels = limits.video_frames * limits.frame_pixels
        return weigh([Measure(encoded, pixels, limits.video_frames)])
    cap = Measure(encoded, limits.image_pixels, 1)
    content = _bytes(media) if media.kind == "image" else None
    if content is None:
        return weigh([cap])
    try:
        return weigh([measure(content, limits, param="")])
    except ApiError:  # odd, or huge
        return weigh([cap])


def _size(media: Media) -> int:
    if media.data is None:
        return 0
    return media.data.nbytes if isinstance(media.data, memoryview) else len(media.data)


def _bytes(media: Media) -> bytes | None:
    """The file itself, if it is here."""
    if media.data is None or not isinstance(media.data, str):
        return None if media.data is None else bytes(media.data)
    head, comma, data = media.data.partition(",")
    if not head.startswith("data:"):
        data = "" if ":" in media.data[:16] else media.data  # a URL is elsewhere
    elif not comma or not head.endswith(";base64"):
        return None
    try:
        return base64.b64decode(data) or None
    except (binascii.Error, ValueError):
        return None
