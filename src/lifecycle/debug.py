"""What gates and registries hold right now, and which places keep an object alive.

For a debug endpoint, a test or a console. Both answers come from the garbage
collector, so a request pays nothing for it, and a call pays for a walk over the heap.
"""

# ruff: noqa: SLF001 - internals are read, never changed
from __future__ import annotations

import gc
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import anyio

from ._gate import Gate
from ._lease import Lease
from ._payload import Payload
from ._queues import HELD, WAITING
from ._session import Session
from ._sessions import SessionRegistry

__all__ = (
    "Held",
    "Holder",
    "Snapshot",
    "lease_state",
    "payloads",
    "snapshot",
    "who_holds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A live lease, a session that is not quiet yet, or a payload in its box.

    Attributes:
        what: ``lease``, ``session`` or ``payload``.
        name: Name of the gate, or ``id#generation`` of the session.
        phase: ``held``; or of the session: ``open``, ``starting``, ``started`` or
            the outcome that it was closed with.
        age_s: Seconds since the session was opened, or the lease was granted; as
            only ``order="fair"`` knows that, else since a snapshot first showed
            the lease. ``None`` if not known.
        slots: Slots of a lease.
        bytes: Bytes that a lease is charged with, or of a payload.
    """

    what: str
    name: str
    phase: str
    age_s: float | None
    slots: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        words = [f"{self.name}: {self.what}", self.phase]
        words += [f"{self.slots} slots"] if self.slots else []
        words += [f"{self.bytes} bytes"] if self.bytes else []
        words += [] if self.age_s is None else [f"{self.age_s:.1f} s old"]
        return ", ".join(words)


class Snapshot(tuple[Held, ...]):
    """What was held at one moment, as a tuple; ``str`` of it is a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing is held"


def snapshot(*parts: Gate | SessionRegistry) -> Snapshot:
    """List the live leases of gates, and the sessions and payloads of registries.

    Call it in the thread of the event loop; then the list and the ``statistics()``
    of the parts belong to the same moment, but for what other threads release.
    Leases are found by a walk over the heap for each gate: some 0.1 s for a million
    objects, and none that were there at ``gc.freeze``.
    """
    lists = (_leases(p) if isinstance(p, Gate) else _sessions(p) for p in parts)
    return Snapshot(held for each in lists for held in each)


def _leases(gate: Gate) -> Iterator[Held]:
    # No gate needs to keep a list, and a lost lease stays collectable.
    for lease in gc.get_referrers(gate):
        if type(lease) is Lease and lease.held:
            yield Held(
                what="lease",
                name=gate.name,
                phase="held",
                age_s=_age(lease),
                slots=lease.slots,
                bytes=lease.bytes,
            )


def _age(lease: Lease) -> float | None:
    with suppress(RuntimeError):  # no event loop runs in this thread
        age_s = lease.gate._held_seconds(lease)
        if age_s is not None:
            return age_s
        now = anyio.current_time()
        if hasattr(lease, "seen_at"):
            return now - lease.seen_at
        lease.seen_at = now
    return None


def _sessions(registry: SessionRegistry) -> Iterator[Held]:
    state, now = registry._state, None
    with suppress(RuntimeError):
        now = state.clock()
    sessions = [*registry.live(), *state.closing]
    for session in sorted(sessions, key=lambda session: session.generation):
        shown = Held(
            what="session",
            name=session.key,
            phase=session.outcome or session.phase,
            age_s=None if now is None else now - session.opened_at,
        )
        yield shown
        for payload in payloads(session):
            yield replace(shown, what="payload", bytes=payload.nbytes)


def lease_state(lease: Lease) -> Literal["waiting", "held", "done"]:
    """Whether *lease* waits in the queue, is held, or neither any more."""
    if lease.state == HELD:
        return "held"
    return "waiting" if lease.state == WAITING else "done"


def payloads(session: Session) -> list[Payload[Any]]:
    """Return the boxes of *session* that are not empty. Any thread."""
    return list(session._boxes.values())


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
    """One place that keeps an object alive. It consists of text and holds no reference.

    Attributes:
        where: Suspended frame as ``qualname:line``; or ``module m``, ``class C``,
            ``context``, ``task``, ``event loop``, ``unknown``.
        name: Local, global, attribute or context variable; or what else it is of the
            place, such as ``value stack`` or ``handled exception``.
        task: Name of the task that the place belongs to, or ``None``.
        path: Types of the objects on the path, from the object outwards.
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

    Paths lead through closures, containers, exceptions, futures and contexts. Not
    seen is what runs (the task that asks, with its callers, and other threads) and
    what hides from the collector (views of numpy; what was there at ``gc.freeze``).

    Call it in the thread of the event loop. It goes over the whole heap once a hop,
    some tenths of a second for a million objects, and leaves nothing behind.

    Args:
        obj: The object. The caller's own variables do not count.
        hops: Longest path, in references, from *obj* to a place with a name.

    Returns:
        The holders, nearest first, each name of a place once, by its shortest path.
        Where no path leads to a name, the furthest objects, as ``unknown``. Empty if
        only what runs right now can hold *obj*.
    """
    search = _Search(obj, hops)
    found: dict[object, Holder] = {}
    for path in search.search(_ReferencePath([obj])):
        holder = search.holder(path)
        found.setdefault((id(path[0]), holder.name), holder)
    return list(dict.fromkeys(found.values()))


class _ReferencePath(tuple[Any, ...]):
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
        self._aside = _ReferencePath(
            tasks if gc.is_tracked(obj) else tasks + _atomic(objects)
        )

    def search(self, start: _ReferencePath) -> Iterator[_ReferencePath]:
        """Yield the paths to places; the longest ones if they lead to none."""
        layer, seen, found = [start], {id(start[0]): start}, False
        for _ in range(self._hops):
            fresh: list[_ReferencePath] = []
            for path in self._above(layer):
                if _is_place(path[0]):
                    found = True
                    yield path
                # The paths keep their objects, so no id is given to another.
                elif seen.setdefault(id(path[0]), path) is path:
                    fresh.append(path)
            if not fresh:
                break
            layer = fresh[:_WIDEST]
        if not found and layer[0] is not start:
            yield from layer

    def _above(self, layer: list[_ReferencePath]) -> list[_ReferencePath]:
        below = {id(path[0]): path for path in layer}
        objects = tuple(path[0] for path in layer)
        referrers = gc.get_referrers(*objects)
        return [
            _ReferencePath([referrer, *below[child]])
            for referrer in [*referrers, *self._aside]
            if referrer is not objects and _counts(referrer)
            for child in below.keys() & map(id, gc.get_referents(referrer))
        ]

    def holder(self, path: _ReferencePath) -> Holder:
        where, name = _place(path)
        if where == "unknown":
            far = f"more than {self._hops} hops away"
            name = far if len(path) > self._hops else "what runs, C or a cycle"
            return Holder(where=where, name=name, task=None, path=_path(path))
        task = self._task(path[0])
        return Holder(where=where, name=name, task=task, path=_path(path[1:]))

    def _task(self, obj: object) -> str | None:
        """Find the task of *obj*, also if that waits for nothing, at a ``yield``."""
        if id(obj) not in self._owners and type(obj) in _OF_TASKS:
            self._owners[id(obj)] = None  # where a circle ends
            tasks = (self._task(path[0]) for path in self.search(_ReferencePath([obj])))
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
    # reveals only to the collector what it drives.
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
    return not issubclass(type(referrer), (_ReferencePath, types.ModuleType))


def _frame(suspended: object) -> types.FrameType | None:
    """Return the frame, unless it has ended or runs: then it has a caller."""
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


def _place(path: _ReferencePath) -> tuple[str, str]:
    """Return where *path* leads to, and the name that its object has there."""
    obj, below, kind = path[0], path[1:], type(path[0])
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


def _names(namespace: Mapping[Any, object], path: tuple[object, ...]) -> str:
    """Return the names of the first on *path* that has any."""
    found = ([str(n) for n, v in namespace.items() if v is each] for each in path)
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
    if type(shown) is dict:  # pragma: no cover - a view from CPython 3.13 on
        for name in shown.keys() - before.keys():
            del shown[name]
        shown.update(before)
    return now


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    names = [
        f"frame of {obj.f_code.co_qualname}"
        if type(obj) is types.FrameType
        else type(obj).__name__
        for obj in path[-2::-1]
    ]
    # How CPython stores the variables of a context is an implementation detail.
    return tuple(name for name in names if not name.startswith("hamt"))
