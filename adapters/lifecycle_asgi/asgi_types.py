"""The ASGI callables, as types."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from lifecycle import Gate
from lifecycle.shared import SharedGate

AnyGate: TypeAlias = Gate | SharedGate
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
# Each framework has its own types for these three arguments, so any type is accepted.
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[Any]]
