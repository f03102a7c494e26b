"""The model families that the engine knows, by their config's ``model_type``.

A further one is a class with the methods of `vision.Family` and a line in
`_FAMILIES`; everything else about a model is transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lifecycle_engine.chats.prompts import (
    VisionShape,
    check_images,
    check_no_tensors,
    check_squares,
    square_tokens,
)
from lifecycle_engine.runner import Prompt

from .masks import refuse_sight
from .vision import Encoded, Family, Upload, to_device


class PlainText:
    """Decoder-only language models: no images, plain positions."""

    keep: Sequence[str] = ()
    image_token: int | None = None
    axes = 0

    def check(self, prompt: Prompt) -> None:
        """Refuse any tensor."""
        check_no_tensors(prompt.tensors)

    def tokens_of_images(self, tensors: dict[str, Any]) -> list[int]:
        """There are none."""
        del tensors
        return []

    def arrays(self, tensors: dict[str, Any], index: int) -> Sequence[np.ndarray]:
        """There is nothing."""
        raise NotImplementedError

    def encode(
        self, model: Any, tensors: dict[str, Any], index: int, upload: Upload
    ) -> Encoded:
        """There is nothing to encode."""
        raise NotImplementedError

    def begin(self, model: Any, prompt: Prompt) -> None:
        """Plain positions need no working out."""

    def positions(self, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        """Count from the start of the prompt."""
        del prompt
        return torch.arange(start, stop)

    def delta(self, prompt: Prompt) -> int:
        """Decoding goes on where the prompt ended."""
        del prompt
        return 0


class Llava(PlainText):
    """LLaVA 1.5: every image is one square and takes as many tokens."""

    def __init__(self, config: Any) -> None:
        self.image_token = config.image_token_id
        self._side: int = config.vision_config.image_size
        self._tokens = square_tokens(config)

    def check(self, prompt: Prompt) -> None:
        """Refuse other sizes, or image tokens that do not fit the images."""
        assert self.image_token is not None
        places = list(prompt.input_ids).count(self.image_token)
        check_squares(prompt.tensors, side=self._side, each=self._tokens, places=places)

    def tokens_of_images(self, tensors: dict[str, Any]) -> list[int]:
        """The same for each."""
        return [self._tokens] * int(np.asarray(tensors["pixel_values"]).shape[0])

    def arrays(self, tensors: dict[str, Any], index: int) -> Sequence[np.ndarray]:
        """Its pixels."""
        return (np.asarray(tensors["pixel_values"])[index : index + 1],)

    def encode(
        self, model: Any, tensors: dict[str, Any], index: int, upload: Upload
    ) -> Encoded:
        """Run one image through the tower and the projector."""
        (pixels,) = self.arrays(tensors, index)
        output = model.model.get_image_features(upload(pixels), return_dict=True)
        return Encoded(output.pooler_output[0])


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where one image's patches are among those of a request."""

    first: int
    behind: int
    tokens: int


class QwenVL:
    """Qwen2-VL and its successors: flat patches with a grid, three-axis positions.

    The model's own forward stores the deltas of those positions on the module,
    where the request that came last decides for all. Here they are asked of its
    own function, handed in, and kept with the request.
    """

    keep: Sequence[str] = ("mrope.position_deltas",)
    axes = 3

    def __init__(self, config: Any) -> None:
        shape = VisionShape.of(config)
        assert shape is not None
        self._shape = shape
        self.image_token: int | None = shape.image_token

    def check(self, prompt: Prompt) -> None:
        """Refuse patches, grids and image tokens that do not fit each other."""
        check_images(self._shape, prompt.input_ids, prompt.tensors)

    def tokens_of_images(self, tensors: dict[str, Any]) -> list[int]:
        """As many as the grid has merged patches."""
        return [grid.tokens for grid in self._grids(tensors)]

    def arrays(self, tensors: dict[str, Any], index: int) -> Sequence[np.ndarray]:
        """Its patches, and how they lie."""
        grid = self._grids(tensors)[index]
        return (
            np.asarray(tensors["pixel_values"])[grid.first : grid.behind],
            np.asarray(tensors["image_grid_thw"])[index : index + 1],
        )

    def encode(
        self, model: Any, tensors: dict[str, Any], index: int, upload: Upload
    ) -> Encoded:
        """Run one image's patches through the tower."""
        pixels, grid = self.arrays(tensors, index)
        output = model.model.get_image_features(
            upload(pixels),
            upload(grid),
            return_dict=True,
        )
        deep = getattr(output, "deepstack_features", None) or ()
        # Split by image in later releases, as one tensor in earlier ones.
        whole = [
            layer if isinstance(layer, torch.Tensor) else layer[0] for layer in deep
        ]
        return Encoded(output.pooler_output[0], whole)

    def begin(self, model: Any, prompt: Prompt) -> None:
        """Keep the prompt's positions until the strip, the delta to the end."""
        grids = prompt.tensors.get("image_grid_thw")
        if grids is None:
            prompt.tensors["mrope"] = {"position_deltas": 0}
            return
        ids = torch.tensor([prompt.input_ids])
        positions, deltas = model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_token).int(),
            image_grid_thw=to_device(np.asarray(grids), ids.device),
        )
        prompt.tensors["mrope"] = {
            "positions": positions[:, 0],
            "position_deltas": int(deltas.item()),
        }

    def positions(self, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        """Return those of the images, or plain ones behind the last of them."""
        positions: torch.Tensor | None = prompt.tensors["mrope"].get("positions")
        if positions is not None:
            return positions[:, start:stop]
        plain = torch.arange(start, stop) + self.delta(prompt)
        return plain.expand(self.axes, -1)

    def delta(self, prompt: Prompt) -> int:
        """Return how much fewer positions the images took than tokens."""
        delta: int = prompt.tensors["mrope"]["position_deltas"]
        return delta

    def _grids(self, tensors: dict[str, Any]) -> list[_Grid]:
        grids, row = [], 0
        for grid in np.asarray(tensors["image_grid_thw"]).tolist():
            patches = math.prod(grid)
            grids.append(_Grid(row, row + patches, patches // self._shape.merge**2))
            row += patches
        return grids


_FAMILIES: dict[str, Callable[[Any], Family]] = {
    "llava": Llava,
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
}
# Decoder-only, with an embedding, a stack of layers and a head, and nothing else
# that touches the logits but what `logits_of` knows.
_TEXT: tuple[str, ...] = ("cohere", "cohere2", "gemma", "gemma3_text", "glm", "glm4")
_TEXT += ("granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi")
_TEXT += ("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm")
_TEXT += ("starcoder2",)
# Rotary positions whose frequencies depend on the longest of a batch, behind a point.
_GROWING = ("dynamic", "longrope")


def family_of(config: Any) -> Family:
    """Return the family of a model.

    Raises:
        ValueError: One that is not known here, or around a text model that is not,
            or whose tokens see what is not known.
    """
    known = {**_FAMILIES, **dict.fromkeys(_TEXT, _plain)}
    make = known.get(config.model_type)
    if make is None:
        raise ValueError(
            f"the model is a {config.model_type}; known are {', '.join(sorted(known))}"
        )
    text = config.get_text_config()
    if make is Llava and text.model_type not in _TEXT:
        raise ValueError(
            f"the text model is a {text.model_type}; known are {', '.join(_TEXT)}"
        )
    refuse_sight(text)
    return make(config)


def _plain(config: Any) -> Family:
    del config
    return PlainText()


def logits_of(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what a model does to the logits of its head, by its config.

    Some models of text scale them, which changes no greedy token but every other
    draw; the same ones behind images do not.
    """
    times = getattr(config, "logit_scale", None)
    if times is not None:
        return lambda logits: logits * times
    by = getattr(config, "logits_scaling", None)
    if by is not None:
        return lambda logits: logits / by
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    return lambda logits: logits


def takes_images(config: Any) -> bool:
    """Whether a model of a known family takes images."""
    return config.model_type in _FAMILIES


def longest_of(text: Any) -> int:
    """Return how many positions a language model takes, each row for itself.

    Where frequencies grow with the longest of a batch, each request would change
    those of the others; so up to where they begin to.
    """
    limit: int = text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = min(limit, rope["original_max_position_embeddings"])
    return limit


def hold_frequencies(text: Any) -> None:
    """Keep a language model from asking the device whether to grow; see `longest_of`.

    It does so in each forward pass, which no graph can be made of.
    """
    for module in text.modules():
        if getattr(module, "rope_type", None) in _GROWING:
            module.rope_type = "default"
