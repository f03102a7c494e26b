"""Images on the API's side: by transformers' own image processors, one by one.

`AutoProcessor` is not used: for the Qwen models it insists on a video processor,
which needs torchvision. Nor is `AutoImageProcessor`, which in some releases asks
for torchvision even where the PIL variant is wanted. Nothing here needs torch;
where torch is installed, transformers imports it all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lifecycle_engine.chats.prompts import square_tokens
from lifecycle_engine.models._hf import config_of, hf
from lifecycle_engine.processor import BadImage

# The image processor of the Qwen models refuses more, and late.
_MAX_ASPECT = 200
_PIL = {
    "CLIPImageProcessor": ("models.clip.image_processing_pil_clip", "CLIP"),
    "SiglipImageProcessor": ("models.siglip.image_processing_pil_siglip", "Siglip"),
    "LlavaImageProcessor": ("models.llava.image_processing_pil_llava", "Llava"),
}


class ImageSide(Protocol):
    """What differs between families in making images ready.

    Attributes:
        token: The control token that stands for an image in the chat template's
            text, and for each of its tokens in the prompt.
    """

    token: str

    def tensors(self, image: Any, position: int) -> dict[str, np.ndarray]:
        """Make one RGB image what the engine takes; `BadImage` if it cannot be.

        The arrays of several images are joined along their first axis.
        """
        ...

    def counts(self, tensors: Mapping[str, np.ndarray]) -> list[int]:
        """Return how many tokens each image takes, in order."""
        ...


class GridImages:
    """Qwen: any size, scaled to the checkpoint's limits; patches and their grid."""

    def __init__(self, checkpoint: Path, config: Any) -> None:
        self._images: Any = hf(
            "Qwen2VLImageProcessorPil", "models.qwen2_vl.image_processing_pil_qwen2_vl"
        ).from_pretrained(str(checkpoint), local_files_only=True)
        self.token = "<|image_pad|>"
        self._merge = config.vision_config.spatial_merge_size**2

    def tensors(self, image: Any, position: int) -> dict[str, np.ndarray]:
        """Cut one image into patches."""
        width, height = image.size
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise BadImage(
                f"image {position} has {width} x {height} pixels; the longer side may "
                f"be {_MAX_ASPECT} times the shorter one: crop it"
            )
        output = self._images(images=[image], return_tensors="np")
        return {name: output[name] for name in ("pixel_values", "image_grid_thw")}

    def counts(self, tensors: Mapping[str, np.ndarray]) -> list[int]:
        """As many as each grid has merged patches."""
        grids = tensors["image_grid_thw"].tolist()
        return [math.prod(grid) // self._merge for grid in grids]


class SquareImages:
    """LLaVA 1.5: every image is cropped to one square and takes as many tokens."""

    def __init__(self, checkpoint: Path, config: Any) -> None:
        settings = (checkpoint / "preprocessor_config.json").read_text("utf-8")
        kind = str(json.loads(settings)["image_processor_type"]).removesuffix("Fast")
        if kind not in _PIL:
            raise ValueError(
                f"the image processor is {kind}; known are {', '.join(sorted(_PIL))}"
            )
        module, name = _PIL[kind]
        self._images: Any = hf(f"{name}ImageProcessorPil", module).from_pretrained(
            str(checkpoint), local_files_only=True
        )
        self._each = square_tokens(config)
        self.token = "<image>"

    def tensors(self, image: Any, position: int) -> dict[str, np.ndarray]:
        """Scale and crop one image."""
        del position
        output = self._images(images=[image], return_tensors="np")
        return {"pixel_values": output["pixel_values"]}

    def counts(self, tensors: Mapping[str, np.ndarray]) -> list[int]:
        """The same for each."""
        return [self._each] * len(tensors["pixel_values"])


_SIDES: dict[str, Callable[[Path, Any], ImageSide]] = {
    "llava": SquareImages,
    "qwen2_vl": GridImages,
    "qwen2_5_vl": GridImages,
    "qwen3_vl": GridImages,
}


def image_side_of(checkpoint: Path) -> ImageSide | None:
    """Return what makes a checkpoint's images ready; ``None`` for text alone."""
    config = config_of(checkpoint)
    make = _SIDES.get(config.model_type)
    return None if make is None else make(checkpoint, config)
