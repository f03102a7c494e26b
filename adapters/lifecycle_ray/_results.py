"""What a call to an actor returned, without asking which event loop this is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lifecycle_zmq.transport.bell import Bell


def watched(reference: Any, tell: Callable[[], None]) -> Future[Any]:
    """Return the future of an object; `tell` is called from any thread once it is done.

    Args:
        reference: A `ray.ObjectRef`, which the future keeps until it is done.
        tell: Must not raise.
    """
    future: Future[Any] = reference.future()
    future.add_done_callback(lambda _: tell())
    return future


async def result(reference: Any) -> Any:
    """Return an object once it is there.

    Raises:
        ray.exceptions.RayError: The call failed, or its actor is gone.

    Cancellation: the call goes on; its result is dropped.
    """
    bell = Bell()
    future = watched(reference, bell.ring)
    while not future.done():
        await bell.wait()
    return future.result()
