"""How large a small picture becomes: bytes of the file beside bytes of the payload.

The pictures are drawn here, the payload is what the image processor of Qwen2.5-VL
makes of them when it does not scale them down.
"""

from __future__ import annotations

import base64
import io
import random

from lifecycle_demo.pictures import draw

SIZES = ((160, 120), (1280, 720), (1920, 1080), (3840, 2160), (3000, 4000))
PATCH = 28  # pixels; sides are rounded to whole merged patches
LARGEST = 16384 * PATCH * PATCH


def payload_bytes(file: bytes) -> int:
    """Return the bytes of the `pixel_values` of an encoded picture."""
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": PATCH * PATCH, "longest_edge": LARGEST}
    )
    made = processor(Image.open(io.BytesIO(file)), return_tensors="np")
    return int(made["pixel_values"].nbytes)


def main() -> None:
    """Print one line a picture."""
    chance = random.Random(1)
    print(f"{'size':>11} {'PNG':>10} {'payload':>11} {'ratio':>7}")
    for width, height in SIZES:
        picture = draw("", width, height, "PNG", chance)
        file = base64.b64decode(picture.url.partition(",")[2])
        payload = payload_bytes(file)
        print(
            f"{width:>5}x{height:<5} {len(file) / 1024:>6.0f} KiB "
            f"{payload / 2**20:>7.1f} MiB {payload / len(file):>6.0f}x"
        )


if __name__ == "__main__":
    main()
