"""One request in the books of a gate."""

from __future__ import annotations

import math
import operator
from typing import Final

# What a request costs: slots and bytes.
Cost = tuple[int, int]

WAITING: Final = 0
HELD: Final = 1
DONE: Final = 2


class Ticket:
    """One request in the books: its cost and how far it got.

    The ticket is its own node in the line, so nothing is ever looked up by a
    key that two requests might share.

    Attributes:
        cost: Slots and bytes.
        state: ``WAITING``, ``HELD`` or ``DONE``.
        key: On whose behalf, for a fair order.
        priority: A higher one goes first.
        queued: Whether it is in line, or was granted there and does not run
            again yet. Set by `Ledger.enqueue`.
    """

    __slots__ = ("cost", "key", "priority", "queued", "state")

    queued: bool

    def __init__(self, cost: Cost, key: str | None = None, priority: int = 0) -> None:
        self.cost = cost
        self.state = DONE
        self.key = key
        self.priority = priority

    def granted(self) -> bool:
        """Wake the waiter in the step that grants.

        Returns:
            ``False`` if the waiter is on its way out already and must be
            passed over.
        """
        return True


def whole(name: str, amount: object) -> int:
    """Return *amount* if it is a whole number of 0 or more.

    Raises:
        ValueError: It is not. Fractions and NaN are refused because books that
            add them up do not return to zero.
    """
    if type(amount) is not int:
        try:
            amount = operator.index(amount)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                f"{name} must be a whole number, not {type(amount).__name__}"
            ) from None
    if amount < 0:
        raise ValueError(f"{name} must be 0 or more, not {amount}")
    return amount


def limit(name: str, amount: object) -> float:
    """Return *amount* as a limit: a whole number, or infinity for ``None``.

    Raises:
        ValueError: As from `whole`.
    """
    return math.inf if amount is None else whole(name, amount)


def cost_of(slots: object, nbytes: object) -> Cost:
    """Return what a request costs.

    Raises:
        ValueError: As from `whole`, or the request costs nothing at all, which
            is more often a forgotten argument than a wish.
    """
    if type(slots) is int and type(nbytes) is int and slots > 0 <= nbytes:
        return slots, nbytes  # nearly always
    cost = whole("slots", slots), whole("bytes", nbytes)
    if cost == (0, 0):
        raise ValueError("a request must cost at least one slot or one byte")
    return cost
