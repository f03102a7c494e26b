"""Who keeps an object alive: up the references, to places that have names.

The collector knows every reference between objects that it tracks. That includes
the locals of suspended frames, which is where payloads are forgotten.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from itertools import takewhile
from types import CellType, FrameType, FunctionType
from typing import Any, Final

from ._referrers import SUSPENDED, Node, climb, frame_of

_Test = Callable[[object], bool]
_Found = tuple[list[Node], list[tuple[str, Node]]]
_Search = Callable[[object, _Test], _Found]

_TASKS: Final = ("asyncio.Task", "trio.lowlevel.Task")
_CALLS: Final = ("asyncio.Handle", "uvloop.loop.Handle", "uvloop.loop.TimerHandle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One place that keeps an object alive. It is made of words and holds nothing.

    Attributes:
        where: A suspended frame as ``qualname:line``; else ``module m``,
            ``class C``, ``context``, ``task``, ``event loop`` or ``unknown``.
        name: The local, global, attribute or context variable; else ``value
            stack``, ``handled exception`` or what else of the place it is.
        task: Name of the task that the place belongs to, or ``None``.
        path: Types of the objects on the way, from the object outwards.
    """

    where: str
    name: str
    task: str | None
    path: tuple[str, ...]

    def __str__(self) -> str:
        task = "" if self.task is None else f" [task {self.task}]"
        path = f" through {' in '.join(self.path)}" if self.path else ""
        return f"{self.where}: {self.name}{task}{path}"


def who_holds(obj: object, *, hops: int = 6) -> list[Holder]:
    """Name the suspended frames, tasks, modules and so on that keep *obj* alive.

    It finds frames of coroutines, generators and asynchronous generators under
    asyncio and trio, and what they reach through closures, containers,
    exceptions, futures and contexts. Whatever runs is not seen: the task that
    asks, with its callers, and the functions of other threads. Nor is what hides
    from the collector: extension types such as numpy's views, and what was there
    at ``gc.freeze``.

    Call it in the thread of the event loop. It goes over the whole heap once a
    hop, at some tenths of a second for a million objects in all, and leaves
    nothing behind.

    Args:
        obj: The object. The caller's own variables do not count.
        hops: Longest way, in references, from *obj* to a place with a name.

    Returns:
        The holders, nearest first. Where no way leads to a name, holders whose
        place is ``unknown`` tell how each kind of way ends. An empty list means
        that only what runs right now can hold *obj*.
    """
    tasks, names = _tasks()

    def search(start: object, is_end: _Test) -> _Found:
        # No `functools.partial`: it would hold the start in a tuple.
        return climb(start, hops, is_end, tasks)

    ends, loose = search(obj, _is_end)
    found = [_holder(end, names, search) for end in ends] or [
        Holder(where="unknown", name=why, task=None, path=node.path())
        for why, node in loose
    ]
    return list(dict.fromkeys(found))


def _is_end(obj: object) -> bool:
    kind = type(obj)
    return (
        kind in SUSPENDED
        or kind is Context
        or (kind is dict and _is_module(obj))
        or issubclass(kind, (type, *_loaded(_TASKS), *_loaded(_CALLS)))
    )


def _is_module(namespace: Any) -> bool:
    return "__builtins__" in namespace or {"__name__", "__spec__"} <= namespace.keys()


def _loaded(names: tuple[str, ...]) -> tuple[type, ...]:
    """Return those classes whose modules are loaded: the core imports no loop."""
    parts = [name.rpartition(".") for name in names]
    return tuple(
        getattr(sys.modules[module], name)
        for module, _, name in parts
        if module in sys.modules
    )


def _tasks() -> tuple[list[Node], dict[int, str]]:
    """Return all tasks, and their names by the ids of all that is surely theirs.

    That is the task, its context, and what its coroutine is suspended in.
    """
    tasks: list[Node] = []
    names: dict[int, str] = {}
    objects = gc.get_objects()
    known = _loaded(_TASKS)
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, known)}
    for task in [obj for obj in objects if type(obj) in kinds]:
        of_asyncio = hasattr(task, "get_coro")
        name = task.get_name() if of_asyncio else str(task.name)
        tasks.append(Node(task))
        contexts = [obj for obj in gc.get_referents(task) if type(obj) is Context]
        names |= dict.fromkeys(map(id, [task, *contexts]), name)
        inner = task.get_coro() if of_asyncio else task.coro
        while inner is not None and id(inner) not in names:
            names[id(inner)] = name
            inner = _awaited(inner)
    return tasks, names


def _awaited(obj: object) -> object | None:
    prefix = SUSPENDED.get(type(obj))
    if prefix is None:
        # Such as the awaitable of an asynchronous generator's `asend`, which
        # tells nobody but the collector whom it drives.
        inside: list[object] = gc.get_referents(obj)
        for inner in inside:
            if type(inner) in SUSPENDED or hasattr(type(inner), "throw"):
                return inner
        return None
    awaited: object = getattr(
        obj, prefix + ("yieldfrom" if prefix == "gi_" else "await")
    )
    return awaited


def _task_around(
    suspended: object, names: dict[int, str], search: _Search
) -> str | None:
    """Find the task of what waits for no event, but at a ``yield``."""
    found: list[str] = []

    def is_end(obj: object) -> bool:
        if id(obj) in names:
            found.append(names[id(obj)])
        # Once there is a name, nothing leads further.
        return bool(found) or (type(obj) not in SUSPENDED and _is_end(obj))

    search(suspended, is_end)
    return found[0] if found else None


def _holder(end: Node, names: dict[int, str], search: _Search) -> Holder:
    obj: Any = end.obj
    below = end.below
    assert below is not None
    task, path = names.get(id(obj)), below.path()
    where, name = "task", "result or callback"
    if type(obj) in SUSPENDED:
        where, name = _place(obj, below.obj)
        task = task or _task_around(obj, names, search)
    elif type(obj) is dict:
        where, name = f"module {obj.get('__name__')}", _names(obj, [below.obj])
    elif type(obj) is Context:
        variables = {var.name: value for var, value in obj.items()}
        where, name = "context", _names(variables, [node.obj for node in below.way()])
        # How CPython keeps the variables is nobody's concern.
        path = tuple(each for each in path if not each.startswith("hamt"))
    elif issubclass(type(obj), type):
        where = f"class {obj.__module__}.{obj.__qualname__}"
        # Its attributes are in a dict, which is the last node on the way.
        name = _names(below.obj, [node.obj for node in below.way()]) or "itself"
    elif issubclass(type(obj), _loaded(_CALLS)):
        where, name = "event loop", "scheduled call"
    return Holder(where=where, name=name, task=task, path=path)


def _place(suspended: object, held: object) -> tuple[str, str]:
    """Say where *suspended* is, and what there is *held*."""
    code = getattr(suspended, SUSPENDED[type(suspended)] + "code")
    frame = frame_of(suspended)
    if frame is None:  # another thread was faster
        return code.co_qualname, "resumed meanwhile"
    if held is _snapshot(suspended):
        name = "snapshot of its locals"
    else:
        inside = gc.get_referents(held) if type(held) is CellType else []
        name = _names(_locals(suspended, frame), [held, *inside])
    is_error = issubclass(type(held), BaseException)
    name = name or ("handled exception" if is_error else "value stack")
    return f"{code.co_qualname}:{frame.f_lineno}", name


def _locals(suspended: object, frame: FrameType) -> dict[str, Any]:
    """Return the locals of *frame* and leave no trace in it.

    Up to CPython 3.12 the frame keeps what it once showed as ``f_locals``, which
    undoes a later ``del`` in its own code. And that may be the very dict that the
    code got from ``locals()``. So it is put back as it was.
    """
    before = dict(_snapshot(suspended) or {})
    now = dict(frame.f_locals)
    kept = _snapshot(suspended) or {}
    for name in kept.keys() - before.keys():
        del kept[name]
    kept.update(before)
    return now


def _snapshot(suspended: object) -> dict[str, Any] | None:
    """Return what the frame of *suspended* keeps of its locals, if it does."""
    # It is visited before the function is, and the locals themselves after that.
    ahead = takewhile(
        lambda each: type(each) is not FunctionType, gc.get_referents(suspended)
    )
    return next((each for each in ahead if type(each) is dict), None)


def _names(namespace: object, held: list[object]) -> str:
    """Return the names of what is *held*, if *namespace* is a dict."""
    ids = set(map(id, held))
    pairs = list(namespace.items()) if type(namespace) is dict else []
    return ", ".join(str(name) for name, value in pairs if id(value) in ids)
