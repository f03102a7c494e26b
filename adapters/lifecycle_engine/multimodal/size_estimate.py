"""`estimate`, with the limits of the bundled server."""

from __future__ import annotations

import lifecycle_asgi
from lifecycle_asgi import (
    Correction,
    ImageSize,
    MediaProfile,
    MemoryEstimate,
    estimate_memory,
)
from lifecycle_engine.multimodal.limits import MediaLimits

__all__ = ("Correction", "ImageSize", "MemoryEstimate", "estimate", "estimate_memory")


def estimate(request: object, limits: MediaLimits | None = None) -> MemoryEstimate:
    """Estimate the memory that the media of *request* need in this process at most.

    As `lifecycle_asgi.estimate`, with the bundled server's limits on media: an image
    that exceeds them, or cannot be read, counts as the limit.

    Args:
        request: Request in any format that `lifecycle_asgi.find_media` knows.
        limits: Limits on media.

    Raises:
        TooDeep: As from `lifecycle_asgi.find_media`.
    """
    limits = limits or MediaLimits()
    profile = MediaProfile(
        image_pixels=limits.image_pixels,
        assumed_pixels=limits.image_pixels,
        video_frames=limits.video_frames,
        frame_pixels=limits.frame_pixels,
        audio_seconds=limits.audio_seconds,
    )
    return lifecycle_asgi.estimate(request, profile)
