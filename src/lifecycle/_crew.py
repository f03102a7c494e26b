"""The tasks in which starts live.

anyio gives each task of a group a handle, an event and a scope, which cost several
times what the task does. A start brings the one scope that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from anyio.abc import TaskGroup

from ._park import innermost_nursery, task_factory

Run = Callable[..., Coroutine[Any, Any, None]]


class Crew:
    """Tasks that nobody cancels, beside a group that ends after them.

    Each runs in a copy of the context that it was spawned in, and no earlier than
    whoever spawned it waits. On trio they are the group's own.

    Args:
        group: What is cancelled where one of them fails. Entered by this task.

    Attributes:
        errors: What some have raised, for whoever waits for the group.
    """

    def __init__(self, group: TaskGroup) -> None:
        self.errors: list[BaseException] = []
        self._group = group
        self._running: set[object] = set()
        self._then: Callable[[], object] | None = None
        create = task_factory()
        if create is None:
            spawn = partial(self._in_nursery, innermost_nursery())
        else:
            spawn = partial(self._in_loop, create)
        self.spawn: Callable[..., None] = spawn

    def end(self, then: Callable[[], object]) -> None:
        """Call *then* once nobody is left, now or later."""
        self._then = then
        self._left(None)

    def _in_loop(self, create: Callable[..., Any], run: Run, *args: object) -> None:
        task = create(run(*args), name=run.__qualname__)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: Any) -> None:
        # One that is cancelled was so before its first step: the rest catch it.
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.errors.append(error)
        if error is not None or task.cancelled():
            self._group.cancel_scope.cancel()
        self._left(task)

    def _in_nursery(self, nursery: Any, run: Run, *args: object) -> None:
        self._running.add(run)
        nursery.start_soon(self._whole, run, *args, name=run.__qualname__)

    async def _whole(self, run: Run, *args: object) -> None:
        try:
            await run(*args)
        finally:
            self._left(run)

    def _left(self, whoever: object) -> None:
        self._running.discard(whoever)
        if self._then is not None and not self._running:
            self._then()
