"""The owner of a lease or a session: the request that the current task works for.

Gates and registries keep no list of what requests hold, so that a lost lease stays
collectable. A tool that shows requests sets a function in the context of each of them,
and is called with every lease and session that is made there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, TypeAlias

Claim: TypeAlias = Callable[[object], object]

owner: Final[ContextVar[Claim | None]] = ContextVar("lifecycle_owner", default=None)
"""Called with each `Lease` and `Session` made in this context. It must not raise.

A lease is not granted yet then, and may never be. Keep weak references: a lease that a
program loses is released by the garbage collector.
"""
