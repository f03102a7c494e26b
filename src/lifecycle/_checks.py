"""What users give and do, checked before anything comes of it."""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any


def whole(name: str, amount: object) -> int:
    """Return *amount* if it is a whole number of 0 or more.

    Raises:
        ValueError: It is not. Fractions and NaN are refused because books that
            add them up do not return to zero.
    """
    try:
        number = operator.index(amount)  # type: ignore[arg-type]
    except TypeError:
        what = type(amount).__name__
        raise ValueError(f"{name} must be a whole number, not {what}") from None
    if number < 0:
        raise ValueError(f"{name} must be 0 or more, not {number}")
    return number


def limit(name: str, amount: object) -> float:
    """Return *amount* as a limit: a whole number, or infinity for ``None``."""
    return math.inf if amount is None else whole(name, amount)


def cost(slots: object, nbytes: object) -> tuple[int, int]:
    """Return what a request costs; nothing is more often forgotten than wished."""
    whole_cost = whole("slots", slots), whole("bytes", nbytes)
    if whole_cost == (0, 0):
        raise ValueError("a request must cost at least one slot or one byte")
    return whole_cost


class Unique:
    """Base of what has an account with somebody, who would take two of it for one."""

    __slots__ = ()

    def __reduce__(self) -> str | tuple[Any, ...]:
        what = type(self).__name__
        raise TypeError(f"a {what} cannot be pickled or copied; pass it on as it is")

    def _warn(self, of_loss: str) -> None:
        warnings.warn(of_loss, ResourceWarning, stacklevel=3, source=self)


def expect(met: bool, what: str, given: object) -> None:  # noqa: FBT001
    """Raise unless *met*: *what* is wanted, and of which type is what is *given*."""
    if not met:
        raise TypeError(f"{what}, not {type(given).__name__}")


def seconds(name: str, wait: float, or_none: str = "") -> float:
    """Return *wait* as what can be added to a clock, if it is a number."""
    what = f"{name} must be a number of seconds{or_none}, not"
    try:
        if not math.isnan(wait):
            return wait if isinstance(wait, int) else float(wait)
    except TypeError:
        raise TypeError(f"{what} {type(wait).__name__}") from None
    raise ValueError(f"{what} NaN")


def seconds_or_none(name: str, wait: float | None) -> float | None:
    """Return *wait* if it is a number of seconds or ``None``."""
    return None if wait is None else seconds(name, wait, " or None")
