"""Images on the API's side: by transformers' own image processors, one by one.

`AutoProcessor` is not used: for the Qwen models it insists on a video processor,
which needs torchvision. Nor is `AutoImageProcessor`, which in some releases asks
for torchvision even where the PIL variant is wanted. Nothing here needs torch;
where torch is installed, transformers imports it all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lifecycle_engine.chats.prompts import (
    VisionShape,
    check_images,
    check_squares,
    square_tokens,
)
from lifecycle_engine.models._hf import config_of, hf, in_a_sentence
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

    def check(self, ids: Sequence[int], tensors: Mapping[str, np.ndarray]) -> None:
        """Refuse what the model's engine would: `ValueError`."""
        ...


class GridImages:
    """Qwen: any size, scaled to the checkpoint's limits; patches and their grid."""

    def __init__(self, checkpoint: Path, config: Any) -> None:
        self._images: Any = hf(
            "Qwen2VLImageProcessorPil", "models.qwen2_vl.image_processing_pil_qwen2_vl"
        ).from_pretrained(str(checkpoint), local_files_only=True)
        self.token = "<|image_pad|>"
        vision = config.vision_config
        self._merge = vision.spatial_merge_size**2
        self._shape = VisionShape.of(config)
        for name, wanted in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.spatial_merge_size),
            ("temporal_patch_size", vision.temporal_patch_size),
        ):
            if (found := getattr(self._images, name)) != wanted:
                # Not all of it shows: patches in another order are as many.
                raise ValueError(
                    f"the image processor has {name} of {found}, the model {wanted}; "
                    f"their files must be of one checkpoint"
                )

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

    def check(self, ids: Sequence[int], tensors: Mapping[str, np.ndarray]) -> None:
        """Compare patches, grids and tokens with the model's."""
        check_images(self._shape, ids, tensors)


class SquareImages:
    """LLaVA 1.5: every image is cropped to one square and takes as many tokens."""

    def __init__(self, checkpoint: Path, config: Any) -> None:
        kind = _kind(checkpoint)
        if kind not in _PIL:
            raise ValueError(
                f"the image processor is {kind}; known are {', '.join(sorted(_PIL))}"
            )
        module, name = _PIL[kind]
        self._images: Any = hf(f"{name}ImageProcessorPil", module).from_pretrained(
            str(checkpoint), local_files_only=True
        )
        self._each = square_tokens(config)
        self._side = config.vision_config.image_size
        self._pad = config.image_token_id
        self.token = "<image>"

    def tensors(self, image: Any, position: int) -> dict[str, np.ndarray]:
        """Scale and crop one image."""
        del position
        output = self._images(images=[image], return_tensors="np")
        return {"pixel_values": output["pixel_values"]}

    def counts(self, tensors: Mapping[str, np.ndarray]) -> list[int]:
        """The same for each."""
        return [self._each] * len(tensors["pixel_values"])

    def check(self, ids: Sequence[int], tensors: Mapping[str, np.ndarray]) -> None:
        """Compare squares and tokens with the model's."""
        places = list(ids).count(self._pad)
        check_squares(tensors, side=self._side, each=self._each, places=places)


def _kind(checkpoint: Path) -> str:
    """Which image processor a checkpoint's files name, wherever they do."""
    reader = hf("ImageProcessingMixin", "image_processing_base")
    told, _ = reader.get_image_processor_dict(str(checkpoint), local_files_only=True)
    # Older ones call it a feature extractor.
    kind = told.get("image_processor_type") or told.get("feature_extractor_type") or ""
    kind = kind.removesuffix("Fast").removesuffix("Pil")
    return str(kind.replace("FeatureExtractor", "ImageProcessor")) or "without a name"


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
    if make is None:
        return None
    with in_a_sentence("image processor"):
        return make(checkpoint, config)
