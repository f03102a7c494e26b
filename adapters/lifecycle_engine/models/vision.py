"""Images on the engine's side: what a family needs of them, and when.

An image is encoded when the prefill comes to its first token and forgotten when
it has passed its last one, so that a chunk costs at most its tokens and the rest
of one image, and one encoded image is alive at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from lifecycle_engine.runner import Prompt

from .held import Picture

# Where an encoded image is kept between chunks; the strip takes it.
_ENCODED = "encoded"


@dataclass(frozen=True, slots=True)
class Encoded:
    """One image as the language model takes it.

    Attributes:
        features: ``(tokens, hidden)``, in the place of the image tokens.
        deep: The same for further layers, where a family has them.
    """

    features: torch.Tensor
    deep: Sequence[torch.Tensor] = ()

    def part(self, start: int, stop: int) -> Encoded:
        """Return some of the tokens."""
        deep = [each[start:stop] for each in self.deep]
        return Encoded(self.features[start:stop], deep)


# Brings an array to the model's device, and keeps it as long as that takes.
Upload = Callable[[np.ndarray], torch.Tensor]


class Family(Protocol):
    """What differs between model families.

    Attributes:
        keep: Paths in `Prompt.tensors` that decoding needs.
        image_token: The id that stands for one token of an image; ``None`` for a
            model that takes no images.
        axes: Numbers in one rotary position; 0 if it is a plain number.
    """

    keep: Sequence[str]
    image_token: int | None
    axes: int

    def check(self, prompt: Prompt) -> None:
        """Refuse tensors that do not fit each other or the prompt: `ValueError`."""
        ...

    def tokens_of_images(self, tensors: dict[str, Any]) -> list[int]:
        """Return how many tokens each image takes, in order."""
        ...

    def arrays(self, tensors: dict[str, Any], index: int) -> Sequence[np.ndarray]:
        """Return what one image consists of."""
        ...

    def encode(
        self, model: Any, tensors: dict[str, Any], index: int, upload: Upload
    ) -> Encoded:
        """Encode one image on the model's device, brought there by `upload`."""
        ...

    def begin(self, model: Any, prompt: Prompt) -> None:
        """Work out rotary positions before the first chunk."""
        ...

    def positions(self, prompt: Prompt, start: int, stop: int) -> torch.Tensor:
        """Return a chunk's rotary positions: ``(axes, tokens)`` or ``(tokens,)``."""
        ...

    def delta(self, prompt: Prompt) -> int:
        """Return how far the rotary positions of decoding are from the length."""
        ...


def needed_until(family: Family, prompt: Prompt) -> int:
    """Return the position behind the last image token; 0 without images."""
    if family.image_token is None or not prompt.tensors:
        return 0
    ids = prompt.input_ids
    behind = len(ids)
    while behind and ids[behind - 1] != family.image_token:
        behind -= 1
    return behind


def pictures_of(family: Family, prompt: Prompt) -> list[Picture]:
    """Return where each image of a prompt begins, and a digest of it."""
    places = [
        at for at, token in enumerate(prompt.input_ids) if token == family.image_token
    ]
    if not places:
        return []
    counts = family.tokens_of_images(prompt.tensors)
    firsts = itertools.accumulate(counts[:-1], initial=0)
    return [
        Picture(places[first], _digest(family.arrays(prompt.tensors, index)))
        for index, first in enumerate(firsts)
    ]


def _digest(arrays: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(repr((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def images_of_chunk(
    family: Family, model: Any, prompt: Prompt, start: int, stop: int, upload: Upload
) -> Encoded | None:
    """Return the features of a chunk's image tokens; ``None`` if it has none.

    Encodes the images that begin in it, and forgets those that end.
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
            encoded = _encoded(family, model, prompt, index, upload)
            parts.append(encoded.part(max(first - begin, 0), last - begin))
            if end <= last:
                del prompt.tensors[_ENCODED]
    return _joined(parts)


def _count(ids: Sequence[int], start: int, stop: int, token: int) -> int:
    return sum(each == token for each in itertools.islice(ids, start, stop))


def _encoded(
    family: Family, model: Any, prompt: Prompt, index: int, upload: Upload
) -> Encoded:
    at, kept = prompt.tensors.get(_ENCODED, (None, None))
    if at == index:
        assert isinstance(kept, Encoded)
        return kept
    encoded = family.encode(model, prompt.tensors, index, upload)
    prompt.tensors[_ENCODED] = (index, encoded)
    return encoded


def _joined(parts: Sequence[Encoded]) -> Encoded:
    if len(parts) == 1:
        return parts[0]
    deep = zip(*(part.deep for part in parts), strict=True)
    return Encoded(
        torch.cat([part.features for part in parts]),
        [torch.cat(layer) for layer in deep],
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor; on the CPU it shares the memory."""
    with warnings.catch_warnings():
        # Received frames may be read-only, which torch warns about; the model
        # only reads them.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array).to(device)
