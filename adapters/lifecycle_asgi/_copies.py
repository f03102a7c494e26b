"""The copies of a body that a framework's request object keeps until it is over.

Attributes of other projects, most of them private: each is held to its framework by a
test that measures the memory of a server.
"""

# ruff: noqa: SLF001 - that is what this is about
from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def _of_starlette(request: Any) -> None:
    for name in ("_body", "_json"):
        vars(request).pop(name, None)


def _of_litestar(request: Any) -> None:
    from litestar.types import Empty

    request._body = request._json = request._msgpack = Empty
    # Shared by all request objects of one scope.
    state = request._connection_state
    state.body = state.json = state.msgpack = Empty


def _of_quart(request: Any) -> None:
    request.body.clear()
    request._cached_json = dict.fromkeys(request._cached_json, ...)


def _of_django(request: Any) -> None:
    vars(request).pop("_body", None)
    request._stream.close()


def _of_blacksheep(request: Any) -> None:
    request.content.dispose()


def _of_aiohttp(request: Any) -> None:
    request._read_bytes = None


_DROP: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {
        "starlette": _of_starlette,
        "litestar": _of_litestar,
        "quart": _of_quart,
        "django": _of_django,
        "blacksheep": _of_blacksheep,
        "aiohttp": _of_aiohttp,
    }
)


def drop_copies(request: object) -> None:
    """Have *request* forget the body that it has read.

    Args:
        request: The request object of a framework.

    Raises:
        TypeError: It is of no framework that is known here.
    """
    # Its own word and not its type: Quart's is a proxy.
    for base in request.__class__.__mro__:
        drop = _DROP.get(base.__module__.partition(".")[0])
        if drop is not None:
            drop(request)
            return
    raise TypeError(
        f"release_body knows the requests of {', '.join(_DROP)}, not "
        f"{type(request).__qualname__}; read the body where nothing keeps it"
    )
