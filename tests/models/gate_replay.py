"""Makes the real gate go through the changes of a trace of gate.pml.

Requests are coroutines that are advanced by hand: the trace decides when the task of
one that was granted, refused or cancelled runs again, as an event loop may.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine
from typing import Any

from model_checker import Step

from lifecycle import Gate, Lease, Refused

# No deadline falls due by itself.
_LONG = 1e9


class Request:
    """A request, and the task that it would have."""

    def __init__(self, gate: Gate, cost: int) -> None:
        self._steps: Coroutine[Any, Any, Lease] = gate.admit(
            bytes=cost, slots=0, max_wait=_LONG
        )
        self._waits_for: asyncio.Future[None] | None = None
        self._cancelled = False
        self.lease: Lease | None = None
        self._advance()

    def resume(self) -> None:
        """Let the task run."""
        if self._cancelled:
            try:
                self._steps.throw(asyncio.CancelledError())
            except asyncio.CancelledError:
                return
            raise AssertionError("a cancelled request did not end")
        self._advance()
        assert self._steps.cr_frame is None, "a request that was decided waits on"

    def cancel(self) -> None:
        """Cancel the task, as `asyncio.Task.cancel` does; it runs later."""
        self._cancelled = True
        if self._waits_for is not None:
            self._waits_for.cancel()

    def expire(self) -> None:
        """Do what the timer of its deadline does."""
        assert self._waits_for is not None
        self._waits_for.set_result(None)

    def _advance(self) -> None:
        try:
            self._waits_for = self._steps.send(None)
        except StopIteration as done:
            self.lease = done.value
        except Refused:
            pass


class GateReplay:
    """A gate like that of the model, and its requests."""

    def __init__(self) -> None:
        self.gate = Gate(bytes=2, max_waiting=2)
        self.requests: dict[int, Request] = {}

    def play(self, step: Step) -> None:
        """Make one change."""
        request = self.requests.get(step.who)
        match step.what:
            case "Arrive":
                self.requests[step.who] = Request(self.gate, step.amount)
            case "Resize":
                self.gate.resize(bytes=step.amount)
            case "Close":
                self.gate.close()
            case "Resume":
                request.resume()
            case "Cancel":
                request.cancel()
            case "Expire":
                request.expire()
            case "Settle":
                request.lease.settle(bytes=step.amount)
            case "Release":
                request.lease.release()
                request.lease.release()
            case "Crash":
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    request.lease = None
                assert [each.category for each in told] == [ResourceWarning]
            case _:
                raise AssertionError(step)

    def seen(self) -> tuple[int, ...]:
        """Return what the model shows of itself."""
        now = self.gate.statistics()
        return (
            now.bytes_in_use,
            now.waiting,
            now.admitted,
            now.released,
            now.refused,
            now.cancelled,
            now.lost,
        )


async def replay(steps: list[Step]) -> None:
    """Go through a trace, and compare after each change."""
    real = GateReplay()
    for number, step in enumerate(steps):
        real.play(step)
        assert real.seen() == step.seen, (number, steps[: number + 1])
