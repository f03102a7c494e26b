"""``transformers serve`` with `Admission`, which ends the work of clients that left.

``python -m lifecycle_asgi.transformers_plugin serve MODEL`` is the command itself, with
all of its options. By itself the command stops streams that have begun, but generates
to the end what is not streamed, and every transcription.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from lifecycle_asgi.admission import Admission
from lifecycle_asgi.asgi_types import App
from lifecycle_asgi.request import CURRENT

_BATCHES: Final = "transformers.generation.continuous_batching.continuous_api"
_DONE: Final = "lifecycle_ends"
_REMEDY: Final = (
    "install transformers[serving] 5.24, or run `transformers serve` behind "
    "`lifecycle proxy`"
)
_log: Final = logging.getLogger("lifecycle").log


def register() -> None:
    """Have ``Serve`` make its application with `Admission`, and end leavers' work.

    Before ``Serve`` is called. Idempotent.

    Raises:
        SystemExit: This version of transformers works in another way, so that the hooks
            would have no effect.
    """
    try:
        serve = import_module("transformers.cli.serve").Serve
        server = import_module("transformers.cli.serving.server")
        utils = import_module("transformers.cli.serving.utils")
        batches = import_module(_BATCHES).ContinuousBatchingManager
        alone, batched = utils.GenerateManager, utils.CBGenerateManager
        for function, name in (
            (serve.__init__, "build_server"),
            (alone.generate_non_streaming, "async_submit"),
            (alone.generate_streaming, "DirectStreamer"),
            (batched.generate_non_streaming, "add_request"),
            (batched.generate_streaming, "add_request"),
            (utils.DirectStreamer.cancel, "set"),
            (batches.cancel_request, "put"),
        ):
            if name not in inspect.unwrap(function).__code__.co_names:
                raise AttributeError(f"{function.__qualname__} has no {name}")
        for owner, name, hook in (
            (server, "build_server", _around),
            (alone, "async_submit", _submitting),
            (utils.DirectStreamer, "__init__", _streaming),
            (batches, "add_request", _adding),
        ):
            original = getattr(owner, name)
            if not hasattr(original, _DONE):
                hooked = functools.wraps(original)(hook(original))
                setattr(hooked, _DONE, True)
                setattr(owner, name, hooked)
    except (AttributeError, ImportError) as error:
        unknown = f"unknown to this `transformers serve`: {error}; {_REMEDY}"
        raise SystemExit(unknown) from error


def _around(build: Callable[..., App]) -> Callable[..., Admission]:
    def build_server(*args: Any, **options: Any) -> Admission:
        return Admission(build(*args, **options))

    return build_server


def _submitting(submit: Callable[..., Any]) -> Callable[..., Any]:
    def async_submit(self: Any, work: Any, *args: Any, **options: Any) -> Any:
        if (request := CURRENT.get()) is None:
            return submit(self, work, *args, **options)
        left = threading.Event()
        request.when_gone(left.set)
        if "stopping_criteria" in inspect.signature(work).parameters:
            given = options.get("stopping_criteria") or ()
            options["stopping_criteria"] = [*given, functools.partial(_stop, left)]
        elif getattr(work, "__name__", "") == "generate":
            _warn_endless(getattr(work, "__qualname__", "generate"))

        def unless_left(*args: Any, **options: Any) -> Any:
            return None if left.is_set() else work(*args, **options)

        # Its thread sets a future that must not be cancelled.
        return asyncio.shield(submit(self, unless_left, *args, **options))

    return async_submit


@functools.cache
def _warn_endless(name: str) -> None:
    endless = "%s has no stopping_criteria: it does not end when a client leaves"
    _log(logging.WARNING, endless, name)


def _stop(left: threading.Event, ids: Any, *_: Any, **__: Any) -> Any:
    return ids.new_full(ids.shape[:1], left.is_set()).bool()


def _streaming(init: Callable[..., None]) -> Callable[..., None]:
    def begin(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if (request := CURRENT.get()) is not None:
            request.when_gone(self.cancel)

    return begin


def _adding(add: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, *args: Any, **options: Any) -> Any:
        added = add(self, *args, **options)
        if added is not None and (request := CURRENT.get()) is not None:
            request.when_gone(functools.partial(self.cancel_request, added))
        return added

    return add_request


if __name__ == "__main__":
    register()
    import_module("transformers.cli.transformers").main()
