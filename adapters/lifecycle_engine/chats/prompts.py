"""What a prompt with images must look like.

Covers the families whose image processor emits flat patches with a
``(time, height, width)`` grid (Qwen2-VL and its successors) or squares of one
size (LLaVA 1.5). Checks are made before anything is queued, so that prefill is
not where bad input shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Tokens that a vision tower puts in front of the patches.
_FRONT = {"clip_vision_model": 1, "siglip_vision_model": 0}
IMAGE_TENSORS = ("pixel_values", "image_grid_thw")


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes that tie image tensors to image tokens.

    Attributes:
        image_token: The id that stands for one merged patch.
        merge: Patches of a side that become one token.
        patch_dim: Floats of one patch.
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
    """Refuse tensors for a model of text alone.

    Raises:
        ValueError: With their names only.
    """
    if tensors:
        raise ValueError("the model takes no images; send text only")


def square_tokens(config: Any) -> int:
    """Return how many tokens an image of a LLaVA 1.5 takes.

    Raises:
        ValueError: A vision tower of an unknown kind.
    """
    vision = config.vision_config
    if vision.model_type not in _FRONT:
        raise ValueError(
            f"the vision tower is a {vision.model_type}; known are "
            f"{', '.join(sorted(_FRONT))}"
        )
    tokens: int = (vision.image_size // vision.patch_size) ** 2
    tokens += _FRONT[vision.model_type]
    return tokens - int(config.vision_feature_select_strategy == "default")


def check_squares(
    tensors: Mapping[str, Any], *, side: int, each: int, places: int
) -> None:
    """Refuse anything but square images of one size with their tokens.

    Args:
        tensors: ``pixel_values`` of ``(images, 3, side, side)``, or nothing.
        side: Pixels.
        each: Tokens that one image takes.
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
    """Lengths of the runs of image tokens, in order."""
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
