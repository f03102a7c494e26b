"""A lease: what one admitted request holds of a gate, until hand-off."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Protocol, Self, final

from ._park import current_task
from ._ticket import DONE, HELD, Cost, Ticket

if TYPE_CHECKING:
    from types import TracebackType

    from ._errors import Refused
    from ._park import Waiter


class _Books(Protocol):
    """What a lease needs of its gate."""

    name: str

    def give_back(self, lease: Lease) -> None: ...
    def lose(self, lease: Lease) -> None: ...
    def settle(self, lease: Lease, actual: int) -> None: ...
    def enter(self, task: object, lease: Lease) -> None: ...
    def leave(self, task: object, lease: Lease) -> None: ...


@final
class Lease(Ticket):
    """What one admitted request holds, from `Gate.admit` until hand-off.

    Use it as a context manager, or call `release` yourself. A lease may be
    released from any task and any thread, and may be passed on to another task.
    A lease that is lost to the garbage collector is released there, with a
    `ResourceWarning` (which says where it was granted under ``tracemalloc``).
    """

    __slots__ = ("__weakref__", "_books", "_holder", "_passed_on", "refusal", "waiter")

    # Set when the lease goes into line.
    waiter: Waiter
    refusal: Refused | None

    def __init__(
        self, books: _Books, cost: Cost, key: str | None, priority: int
    ) -> None:
        # Only what every admission needs: the rest is set where it is needed.
        self.cost = cost
        self.state = DONE
        self.key = key
        self.priority = priority
        self._books = books

    @property
    def held(self) -> bool:
        """Whether the lease still holds what it was granted."""
        return self.state == HELD

    @property
    def slots(self) -> int:
        """Slots that the lease was granted."""
        return self.cost[0]

    @property
    def bytes(self) -> int:
        """Bytes that the lease is charged with: the estimate until `settle`."""
        return self.cost[1]

    def release(self) -> None:
        """Give everything back and let the next waiters in.

        Synchronous, idempotent, callable from any thread, from a finaliser and
        from a signal handler. Call it at hand-off: what happens afterwards is
        no longer this gate's concern.
        """
        if self.state == HELD:
            self._books.give_back(self)

    def _pass_on(self) -> None:
        """Called by a start: it is the one to release the lease, once it settled."""
        self._passed_on = True

    def _leave(self) -> None:
        """Called by a block that is left: release, unless a start goes on with it."""
        if not getattr(self, "_passed_on", False):
            self.release()

    def settle(self, *, bytes: int) -> None:  # noqa: A002 - the unit is the name
        """Replace the estimate by the *bytes* that were really needed.

        Down wakes whoever fits now. Up never waits and never fails: it may take
        the gate over its capacity, and then no bytes are granted until that is
        repaid. A lease that is not held any more ignores the call.

        Args:
            bytes: Actual size in bytes, 0 or more.

        Raises:
            ValueError: *bytes* is negative or not a whole number.
        """
        self._books.settle(self, bytes)

    def granted(self) -> bool:
        """Called by the gate; see `Ticket.granted`."""
        return self.waiter.wake()

    def __enter__(self) -> Self:
        task = current_task() if self.state == HELD else None
        if task is not None:
            self._books.enter(task, self)
        self._holder = task or getattr(self, "_holder", None)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        holder = getattr(self, "_holder", None)  # an ExitStack may leave only
        if holder is not None:
            self._books.leave(holder, self)
            self._holder = None
        self._leave()

    def __del__(self) -> None:
        if self.state == HELD and not sys.is_finalizing():
            self._books.lose(self)
            warnings.warn(
                f"a lease of {self.slots} slots and {self.bytes} bytes of gate "
                f"{self._books.name!r} was never released; use it in a with "
                f"block, or call release()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        how = "held" if self.held else "not held"
        return f"<Lease {self.slots} slots, {self.bytes} bytes, {how}>"
