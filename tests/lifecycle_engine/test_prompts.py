from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lifecycle_engine.chats.prompts import VisionShape, check_images

SHAPE = VisionShape(image_token=9, merge=2, patch_dim=6)


def tensors(*grids: tuple[int, int, int], rows: int | None = None) -> dict[str, Any]:
    """Tensors for the grids, with as many patches or another number."""
    count = sum(t * h * w for t, h, w in grids) if rows is None else rows
    return {
        "pixel_values": memoryview(np.zeros((count, 6), np.float32)),
        "image_grid_thw": memoryview(np.array(grids, np.int64).reshape(-1, 3)),
    }


def test_fitting_images_pass() -> None:
    """Two images whose runs of pads fit their grids are fine, as is plain text."""
    ids = [1, *[9] * 4, 2, *[9] * 2, 3]
    check_images(SHAPE, ids, tensors((1, 4, 4), (1, 2, 4)))
    check_images(SHAPE, [1, 2], {})
    check_images(None, [1, 9], {})


@pytest.mark.parametrize(
    ("ids", "given", "message"),
    [
        ([9], {}, "1 image places"),
        ([1], tensors((1, 2, 2)), r"places of \[\] tokens"),
        ([9, 9], tensors((1, 2, 2)), r"the grids need \[1\]"),
        ([9, 1, 9], tensors((1, 2, 4)), r"the grids need \[2\]"),
        ([9], tensors((1, 2, 2), rows=3), r"expected \(4, 6\)"),
        ([9], tensors((1, 2, 3)), "multiples of 2"),
        ([9], tensors((1, 0, 2)), "positive"),
        ([9], tensors((-1, 2, -2)), "positive"),
        ([9], {"pixel_values": tensors((1, 2, 2))["pixel_values"]}, "expected"),
        ([9], tensors((1, 2, 2)) | {"extra": b""}, "tensors are extra"),
        (
            [9],
            tensors((1, 2, 2)) | {"pixel_values": memoryview(np.zeros((4, 6)))},
            "float32",
        ),
        (
            [9],
            tensors((1, 2, 2)) | {"image_grid_thw": memoryview(np.ones((1, 3), "i4"))},
            "int64",
        ),
        (
            [9],
            tensors((1, 2, 2)) | {"image_grid_thw": memoryview(np.ones((3,), "i8"))},
            r"expected \(images, 3\)",
        ),
    ],
)
def test_unfitting_images_are_refused(ids: Any, given: Any, message: str) -> None:
    """Counts, shapes, types and names that do not fit are told by their sizes."""
    with pytest.raises(ValueError, match=message):
        check_images(SHAPE, ids, given)


def test_text_model_refuses_images() -> None:
    """A model without a vision tower says that it takes none."""
    with pytest.raises(ValueError, match="takes no images"):
        check_images(None, [1], tensors((1, 2, 2)))
    assert VisionShape.of(object()) is None
