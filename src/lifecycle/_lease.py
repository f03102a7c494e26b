"""A lease: what one admitted request holds of a gate, until hand-off."""

# ruff: noqa: SLF001 - a lease and its gate are one thing in two modules

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, final

from ._checks import Unique, whole
from ._ledger import HELD
from ._monitor import writes
from ._park import current_task
from .events import LeaseReleased

if TYPE_CHECKING:
    from ._books import Books
    from ._park import Waiter


@final
@dataclass(slots=True, weakref_slot=True, init=False, eq=False, repr=False)
class Lease(Unique):
    """What one admitted request holds, from `Gate.admit` until hand-off.

    Use it as a context manager, or call `release` yourself. A lease may be
    released from any task and any thread, and may be passed on to another task.
    A lease that is lost to the garbage collector is released there, with a
    `ResourceWarning` (which says where it was granted under ``tracemalloc``).

    Attributes:
        slots: Slots that the lease was granted.
        bytes: Bytes that it is charged with: the estimate until `settle`.
    """

    # Set by the gate. A lease is made by nobody else, and has no `__init__`.
    slots: int
    bytes: int
    _gate: Books
    _key: str | None
    _priority: int
    _state: int
    _waiter: Waiter  # None where it never stood in line
    # Set where they are needed; each costs 2 % of an admission.
    _account: tuple[float, float, float]
    _passed: float
    _holder: object
    _passed_on: bool  # to a start, which releases it once it has settled
    _seen_at: float

    @property
    def held(self) -> bool:
        """Whether the lease still holds what it was granted."""
        return self._state == HELD

    @writes
    def release(self) -> None:
        """Give everything back and let the next waiters in.

        Synchronous, idempotent, callable from any thread, from a finaliser and
        from a signal handler. Call it at hand-off: what happens afterwards is
        no longer this gate's concern.
        """
        if self._state == HELD:
            gate = self._gate
            try:
                del gate._pen[0]
            except IndexError:  # whoever has it takes the lease back
                gate._change(gate._take_back, self)
                return
            try:
                if gate._ledger.release(self) and gate._emit is not None:
                    gate._tell(LeaseReleased, self, lost=False)
            finally:
                gate._pen.append(None)
                if gate._mail or gate._outbox:
                    gate._drain()

    def settle(self, *, bytes: int) -> None:  # noqa: A002 - the unit is the name
        """Replace the estimate by the *bytes* that were really needed.

        Down wakes whoever fits now. Up never waits and never fails: it may take
        the gate over its capacity, and then no bytes are granted until that is
        repaid. A lease that is not held any more ignores the call. Any thread.

        Args:
            bytes: Actual size in bytes, 0 or more.

        Raises:
            ValueError: *bytes* is negative or not a whole number.
        """
        gate = self._gate
        gate._change(gate._settle, self, whole("bytes", bytes))

    def __enter__(self) -> Self:
        task = current_task() if self._state == HELD else None
        if task is not None:
            if hasattr(self, "_holder"):  # the task of another block passed it on
                self._gate._leave_block(self._holder, self)
            self._gate._enter_block(task, self)
            self._holder = task
        return self

    def __exit__(self, *_: object) -> None:
        holder = getattr(self, "_holder", None)
        if holder is not None:
            self._gate._leave_block(holder, self)
            self._holder = None
        if not getattr(self, "_passed_on", False):
            self.release()

    def __del__(self) -> None:
        if self._state == HELD and not sys.is_finalizing():
            gate = self._gate
            gate._change(gate._take_back, self, True)
            what = f"a lease of {self.slots} slots and {self.bytes} bytes of gate "
            what += f"{gate.name!r} was never released"
            self._warn(f"{what}; use it in a with block, or call release()")

    def __repr__(self) -> str:
        how = "held" if self.held else "not held"
        what = f"{self.slots} slots, {self.bytes} bytes"
        return f"<Lease of gate {self._gate.name!r}: {what}, {how}>"
