"""The model families that the engine supports, by their config's ``model_type``.

A new family is a subclass of `ModelFamily` and an entry in `_FAMILIES`; all else
about a model is transformers' own.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lifecycle_engine.core.model_runner import Prompt
from lifecycle_engine.core.slots import ImageSpan
from lifecycle_engine.processing.image_processor import (
    VisionShape,
    check_images,
    check_no_tensors,
    check_squares,
    square_tokens,
)

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of attention, in transformers' terms."""
# With a window of one position the caches of transformers return all positions.
_MIN_WINDOW = 2
# Key of the encoded image in the prompt's tensors; removed by the strip.
_ENCODED = "encoded"


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The output of the vision tower for one image.

    Attributes:
        features: ``(tokens, hidden)``, inserted in place of the image tokens.
        deep: Features for further layers, in families that have them.
    """

    features: torch.Tensor
    deep: Sequence[torch.Tensor] = ()

    def part(self, start: int, stop: int) -> EncodedImage:
        """Return the features of the tokens ``start .. stop - 1``."""
        deep = [each[start:stop] for each in self.deep]
        return EncodedImage(self.features[start:stop], deep)


# Copies an array to the model's device and keeps it alive until the copy is done.
StartCopy = Callable[[np.ndarray], torch.Tensor]


class ModelFamily:
    """What differs between model families; this one has text and plain positions.

    Attributes:
        keep: Paths in `Prompt.tensors` that decoding needs.
        image_token: Id of the placeholder for one image token; ``None`` for a model
            without images.
        axes: Axes of a rotary position; 0 if it is a plain number.
    """

    keep: Sequence[str] = ()
    image_token: int | None = None
    axes = 0

    def __init__(self, config: Any) -> None:
        """Make the family of a model with this config."""

    def check(self, prompt: Prompt) -> None:
        """Raise `ValueError` if the tensors do not fit each other or the prompt."""
        check_no_tensors(prompt.tensors)

    def tokens_of_images(self, tensors: dict[str, Any]) -> list[int]:
        """Return the number of tokens of each image, in order."""
        del tensors
        return []

    def arrays(self, tensors: dict[str, Any], index: int) -> Sequence[np.ndarray]:
        """Return the arrays of one image."""
        raise NotImplementedError

    def encode(
        self, model: Any, tensors: dict[str, Any], index: int, start_copy: StartCopy
    ) -> EncodedImage:
        """Encode one image on the model's device."""
        raise NotImplementedError

    def prepare_positions(self, model: Any, prompt: Prompt) -> None:
        """Compute rotary positions before the first chunk."""

    def positions(self, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        """Return a chunk's rotary positions: ``(axes, tokens)`` or ``(tokens,)``."""
        del prompt
        return torch.arange(start, stop)

    def delta(self, prompt: Prompt) -> int:
        """Return the offset of the rotary positions of decoding from the length."""
        del prompt
        return 0


def tensors_needed_until(family: ModelFamily, prompt: Prompt) -> int:
    """Return the position after the last image token; 0 without images."""
    if family.image_token is None or not prompt.tensors:
        return 0
    ids = prompt.input_ids
    stop = len(ids)
    while stop and ids[stop - 1] != family.image_token:
        stop -= 1
    return stop


def image_spans(family: ModelFamily, prompt: Prompt) -> list[ImageSpan]:
    """Return the start and a digest of each image of a prompt."""
    positions = [
        at for at, token in enumerate(prompt.input_ids) if token == family.image_token
    ]
    if not positions:
        return []
    counts = family.tokens_of_images(prompt.tensors)
    firsts = itertools.accumulate(counts[:-1], initial=0)
    return [
        ImageSpan(positions[first], _digest(family.arrays(prompt.tensors, index)))
        for index, first in enumerate(firsts)
    ]


def _digest(arrays: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(repr((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def chunk_image_features(
    family: ModelFamily,
    model: Any,
    prompt: Prompt,
    start: int,
    stop: int,
    start_copy: StartCopy,
) -> EncodedImage | None:
    """Return the features of a chunk's image tokens; ``None`` if it has none.

    An image is encoded in the chunk with its first token and dropped after the chunk
    with its last one. So a chunk costs at most its own tokens and the rest of one
    image, and one encoded image is alive at a time.
    """
    ids = prompt.input_ids
    if family.image_token is None or not prompt.tensors:
        return None
    first = _count(ids, 0, start, family.image_token)
    last = first + _count(ids, start, stop, family.image_token)
    if first == last:
        return None
    parts = []
    ends = list(itertools.accumulate(family.tokens_of_images(prompt.tensors)))
    for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin < last and first < end:
            encoded = _encoded(family, model, prompt, index, start_copy)
            parts.append(encoded.part(max(first - begin, 0), last - begin))
            if end <= last:
                del prompt.tensors[_ENCODED]
    return join_features(parts)


def _count(ids: Sequence[int], start: int, stop: int, token: int) -> int:
    return sum(each == token for each in itertools.islice(ids, start, stop))


def _encoded(
    family: ModelFamily, model: Any, prompt: Prompt, index: int, start_copy: StartCopy
) -> EncodedImage:
    at, encoded = prompt.tensors.get(_ENCODED, (None, None))
    if at == index:
        assert isinstance(encoded, EncodedImage)
        return encoded
    encoded = family.encode(model, prompt.tensors, index, start_copy)
    prompt.tensors[_ENCODED] = (index, encoded)
    return encoded


def join_features(parts: Sequence[EncodedImage]) -> EncodedImage:
    """Return the features of several parts, in order."""
    if len(parts) == 1:
        return parts[0]
    deep = zip(*(part.deep for part in parts), strict=True)
    return EncodedImage(
        torch.cat([part.features for part in parts]),
        [torch.cat(layer) for layer in deep],
    )


class LlavaFamily(ModelFamily):
    """LLaVA 1.5: every image is a square of fixed size with a fixed token count."""

    def __init__(self, config: Any) -> None:
        self.image_token = config.image_token_id
        self._side: int = config.vision_config.image_size
        self._tokens = square_tokens(config)

    def check(self, prompt: Prompt) -> None:
        """Reject other image sizes, and image tokens that do not fit the images."""
        assert self.image_token is not None
        places = list(prompt.input_ids).count(self.image_token)
        check_squares(prompt.tensors, side=self._side, each=self._tokens, places=places)

    def tokens_of_images(self, tensors: dict[str, Any]) -> list[int]:
        """Return the same count for each image."""
        return [self._tokens] * int(np.asarray(tensors["pixel_values"]).shape[0])

    def arrays(self, tensors: dict[str, Any], index: int) -> Sequence[np.ndarray]:
        """Return the image's pixels."""
        return (np.asarray(tensors["pixel_values"])[index : index + 1],)

    def encode(
        self, model: Any, tensors: dict[str, Any], index: int, start_copy: StartCopy
    ) -> EncodedImage:
        """Run one image through the vision tower and the projector."""
        (pixels,) = self.arrays(tensors, index)
        output = model.model.get_image_features(start_copy(pixels), return_dict=True)
        return EncodedImage(output.pooler_output[0])


@dataclass(frozen=True, slots=True)
class _Grid:
    """The range of one image's patches among those of a request."""

    start: int
    stop: int
    tokens: int


class QwenVLFamily(ModelFamily):
    """Qwen2-VL and its successors: flat patches with a grid, three-axis positions.

    The model's own forward stores the position deltas on the module, where the last
    request would overwrite those of all others. Here they are computed by the model's
    own function, passed in, and stored with the request.
    """

    keep: Sequence[str] = ("mrope.position_deltas",)
    axes = 3

    def __init__(self, config: Any) -> None:
        shape = VisionShape.of(config)
        assert shape is not None
        self._shape = shape
        self.image_token = shape.image_token

    def check(self, prompt: Prompt) -> None:
        """Reject patches, grids and image tokens that do not fit each other."""
        check_images(self._shape, prompt.input_ids, prompt.tensors)

    def tokens_of_images(self, tensors: dict[str, Any]) -> list[int]:
        """Return the number of merged patches of each grid."""
        return [grid.tokens for grid in self._grids(tensors)]

    def arrays(self, tensors: dict[str, Any], index: int) -> Sequence[np.ndarray]:
        """Return the image's patches and their grid."""
        grid = self._grids(tensors)[index]
        return (
            np.asarray(tensors["pixel_values"])[grid.start : grid.stop],
            np.asarray(tensors["image_grid_thw"])[index : index + 1],
        )

    def encode(
        self, model: Any, tensors: dict[str, Any], index: int, start_copy: StartCopy
    ) -> EncodedImage:
        """Run one image's patches through the vision tower."""
        pixels, grid = self.arrays(tensors, index)
        output = model.model.get_image_features(
            start_copy(pixels),
            start_copy(grid),
            return_dict=True,
        )
        deep = getattr(output, "deepstack_features", None) or ()
        # Later releases of transformers split the features by image.
        whole = [
            layer if isinstance(layer, torch.Tensor) else layer[0] for layer in deep
        ]
        return EncodedImage(output.pooler_output[0], whole)

    def prepare_positions(self, model: Any, prompt: Prompt) -> None:
        """Store the prompt's positions, which the strip drops, and their delta."""
        grids = prompt.tensors.get("image_grid_thw")
        if grids is None:
            prompt.tensors["mrope"] = {"position_deltas": 0}
            return
        ids = torch.tensor([prompt.input_ids])
        positions, deltas = model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_token).int(),
            image_grid_thw=torch.tensor(np.asarray(grids)),
        )
        prompt.tensors["mrope"] = {
            "positions": positions[:, 0],
            "position_deltas": int(deltas.item()),
        }

    def positions(self, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        """Return the computed positions, or plain ones after the last image."""
        positions: torch.Tensor | None = prompt.tensors["mrope"].get("positions")
        if positions is not None:
            return positions[:, start:stop]
        plain = torch.arange(start, stop) + self.delta(prompt)
        return plain.expand(self.axes, -1)

    def delta(self, prompt: Prompt) -> int:
        """Return the position offset: images take fewer positions than tokens."""
        delta: int = prompt.tensors["mrope"]["position_deltas"]
        return delta

    def _grids(self, tensors: dict[str, Any]) -> list[_Grid]:
        grids, row = [], 0
        for grid in np.asarray(tensors["image_grid_thw"]).tolist():
            patches = math.prod(grid)
            grids.append(_Grid(row, row + patches, patches // self._shape.merge**2))
            row += patches
        return grids


_FAMILIES: dict[str, Callable[[Any], ModelFamily]] = {
    "llava": LlavaFamily,
    "qwen2_vl": QwenVLFamily,
    "qwen2_5_vl": QwenVLFamily,
    "qwen3_vl": QwenVLFamily,
}
# Decoder-only models of an embedding, a stack of layers and a head, with no change of
# the logits beside those of `logits_transform`.
_TEXT: tuple[str, ...] = ("cohere", "cohere2", "gemma", "gemma3_text", "glm", "glm4")
_TEXT += ("granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi")
_TEXT += ("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm")
_TEXT += ("starcoder2",)
# Types of rotary positions whose frequencies depend on the length of the batch.
_DYNAMIC_ROPE = ("dynamic", "longrope")


def family_of(config: Any) -> ModelFamily:
    """Return the family of a model.

    Raises:
        ValueError: The model, its text model or its attention is not supported.
    """
    known = {**_FAMILIES, **dict.fromkeys(_TEXT, ModelFamily)}
    make = known.get(config.model_type)
    if make is None:
        raise ValueError(
            f"the model is a {config.model_type}; known are {', '.join(sorted(known))}"
        )
    text = config.get_text_config()
    if make is LlavaFamily and text.model_type not in _TEXT:
        raise ValueError(
            f"the text model is a {text.model_type}; known are {', '.join(_TEXT)}"
        )
    check_attention(text)
    return make(config)


def logits_transform(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that a model applies to the logits of its head.

    Some text models scale their logits, which changes sampled tokens but no greedy
    ones. The same models do not scale them as part of a vision-language model.
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
    """Return whether a model of a supported family takes images."""
    return config.model_type in _FAMILIES


def freeze_rope_frequencies(text: Any) -> None:
    """Keep a language model from adapting its frequencies, as `max_positions` needs.

    The check synchronises with the device in each forward pass, which no CUDA graph
    can capture.
    """
    for module in text.modules():
        if getattr(module, "rope_type", None) in _DYNAMIC_ROPE:
            module.rope_type = "default"


def layer_types(text: Any) -> list[str]:
    """Return the attention type of each layer, in transformers' terms.

    Models whose layers are all of one type have no ``layer_types`` in their config.
    """
    listed = getattr(text, "layer_types", None)
    if listed:
        return list(listed)
    windowed = getattr(text, "sliding_window", None) is not None
    return [SLIDING if windowed else FULL] * text.num_hidden_layers


def check_attention(text: Any) -> None:
    """Reject a language model with an unsupported kind of attention.

    Raises:
        ValueError: Layers of another type, an invalid window, or attention that is not
            causal.
    """
    kinds = set(layer_types(text))
    if unknown := kinds - {FULL, SLIDING}:
        raise ValueError(
            f"the model has layers of {', '.join(sorted(unknown))}; known are "
            f"{FULL}, {SLIDING}"
        )
    window = getattr(text, "sliding_window", None)
    if SLIDING in kinds and (window is None or window < _MIN_WINDOW):
        raise ValueError(
            f"the model has a sliding_window of {window}; the minimum is {_MIN_WINDOW}"
        )
    causal = getattr(text, "is_causal", None) is not False
    if not causal or getattr(text, "use_bidirectional_attention", None):
        raise ValueError(
            "the model has bidirectional attention; supported are causal models, whose "
            "tokens attend to earlier positions only"
        )
