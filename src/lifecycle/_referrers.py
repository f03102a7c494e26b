"""The search up the references, through all that the collector knows.

What the search meets is kept in `Node` objects and in frames that run, into which
the collector does not look. So the search never meets itself.
"""

from __future__ import annotations

import gc
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    GeneratorType,
    ModuleType,
)
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What can be suspended, and how its attributes begin.
SUSPENDED: Final[dict[type, str]] = {
    AsyncGeneratorType: "ag_",
    CoroutineType: "cr_",
    GeneratorType: "gi_",
}
# Each object of a layer is compared with each reference in the heap.
_WIDEST: Final = 256
# So many objects at a time are asked for their referents.
_CHUNK: Final = 10_000


class Node:
    """An object on the way, and the one nearer to the start that it refers to."""

    __slots__ = ("below", "obj")

    def __init__(self, obj: object, below: Node | None = None) -> None:
        self.obj = obj
        self.below = below

    def way(self) -> Iterator[Node]:
        """Yield this node and those below it, down to the start."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.below

    def path(self) -> tuple[str, ...]:
        """Return the types on the way from the start, without it, to this node."""
        return tuple(
            f"frame of {obj.f_code.co_qualname}"
            if isinstance(obj, FrameType)
            else type(obj).__name__
            for obj in [node.obj for node in self.way()][-2::-1]
        )


def climb(
    obj: object, hops: int, is_end: Callable[[object], bool], tasks: list[Node]
) -> tuple[list[Node], list[tuple[str, Node]]]:
    """Go from *obj* to what holds it, and so on, layer by layer.

    Args:
        obj: Where to start.
        hops: How many layers.
        is_end: Whether an object is to be stopped at.
        tasks: All tasks, which are looked into one by one: on CPython 3.11 the
            collector does not tell that asyncio's refer to results and callbacks.

    Returns:
        The nodes where *is_end* stopped it; and the last nodes of other ways,
        each after the reason why the way ends there.
    """
    start = Node(obj)
    ends: list[Node] = []
    loose: list[tuple[str, Node]] = []
    # The nodes keep their objects, so no id is given to another meanwhile.
    seen = {id(obj): start}
    layer = [start]
    for _ in range(hops):
        above = _above(layer, tasks)
        held = {id(node.below) for node in above} | {id(start)}
        loose += [("a frame that runs, or C", n) for n in layer if id(n) not in held]
        fresh: list[Node] = []
        for node in above:
            if is_end(node.obj):
                ends.append(node)
            elif seen.setdefault(id(node.obj), node) is node:
                fresh.append(node)
        if above and not fresh and not loose:
            loose.append(("a cycle that waits for the collector", above[0]))
        loose += [("more than can be followed", node) for node in fresh[_WIDEST:]]
        layer = fresh[:_WIDEST]
        if not layer:
            break
    loose += [(f"more than {hops} hops away", node) for node in layer]
    return ends, loose


def _above(layer: list[Node], tasks: list[Node]) -> list[Node]:
    """Return each referrer to objects of *layer*, once for each such object."""
    below = {id(node.obj): node for node in layer}
    objects = tuple(node.obj for node in layer)
    referrers = gc.get_referrers(*objects)
    referrers += [task.obj for task in tasks]
    if not all(map(gc.is_tracked, objects)):
        referrers += _untracked_above(below)
    return [
        Node(referrer, below[child])
        for referrer in filter(_counts, referrers)
        if referrer is not objects
        for child in dict.fromkeys(map(id, gc.get_referents(referrer)))
        if child in below
    ]


def _counts(referrer: object) -> bool:
    kind = type(referrer)
    if kind in SUSPENDED:
        return frame_of(referrer) is not None
    return kind is not Node and not issubclass(kind, ModuleType)


def _untracked_above(below: dict[int, Node]) -> list[object]:
    """Return the dicts and tuples of mere atoms that hold some of *below*.

    The collector does not track them. They are all there is between, say, bytes
    and a frame with a local dict of bytes.
    """
    found: list[object] = []
    seen: set[int] = set()
    pending: list[object] = gc.get_objects()
    while pending:
        # No modules: asyncio's shows its free list to the collector before
        # CPython 3.12.6, and dead objects must not be referred to (gh-122695).
        chunk = (o for o in pending[-_CHUNK:] if not issubclass(type(o), ModuleType))
        inside = gc.get_referents(*chunk)
        del pending[-_CHUNK:]
        for inner in inside:
            if (
                (type(inner) is dict or type(inner) is tuple)
                and not gc.is_tracked(inner)
                and id(inner) not in seen
            ):
                seen.add(id(inner))
                pending.append(inner)
                if any(id(atom) in below for atom in gc.get_referents(inner)):
                    found.append(inner)
    return found


def frame_of(obj: object) -> FrameType | None:
    """Return the frame, unless it has ended or runs: then somebody called it."""
    frame: FrameType | None = getattr(obj, SUSPENDED[type(obj)] + "frame")
    return frame if frame is not None and frame.f_back is None else None
