"""Building blocks for adapters: engine clients, transports and middleware.

Semi-public, as ``anyio.lowlevel`` is: stable for adapters, not needed by
applications.

- Waiting and waking: `Waiter`, `new_waiter`, `LoopWaiter`, `ThreadsafeEvent`,
  `call_soon`, `threadsafe_call`, `event_loop_clock`.
- Errors without their text or payload: `describe_error`, `clear_traceback_frames`.
- Argument checks: `check_type`, `check_bool`, `check_callable`, `check_int`,
  `check_seconds`, `check_choice`.
- Backpressure: `DrainRate`; fairness: `Company`.
- Which request made a lease or a session: `owner`; which task runs: `current_task`,
  in which event loop: `current_loop`; whom `consumer_gone` asks: `running_consumer`.
"""

from __future__ import annotations

from ._error_payload import clear_traceback_frames, describe_error
from ._eventloop import (
    LoopWaiter,
    ThreadsafeEvent,
    Waiter,
    call_soon,
    current_loop,
    current_task,
    event_loop_clock,
    new_waiter,
    threadsafe_call,
)
from ._owner import owner
from ._queues import Company, DrainRate
from ._thread_iterator import running_consumer
from ._validation import (
    check_bool,
    check_callable,
    check_choice,
    check_int,
    check_seconds,
    check_type,
)

__all__ = (
    "Company",
    "DrainRate",
    "LoopWaiter",
    "ThreadsafeEvent",
    "Waiter",
    "call_soon",
    "check_bool",
    "check_callable",
    "check_choice",
    "check_int",
    "check_seconds",
    "check_type",
    "clear_traceback_frames",
    "current_loop",
    "current_task",
    "describe_error",
    "event_loop_clock",
    "new_waiter",
    "owner",
    "running_consumer",
    "threadsafe_call",
)
