"""Calls that type checkers reject: each line that is marked, and no other."""

from accepted import (
    Model,
    admitted,
    blocking,
    both,
    leased,
    limited,
    managed_blocking,
    tracked,
)

from lifecycle import Gate, in_thread, managed, scrub

gate = Gate(slots=1)
admitted("x", 3, 4, zz=1)  # rejected
leased("x", 3, 4, zz=1)  # rejected
tracked("x", 3, 4, zz=1)  # rejected
both("x", 3, 4, zz=1)  # rejected
blocking("x", 3, 4, zz=1)  # rejected
limited("x", 3, 4, zz=1)  # rejected
managed_blocking("x", 3, 4, zz=1)  # rejected
Model().ask("x", 3, 4, zz=1)  # rejected
admitted("x", "y")  # rejected
tracked()  # rejected
leased(3)  # rejected


@managed(gate=gate)  # rejected
def number() -> int:
    return 3


@scrub("picture")  # rejected
async def coroutine(picture: object) -> int:
    return 3


in_thread(3)  # rejected
managed()  # rejected
managed(sessions=None, key=len)  # rejected
managed(cost=len)  # rejected
