"""Image preprocessing by transformers, and checks of prompts with images.

Two kinds of families are covered: those whose image processor returns flat patches
with a ``(time, height, width)`` grid (Qwen2-VL and its successors), and those with
squares of one size (LLaVA 1.5). Tensors are checked before a request is queued, so that
prefill does not meet bad input.

`AutoProcessor` is not used: for the Qwen models it requires a video processor, which
needs torchvision. Neither is `AutoImageProcessor`, which in some releases needs
torchvision even for the PIL variant. Nothing here needs torch; if it is installed,
transformers imports it all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lifecycle_asgi import MediaProfile
from lifecycle_engine._compat import config_of, hf, readable_errors
from lifecycle_engine.errors import BadImage

# Tokens that a vision tower puts in front of the patches.
_PREFIX_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
_SQUARE_BYTES = 12  # of a pixel: three colours in float32
# Of a pixel: CMYK and the coefficients of a progressive JPEG, or RGBA and a strip of a
# TIFF in 16 bits; RGB and what it is converted from take less.
_DECODED_BYTES = 12
IMAGE_TENSORS = ("pixel_values", "image_grid_thw")


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes that relate image tensors to image tokens.

    Attributes:
        image_token: Token id of one merged patch.
        merge: Patches per side that are merged into one token.
        patch_dim: Number of floats of one patch.
    """

    image_token: int
    merge: int
    patch_dim: int

    @classmethod
    def of(cls, config: Any) -> VisionShape | None:
        """Read the sizes from a model's config; ``None`` for a text-only model."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return None
        patch = vision.patch_size**2 * vision.temporal_patch_size * vision.in_channels
        return cls(
            image_token=config.image_token_id,
            merge=vision.spatial_merge_size,
            patch_dim=patch,
        )


def check_images(
    shape: VisionShape | None, input_ids: Sequence[int], tensors: Mapping[str, Any]
) -> None:
    """Refuse image tensors that do not fit each other or the prompt.

    Raises:
        ValueError: With sizes and names only.
    """
    runs = _image_runs(shape.image_token, input_ids) if shape is not None else []
    if not tensors:
        if runs:
            raise ValueError(f"{len(runs)} image places in input_ids, but no tensors")
        return
    if shape is None:
        check_no_tensors(tensors)
        return
    if sorted(tensors) != sorted(IMAGE_TENSORS):
        raise ValueError(
            f"tensors are {', '.join(sorted(tensors))}; "
            f"expected {', '.join(IMAGE_TENSORS)}"
        )
    pixels = memoryview(tensors["pixel_values"])
    grids = _grids(shape, memoryview(tensors["image_grid_thw"]))
    _check_pixels(shape, pixels, grids)
    tokens = [math.prod(grid) // shape.merge**2 for grid in grids]
    if runs != tokens:
        raise ValueError(
            f"image places of {runs} tokens in input_ids; the grids need {tokens}"
        )


def check_no_tensors(tensors: Mapping[str, Any]) -> None:
    """Refuse tensors for a text-only model.

    Raises:
        ValueError: With their names only.
    """
    if tensors:
        raise ValueError("the model takes no images; send text only")


def square_tokens(config: Any) -> int:
    """Return the number of tokens of an image in LLaVA 1.5.

    Raises:
        ValueError: The vision tower is of an unknown kind.
    """
    vision = config.vision_config
    if vision.model_type not in _PREFIX_TOKENS:
        raise ValueError(
            f"the vision tower is a {vision.model_type}; known are "
            f"{', '.join(sorted(_PREFIX_TOKENS))}"
        )
    tokens: int = (vision.image_size // vision.patch_size) ** 2
    tokens += _PREFIX_TOKENS[vision.model_type]
    return tokens - int(config.vision_feature_select_strategy == "default")


def check_squares(
    tensors: Mapping[str, Any], *, side: int, each: int, places: int
) -> None:
    """Refuse tensors other than square images of one size that match the tokens.

    Args:
        tensors: ``pixel_values`` of ``(images, 3, side, side)``, or nothing.
        side: Pixels of a side.
        each: Tokens of one image.
        places: Image tokens in the prompt.

    Raises:
        ValueError: With sizes and names only.
    """
    images = 0
    if tensors:
        if list(tensors) != ["pixel_values"]:
            names = ", ".join(sorted(tensors))
            raise ValueError(f"tensors are {names}; expected pixel_values")
        view = memoryview(tensors["pixel_values"])
        shape = view.shape or ()
        images = shape[0] if shape[1:] == (3, side, side) else 0
        if view.format != "f" or not images:
            raise ValueError(
                f"pixel_values has format {view.format!r} and shape {view.shape}; "
                f"expected float32, (images, 3, {side}, {side})"
            )
    if places != images * each:
        raise ValueError(
            f"{places} image tokens in input_ids; {images} images need {images * each}"
        )


def _image_runs(image_token: int, input_ids: Sequence[int]) -> list[int]:
    runs: list[int] = []
    inside = False
    for token in input_ids:
        if token != image_token:
            inside = False
        elif inside:
            runs[-1] += 1
        else:
            inside = True
            runs.append(1)
    return runs


def _grids(shape: VisionShape, view: memoryview) -> list[list[int]]:
    if view.format not in ("q", "l") or view.itemsize != 8:
        raise ValueError(f"image_grid_thw has format {view.format!r}; expected int64")
    if view.ndim != 2 or view.shape is None or view.shape[1] != 3:
        raise ValueError(f"image_grid_thw has shape {view.shape}; expected (images, 3)")
    grids: Any = view.tolist()
    for grid in grids:
        _, height, width = grid
        if min(grid) < 1 or height % shape.merge or width % shape.merge:
            raise ValueError(
                f"grid {grid}; sides must be positive multiples of {shape.merge}"
            )
    return list(grids)


def _check_pixels(shape: VisionShape, view: memoryview, grids: list[list[int]]) -> None:
    if view.format != "f":
        raise ValueError(f"pixel_values has format {view.format!r}; expected float32")
    rows = sum(math.prod(grid) for grid in grids)
    if view.shape != (rows, shape.patch_dim):
        raise ValueError(
            f"pixel_values has shape {view.shape}; expected ({rows}, {shape.patch_dim})"
        )


# The image processor of the Qwen models refuses more, and late.
_MAX_ASPECT = 200
# Of a thin image: the one that is cut out of it, and what filters see around that.
_SQUARES = 4
_QWEN = "models.qwen2_vl.image_processing_pil_qwen2_vl"
_PIL = {
    "CLIPImageProcessor": ("models.clip.image_processing_pil_clip", "CLIP"),
    "SiglipImageProcessor": ("models.siglip.image_processing_pil_siglip", "Siglip"),
    "LlavaImageProcessor": ("models.llava.image_processing_pil_llava", "Llava"),
}


def _check_aspect(image: Any, position: int) -> None:
    width, height = image.size
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise BadImage(
            f"image {position} has {width} x {height} pixels; the longer side may "
            f"be {_MAX_ASPECT} times the shorter one: crop it"
        )


class ImagePreprocessor(Protocol):
    """Image preprocessing of one model family.

    Attributes:
        token: The control token of an image in the output of the chat template, and
            of each of its tokens in the prompt.
        media: What images need by their pixels.
    """

    token: str
    media: MediaProfile

    def tensors(self, image: Any, position: int) -> dict[str, np.ndarray]:
        """Return the tensors of one RGB image; `BadImage` if it is not supported.

        The arrays of several images are concatenated along their first axis.
        """

    def counts(self, tensors: Mapping[str, np.ndarray]) -> list[int]:
        """Return the number of tokens of each image, in order."""

    def check(self, ids: Sequence[int], tensors: Mapping[str, np.ndarray]) -> None:
        """Raise `ValueError` for tensors that the engine would refuse."""


class GridPreprocessor:
    """Qwen: images of any size, scaled to the checkpoint's limits; patches and grid."""

    def __init__(self, checkpoint: Path, config: Any) -> None:
        self._images: Any = hf("Qwen2VLImageProcessorPil", _QWEN).from_pretrained(
            str(checkpoint), local_files_only=True
        )
        self._resize: Any = hf("smart_resize", _QWEN)
        self.token = "<|image_pad|>"
        # Of these processors, the longest and the shortest "edge" are areas.
        least, most = 0, None
        if self._images.do_resize:
            # Both sides are rounded up, each to whole tokens.
            side = math.sqrt(self._images.size.shortest_edge) + self._token_side()
            least = math.ceil(side**2)
            most = max(least, self._images.size.longest_edge)
        self.media = MediaProfile(
            work_bytes_per_pixel=_DECODED_BYTES,
            tensor_pixels=most,
            min_tensor_pixels=least,
            all_frames=False,
        )
        vision = config.vision_config
        self._merge = vision.spatial_merge_size**2
        self._shape = VisionShape.of(config)
        for name, wanted in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.spatial_merge_size),
            ("temporal_patch_size", vision.temporal_patch_size),
        ):
            if (found := getattr(self._images, name)) != wanted:
                # Checked here, since patches in another order have the same shape.
                raise ValueError(
                    f"the image processor has {name} of {found}, the model {wanted}; "
                    f"their files must be of one checkpoint"
                )

    def tensors(self, image: Any, position: int) -> dict[str, np.ndarray]:
        """Cut one image into patches."""
        _check_aspect(image, position)
        if self._images.do_resize:
            image = image.resize(self._scaled(image.size), self._images.resample)
        output = self._images(images=[image], do_resize=False, return_tensors="np")
        return {name: output[name] for name in ("pixel_values", "image_grid_thw")}

    def _scaled(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size to scale an image to, where transformers would copy it."""
        height, width = self._resize(
            *reversed(size),
            factor=self._token_side(),
            min_pixels=self._images.size.shortest_edge,
            max_pixels=self._images.size.longest_edge,
        )
        return width, height

    def _token_side(self) -> int:
        side: int = self._images.patch_size * self._images.merge_size
        return side

    def counts(self, tensors: Mapping[str, np.ndarray]) -> list[int]:
        """Return the number of merged patches of each grid."""
        grids = tensors["image_grid_thw"].tolist()
        return [math.prod(grid) // self._merge for grid in grids]

    def check(self, ids: Sequence[int], tensors: Mapping[str, np.ndarray]) -> None:
        """Check patches, grids and tokens."""
        check_images(self._shape, ids, tensors)


class SquarePreprocessor:
    """LLaVA 1.5: images are cropped to squares of the same number of tokens."""

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
        self._pads = self._images.do_pad and hasattr(self._images, "pad_to_square")
        size = self._images.size
        by_short = size.shortest_edge and not size.longest_edge
        self._crops = self._images.do_center_crop and by_short
        self.token = "<image>"
        self.media = MediaProfile(
            tensor_bytes_per_pixel=_SQUARE_BYTES,
            tensor_pixels=self._side**2,
            min_tensor_pixels=self._side**2,
            all_frames=False,
        )

    def tensors(self, image: Any, position: int) -> dict[str, np.ndarray]:
        """Scale and crop one image."""
        _check_aspect(image, position)
        if self._pads:
            self._check_square(image, position)
        elif self._crops:
            image = _middle(image)
        output = self._images(images=[image], return_tensors="np")
        return {"pixel_values": output["pixel_values"]}

    def _check_square(self, image: Any, position: int) -> None:
        """Refuse an image that would be padded to a square of too many pixels."""
        side, most = max(image.size), self.media.image_pixels
        if side**2 > most:
            raise BadImage(
                f"image {position} is padded to {side} x {side} pixels; the limit is "
                f"{most}: scale it down"
            )

    def counts(self, tensors: Mapping[str, np.ndarray]) -> list[int]:
        """Return the same number for each image."""
        return [self._each] * len(tensors["pixel_values"])

    def check(self, ids: Sequence[int], tensors: Mapping[str, np.ndarray]) -> None:
        """Check squares and tokens."""
        places = list(ids).count(self._pad)
        check_squares(tensors, side=self._side, each=self._each, places=places)


def _middle(image: Any) -> Any:
    """Cut the ends off a thin image, of which a square in the middle will be left.

    transformers would scale up all of it first. Where squares are cut off, the middle
    is scaled as with them, but for rounding.
    """
    short, long = sorted(image.size)
    cut = max(0, long // short - _SQUARES) // 2 * short
    if not cut:  # what is cut is a copy
        return image
    across, down = (cut if side == long else 0 for side in image.size)
    return image.crop((across, down, image.width - across, image.height - down))


def _kind(checkpoint: Path) -> str:
    """Return the name of a checkpoint's image processor class."""
    reader = hf("ImageProcessingMixin", "image_processing_base")
    options, _ = reader.get_image_processor_dict(str(checkpoint), local_files_only=True)
    # Older checkpoints call it a feature extractor.
    kind = (
        options.get("image_processor_type")
        or options.get("feature_extractor_type")
        or ""
    )
    kind = kind.removesuffix("Fast").removesuffix("Pil")
    return str(kind.replace("FeatureExtractor", "ImageProcessor")) or "without a name"


_PREPROCESSORS: dict[str, Callable[[Path, Any], ImagePreprocessor]] = {
    "llava": SquarePreprocessor,
    "qwen2_vl": GridPreprocessor,
    "qwen2_5_vl": GridPreprocessor,
    "qwen3_vl": GridPreprocessor,
}


def image_preprocessor_for(checkpoint: Path) -> ImagePreprocessor | None:
    """Return the image preprocessor of a checkpoint; ``None`` if it is text-only."""
    config = config_of(checkpoint)
    make = _PREPROCESSORS.get(config.model_type)
    if make is None:
        return None
    with readable_errors("image processor"):
        return make(checkpoint, config)
