"""What a session that is left is counted as."""

from __future__ import annotations

from typing import Final, get_args

import anyio

from ._errors import EngineLost, Refused, SessionEnded, StartTimeout, StreamTimeout
from .events import Outcome

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


def expect_outcome(outcome: object) -> None:
    """Raise unless there is such an *outcome*."""
    if outcome not in OUTCOMES:
        known = ", ".join(OUTCOMES)
        raise ValueError(f"no session can end as {outcome!r}; use one of {known}")


def outcome_of(exc: BaseException | None, cancelled_as: Outcome) -> Outcome:
    """What a session that is left by *exc* is counted as.

    Always an outcome that exists: whoever leaves a block cannot be told otherwise.
    """
    outcome: str = "failed"
    match exc:
        case None | StopAsyncIteration():
            return "completed"
        case Refused():
            return "refused"
        case EngineLost():
            return "engine_lost"
        case StartTimeout() | StreamTimeout():
            return "deadline"
        case SessionEnded():
            outcome = exc.outcome
        case BaseExceptionGroup():
            each = {outcome_of(inner, cancelled_as) for inner in exc.exceptions}
            outcome = each.pop() if len(each) == 1 else "failed"
        case Exception():
            return "failed"
        case GeneratorExit():
            outcome = cancelled_as
        case _ if isinstance(exc, anyio.get_cancelled_exc_class()):
            outcome = cancelled_as
    return outcome if outcome in OUTCOMES else "failed"
