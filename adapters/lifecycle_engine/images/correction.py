"""How much of what headers promise is really made, learned from what was."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .media import Weight

# A new sample below the ratio moves it by this much of the way.
_DECAY = 0.05


class Correction:
    """Corrects estimates of tensors by what became of the last ones.

    Models scale large images down, so that their tensors are smaller than their
    pixels promise. The ratio is learned for each class of sizes, a factor of four
    wide. It goes up at once, to whatever was seen, and down slowly. It never passes 1,
    which it begins with, and never falls below *floor*: what is in the making is at
    most ``1 / floor`` of what a gate was told, if all requests change at once.

    Args:
        floor: The least ratio, above 0 and at most 1.

    Raises:
        ValueError: *floor* is none.
    """

    def __init__(self, *, floor: float = 0.25) -> None:
        if not 0 < floor <= 1:
            raise ValueError(f"floor must be above 0 and at most 1, not {floor}")
        self._floor = floor
        self._ratios: dict[int, float] = {}

    def bytes(self, weight: Weight, choices: int = 1) -> int:
        """What to ask a gate for.

        Args:
            weight: The estimate.
            choices: Answers that are to be given, each with tensors of its own.
        """
        ratio = self._ratios.get(_class(weight), 1.0)
        return weight.work + choices * math.ceil(weight.tensors * ratio)

    def learn(self, weight: Weight, tensors: int) -> None:
        """Learn that an estimate became *tensors* bytes of tensors."""
        if not weight.tensors:
            return
        seen = tensors / weight.tensors
        ratio = self._ratios.get(_class(weight), 1.0)
        ratio = seen if seen > ratio else ratio + _DECAY * (seen - ratio)
        self._ratios[_class(weight)] = min(max(ratio, self._floor), 1.0)

    @property
    def ratios(self) -> Mapping[int, float]:
        """The ratios that were learned, by the bytes that their class ends below."""
        return {4**size: ratio for size, ratio in sorted(self._ratios.items())}


def _class(weight: Weight) -> int:
    return (weight.tensors.bit_length() + 1) // 2
