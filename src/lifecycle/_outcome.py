"""What a session that is left is counted as."""

from __future__ import annotations

from typing import Final, cast, get_args

import anyio

from ._errors import EngineLost, Refused, SessionEnded, StartTimeout, StreamTimeout
from .events import Outcome

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


def outcome_of(exc: BaseException | None, cancelled_as: Outcome) -> Outcome:
    """What a session that is left by *exc* is counted as.

    Always an outcome that exists: whoever leaves a block cannot be told otherwise.
    """
    outcome = _outcome_of(exc, cancelled_as)
    return outcome if outcome in OUTCOMES else "failed"


def _outcome_of(exc: BaseException | None, cancelled_as: Outcome) -> Outcome:
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
            return cast("Outcome", exc.outcome)
        case BaseExceptionGroup():
            outcomes = {outcome_of(each, cancelled_as) for each in exc.exceptions}
            return outcomes.pop() if len(outcomes) == 1 else "failed"
        case GeneratorExit():
            return cancelled_as
        case Exception():
            return "failed"
    cancelled = isinstance(exc, anyio.get_cancelled_exc_class())
    return cancelled_as if cancelled else "failed"
