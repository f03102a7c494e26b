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

    _reset(request, Empty, "_body", "_json", "_msgpack")
    # Shared by all request objects of one scope.
    _reset(request._connection_state, Empty, "body", "json", "msgpack")


def _of_quart(request: Any) -> None:
    request.body.clear()
    request._cached_json = dict.fromkeys(request._cached_json, ...)


def _of_django(request: Any) -> None:
    vars(request).pop("_body", None)
    request._stream.close()


def _of_blacksheep(request: Any) -> None:
    request.content.dispose()


def _of_aiohttp(request: Any) -> None:
    _reset(request, None, "_read_bytes")


def _reset(holder: Any, value: object, *names: str) -> None:
    for name in names:
        getattr(holder, name)  # a version without it has the copy elsewhere
        setattr(holder, name, value)


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
        TypeError: It is of no framework that is known here, or of no such version.
    """
    # Its own word and not its type: Quart's is a proxy.
    for base in request.__class__.__mro__:
        framework = base.__module__.partition(".")[0]
        if framework in _DROP:
            _drop(framework, request)
            return
    raise TypeError(
        f"release_body knows the requests of {', '.join(_DROP)}, not "
        f"{type(request).__qualname__}; read the body where nothing keeps it"
    )


def _drop(framework: str, request: object) -> None:
    try:
        _DROP[framework](request)
    except AttributeError as error:
        raise TypeError(
            f"release_body does not know the requests of this version of {framework}: "
            f"no {error.name}; read the body where nothing keeps it"
        ) from None
