"""Call something between any two bytecodes of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any

Arm = Callable[[Callable[[], object]], None]
"""What `reenter_everywhere` gives a scenario: from here on the hook may strike."""


def reenter_everywhere(
    scenario: Callable[[Arm], object],
    modules: Iterable[ModuleType],
    *,
    most: int = 20_000,
) -> int:
    """Run *scenario* again and again, interrupted at another bytecode each time.

    Finalisers and signal handlers may call into the very object that is half-way
    through a change. Here a hook does so at the first boundary within *modules*,
    then at the second, until there are no more. Coverage sees nothing of it.

    Args:
        scenario: Builds fresh state, calls ``arm(hook)``, goes on, and checks what
            must hold, in an event loop of its own.
        modules: Whose functions are interrupted.
        most: Boundaries after which to give up.

    Returns:
        How many boundaries were tried.

    Raises:
        AssertionError: A run failed; the message names the place.
    """
    files = {module.__file__ for module in modules}
    # First without a strike: CPython 3.12 tells of bytecodes only after it was asked.
    for at in range(most + 1):
        if not _Strike(files, at).run(scenario) and at:
            return at - 1
    raise AssertionError(f"more than {most} boundaries; raise most= or do less")


class _Strike:  # pragma: no cover - it takes the tracer's place
    """Counts bytecode boundaries and calls the hook at one of them."""

    def __init__(self, files: set[str | None], at: int) -> None:
        self._files = files
        self._at = self._left = at
        self._hook: Callable[[], object] | None = None
        self._place = ""

    def run(self, scenario: Callable[[Arm], object]) -> bool:
        before = sys.gettrace()
        try:
            scenario(self.arm)
        except BaseException as error:
            what = f"re-entered at boundary {self._at}, {self._place}: {error!r}"
            raise AssertionError(what) from error  # noqa: ASYNC104
        finally:
            sys.settrace(before)
        return bool(self._place)

    def arm(self, hook: Callable[[], object]) -> None:
        self._hook = hook
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename not in self._files or self._hook is None:
            return None
        # In this order: CPython 3.13 asks whether the frame is traced at all.
        frame.f_trace, frame.f_trace_opcodes = self._step, True
        return self._step

    def _step(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode" and self._hook is not None:
            self._left -= 1
            if not self._left:
                self._place = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
                hook, self._hook = self._hook, None
                sys.settrace(None)
                hook()
        return self._step
