"""Who keeps an object alive: up the references, to places that have names.

The collector knows each reference between what it tracks, suspended frames
included. It does not look into frames that run, nor the search into a `_Way`: so
the search never meets itself.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final

# What can be suspended: where its frame is, and what it waits for.
_SUSPENDED: Final[dict[type, tuple[str, str]]] = {
    types.AsyncGeneratorType: ("ag_frame", "ag_await"),
    types.CoroutineType: ("cr_frame", "cr_await"),
    types.GeneratorType: ("gi_frame", "gi_yieldfrom"),
}
_OF_TASKS: Final = {*_SUSPENDED, Context}
# Each object of a layer is compared with each reference in the heap.
_WIDEST: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One place that keeps an object alive. It is made of words and holds nothing.

    Attributes:
        where: Suspended frame as ``qualname:line``; or ``module m``, ``class C``,
            ``context``, ``task``, ``event loop``, ``unknown``.
        name: Local, global, attribute or context variable; or what else it is of the
            place, such as ``value stack`` or ``handled exception``.
        task: Name of the task that the place belongs to, or ``None``.
        path: Types of the objects on the way, from the object outwards.
    """

    where: str
    name: str
    task: str | None
    path: tuple[str, ...]

    def __str__(self) -> str:
        task = f" [task {self.task}]" if self.task else ""
        path = f" through {' in '.join(self.path)}" if self.path else ""
        return f"{self.where}: {self.name}{task}{path}"


def who_holds(obj: object, *, hops: int = 6) -> list[Holder]:
    """Name the suspended frames, tasks, modules and so on that keep *obj* alive.

    Ways lead through closures, containers, exceptions, futures and contexts. Not
    seen is what runs (the task that asks, with its callers, and other threads) and
    what hides from the collector (views of numpy; what was there at ``gc.freeze``).

    Call it in the thread of the event loop. It goes over the whole heap once a hop,
    some tenths of a second for a million objects, and leaves nothing behind.

    Args:
        obj: The object. The caller's own variables do not count.
        hops: Longest way, in references, from *obj* to a place with a name.

    Returns:
        The holders, nearest first. Where no way leads to a name, the furthest
        objects, as ``unknown``. Empty if only what runs right now can hold *obj*.
    """
    search = _Search(obj, hops)
    return list(dict.fromkeys(map(search.holder, search.climb(_Way([obj])))))


class _Way(tuple[Any, ...]):
    """References from a holder, which comes first, down to the object."""

    __slots__ = ()


class _Search:
    def __init__(self, obj: object, hops: int) -> None:
        self._hops = hops
        objects = gc.get_objects()
        named = {kind for kind in set(map(type, objects)) if kind.__name__ == "Task"}
        kinds = set(filter(_of_loop, named))
        tasks = [each for each in objects if type(each) in kinds]
        self._owners = _owners(tasks)
        # Of these the collector does not tell (up to CPython 3.11, of tasks).
        self._aside = _Way(tasks if gc.is_tracked(obj) else tasks + _atomic(objects))

    def climb(self, start: _Way) -> Iterator[_Way]:
        """Yield the ways to places; the longest ones if they lead to none."""
        layer, seen, found = [start], {id(start[0]): start}, False
        for _ in range(self._hops):
            fresh: list[_Way] = []
            for way in self._above(layer):
                if _is_place(way[0]):
                    found = True
                    yield way
                # The ways keep their objects, so no id is given to another.
                elif seen.setdefault(id(way[0]), way) is way:
                    fresh.append(way)
            if not fresh:
                break
            layer = fresh[:_WIDEST]
        if not found and layer[0] is not start:
            yield from layer

    def _above(self, layer: list[_Way]) -> list[_Way]:
        below = {id(way[0]): way for way in layer}
        objects = tuple(way[0] for way in layer)
        referrers = gc.get_referrers(*objects)
        return [
            _Way([referrer, *below[child]])
            for referrer in [*referrers, *self._aside]
            if referrer is not objects and _counts(referrer)
            for child in below.keys() & map(id, gc.get_referents(referrer))
        ]

    def holder(self, way: _Way) -> Holder:
        where, name = _place(way)
        if where == "unknown":
            far = f"more than {self._hops} hops away"
            name = far if len(way) > self._hops else "what runs, C or a cycle"
            return Holder(where=where, name=name, task=None, path=_path(way))
        task = self._task(way[0])
        return Holder(where=where, name=name, task=task, path=_path(way[1:]))

    def _task(self, obj: object) -> str | None:
        """Find the task of *obj*, also if that waits for nothing, at a ``yield``."""
        if id(obj) not in self._owners and type(obj) in _OF_TASKS:
            self._owners[id(obj)] = None  # where a circle ends
            tasks = (self._task(way[0]) for way in self.climb(_Way([obj])))
            self._owners[id(obj)] = next(filter(None, tasks), None)
        return self._owners.get(id(obj))


def _owners(tasks: list[Any]) -> dict[int, str | None]:
    """Name the tasks, by the ids of all that they are surely suspended in."""
    names: dict[int, str | None] = {}
    for task in tasks:
        inner, of_asyncio = task, hasattr(task, "get_name")
        while inner is not None and id(inner) not in names:
            names[id(inner)] = task.get_name() if of_asyncio else task.name
            inner = _awaited(inner)
    return names


def _awaited(obj: object) -> Any:
    if type(obj) in _SUSPENDED:
        return getattr(obj, _SUSPENDED[type(obj)][1])
    # A task; or, say, the awaitable of an asynchronous generator's `asend`, which
    # tells nobody but the collector whom it drives.
    return next((o for o in gc.get_referents(obj) if type(o) in _SUSPENDED), None)


def _atomic(objects: list[object]) -> list[object]:
    """Find the dicts and tuples of mere atoms, which the collector does not track.

    They are all there is between, say, bytes and a frame with a dict of bytes.
    """
    found: dict[int, object] = {}
    # No modules: asyncio's shows its free list to the collector before CPython
    # 3.12.6, and dead objects must not be referred to (gh-122695).
    layer = [obj for obj in objects if not issubclass(type(obj), types.ModuleType)]
    while layer:
        kinds = {dict, tuple}
        inside = (obj for obj in gc.get_referents(*layer) if type(obj) in kinds)
        new = {id(obj): obj for obj in inside if not gc.is_tracked(obj)}
        layer = [obj for key, obj in new.items() if key not in found]
        found |= new
    return list(found.values())


def _counts(referrer: object) -> bool:
    if type(referrer) in _SUSPENDED:
        return _frame(referrer) is not None
    return not issubclass(type(referrer), (_Way, types.ModuleType))


def _frame(suspended: object) -> types.FrameType | None:
    """Return the frame, unless it has ended or runs: then somebody called it."""
    frame: types.FrameType | None = getattr(suspended, _SUSPENDED[type(suspended)][0])
    return None if frame is None or frame.f_back else frame


def _is_place(obj: Any) -> bool:
    kind = type(obj)
    if kind is dict:  # or a module's, if it has these
        return "__builtins__" in obj or "__spec__" in obj
    return kind in _OF_TASKS or issubclass(kind, type) or _of_loop(kind) is not None


def _of_loop(kind: type) -> tuple[str, str] | None:
    # By name, as the core imports no event loop.
    match str(kind.__module__).partition(".")[0], kind.__name__:
        case "_asyncio" | "trio", "Task":
            return "task", "result or callback"
        case "asyncio" | "uvloop", "Handle" | "TimerHandle":
            return "event loop", "scheduled call"
    return None


def _place(way: _Way) -> tuple[str, str]:
    """Return where *way* leads to, and the name that its object has there."""
    obj, below, kind = way[0], way[1:], type(way[0])
    if kind in _SUSPENDED and (frame := _frame(obj)):
        # A cell stands for what is in it; others may have names of their own.
        held = below if type(below[0]) is types.CellType else below[:1]
        where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        is_error = issubclass(type(below[0]), BaseException)
        other = "handled exception" if is_error else "value stack"
        return where, _names(_locals(obj, frame), held) or other
    if kind is dict:
        return f"module {obj.get('__name__')}", _names(obj, below[:1])
    if kind is Context:
        return "context", _names({var.name: obj[var] for var in obj}, below)
    if issubclass(kind, type):
        where = f"class {obj.__module__}.{obj.__qualname__}"
        return where, _names(vars(obj), below) or "itself"
    return _of_loop(kind) or ("unknown", "")


def _names(namespace: Mapping[Any, object], way: tuple[object, ...]) -> str:
    """Return the names of the first on *way* that has any."""
    found = ([str(n) for n, v in namespace.items() if v is each] for each in way)
    return next((", ".join(names) for names in found if names), "")


def _locals(suspended: object, frame: types.FrameType) -> dict[str, Any]:
    """Return the locals of *frame* and leave no trace in it.

    Up to CPython 3.12 the frame keeps what it once showed, which undoes a later
    ``del`` in its code, or is the dict that its code got from ``locals()``.
    """
    inside = gc.get_referents(suspended)
    kept = {id(each): dict(each) for each in inside if type(each) is dict}
    shown = frame.f_locals
    now = {**shown, "snapshot of its locals": shown}
    before = kept.get(id(shown), {})
    for name in shown.keys() - before.keys() if type(shown) is dict else ():
        del shown[name]
    shown.update(before)
    return now


def _path(way: tuple[Any, ...]) -> tuple[str, ...]:
    names = [
        f"frame of {obj.f_code.co_qualname}"
        if type(obj) is types.FrameType
        else type(obj).__name__
        for obj in way[-2::-1]
    ]
    # How CPython keeps the variables of a context is nobody's concern.
    return tuple(name for name in names if not name.startswith("hamt"))
