"""What media cost the servers that are known."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lifecycle.lowlevel import check_choice
from lifecycle_asgi.media_memory import MediaProfile

# Pillow's limit on pixels, unless a server changes it: larger images are not decoded.
_PILLOW_PIXELS: Final = 178_956_970
# For an image by URL: a photo of twelve megapixels and a little more.
_ASSUMED_PIXELS: Final = 16_000_000

# While an image is prepared: four bytes for each pixel in Pillow, as many for its copy
# without transparency, and three in a tensor or an array.
_WORK: Final = 12
# A float32 copy of the scaled image, and the patches of a model that reads pairs of
# frames, which are twice as large.
_TENSORS: Final = 12 + 24
# SGLang pickles the tensors for its scheduler.
_PICKLED: Final = 24

_DEFAULT: Final = MediaProfile(
    work_bytes_per_pixel=_WORK,
    tensor_bytes_per_pixel=_TENSORS,
    image_pixels=_PILLOW_PIXELS,
    assumed_pixels=_ASSUMED_PIXELS,
)
# Of servers that decode the first frame of an animation.
_FIRST_FRAME: Final = replace(_DEFAULT, all_frames=False)
_PROFILES: Final[Mapping[str, MediaProfile]] = {
    "default": _DEFAULT,
    # Decoded, converted, and copied by `tobytes`, which joins pieces.
    "pillow": replace(_DEFAULT, work_bytes_per_pixel=15, tensor_bytes_per_pixel=0),
    "vllm": _FIRST_FRAME,
    "lmdeploy": _FIRST_FRAME,
    "sglang": replace(_FIRST_FRAME, tensor_bytes_per_pixel=_TENSORS + _PICKLED),
    # Passes media on as it got them.
    "proxy": MediaProfile(
        work_bytes_per_pixel=0,
        tensor_bytes_per_pixel=0,
        video_frames=0,
        audio_seconds=0,
    ),
}
# The first that this process has imported is the server.
_SERVERS: Final[Mapping[str, str]] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "lmdeploy": "lmdeploy",
    "litellm.proxy": "proxy",
}


def media_profile(profile: str | MediaProfile) -> MediaProfile:
    """Return what media cost a server.

    The profiles are upper bounds, read from the sources of the servers; `Admission`
    corrects them by what hooks report.

    Args:
        profile: One, the name of one, or ``"auto"``: that of the server whose package
            this process has imported.

    Raises:
        ValueError: There is no profile of that name.
    """
    if isinstance(profile, MediaProfile):
        return profile
    check_choice(("auto", *_PROFILES), profile=profile)
    return _PROFILES[server_of(profile)]


def server_of(profile: str) -> str:
    """Return *profile*, or for ``"auto"`` that of the server which is imported."""
    if profile != "auto":
        return profile
    found = (name for each, name in _SERVERS.items() if each in sys.modules)
    return next(found, "default")
