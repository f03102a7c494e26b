"""All checks, in their order."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator

from lifecycle_tools.check import bombs, neighbours, overload
from lifecycle_tools.check.leaving import PHASES, half_close, leave
from lifecycle_tools.check.report import Finding
from lifecycle_tools.check.target import Settings, Target

NEIGHBOURS = "neighbours"
Check = Callable[[Target], Awaitable[Finding | list[Finding]]]


def checks(settings: Settings, only: tuple[str, ...]) -> Iterator[tuple[str, Check]]:
    """Yield the checks, by name, whose names begin with one of *only*.

    Without *only*, all but those of neighbours, which take minutes.
    """
    for name, check in _all(image=settings.image):
        if name.startswith(only) if only else not name.startswith(NEIGHBOURS):
            yield name, check


def _all(*, image: bool) -> Iterator[tuple[str, Check]]:
    for phase in PHASES:
        yield phase.id, functools.partial(leave, phase=phase)
    yield "leave.half_close", half_close
    if image:
        yield "memory.pictures", overload.picture_memory
        yield "bomb.pixels", bombs.pixels
        yield "bomb.declared_pixels", bombs.declared_pixels
        yield "bomb.truncated", bombs.truncated
        yield "bomb.many_images", bombs.many_images
    yield "bomb.nested", bombs.nested
    yield "bomb.gzip", bombs.gzipped
    yield "bomb.declared_body", bombs.declared_body
    yield "bomb.chunked_body", bombs.chunked_body
    yield "overload", overload.burst
    for attack in neighbours.ATTACKS:
        if image or not attack.images:
            check = functools.partial(neighbours.beside, attack=attack)
            yield f"{NEIGHBOURS}.{attack.name}", check


async def run(
    target: Target,
    *,
    only: tuple[str, ...],
    progress: Callable[[str], None],
) -> tuple[Finding, ...]:
    """Run the checks one after the other.

    A server that a check broke makes the checks after it fail, which is a finding.

    Cancellation: all clients leave.
    """
    findings: list[Finding] = []
    for name, check in checks(target.settings, only):
        progress(name)
        try:
            found = await check(target)
        except OSError as error:
            because = "The server no longer accepts connections."
            found = Finding(name, "a connection", type(error).__name__, "fail", because)
        findings += found if isinstance(found, list) else [found]
    return tuple(findings)
