"""SGLang: `Admission` in its HTTP server, and hand-off to its scheduler.

SGLang calls `register` by the entry point ``sglang.srt.plugins`` in each of its
processes, and applies the hooks that it registers. Nothing is installed unless the
environment has ``LIFECYCLE_BYTES``: having this package is not a reason to limit a
server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, Final

from lifecycle_asgi.admission import Admission, handed_off

_SERVER: Final = "sglang.srt.entrypoints.http_server"
_RUN: Final = f"{_SERVER}._setup_and_run_http_server"
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_VARIABLE: Final = "LIFECYCLE_BYTES"


def register() -> None:
    """Register the hooks in the process of SGLang's HTTP server, and in no other."""
    if not os.environ.get(_VARIABLE) or not _may_serve():
        return
    hooks = import_module("sglang.srt.plugins.hook_registry")
    before, around = hooks.HookType.BEFORE, hooks.HookType.AROUND
    hooks.HookRegistry.register(_RUN, install, before)
    hooks.HookRegistry.register(f"{_MANAGER}._send_one_request", _hand_off, around)


def install(*_args: Any, **_options: Any) -> None:
    """Put `Admission` around SGLang's application, which has not been started yet.

    Idempotent. SGLang's own check of ``--api-key`` is added later, so it comes first.
    """
    app = import_module(_SERVER).app
    if not any(each.cls is Admission for each in app.user_middleware):
        app.add_middleware(Admission)


def __getattr__(name: str) -> Any:
    """Return SGLang's application with `Admission`, as ``app``.

    With several tokenizer workers, each imports its application by the name in
    ``SGLANG_HTTP_SERVER_APP_PATH``, and loads no plug-ins.
    """
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    install()
    return import_module(_SERVER).app


def _may_serve() -> bool:
    # Applying a hook imports its module. Schedulers and detokenizers, which Python
    # starts with this name for the main module, should not import the server for it.
    return "__mp_main__" not in sys.modules or _SERVER in sys.modules


async def _hand_off(
    original: Callable[..., Awaitable[Any]],
    manager: Any,
    tokenized: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Report a request that SGLang has sent to its scheduler."""
    last = _is_last(manager, tokenized)
    size = _feature_bytes(tokenized)  # before they move to shared memory
    sent = await original(manager, tokenized, *args, **options)
    if last:
        handed_off(tensor_bytes=size)
    return sent


def _is_last(manager: Any, tokenized: Any) -> bool:
    """Whether nothing of the HTTP request is left to prepare.

    The parts of a batch are sent one after the other. They end with the response.
    """
    state = getattr(manager, "rid_to_state", {}).get(getattr(tokenized, "rid", None))
    return bool(getattr(getattr(state, "obj", None), "is_single", False))


def _feature_bytes(tokenized: Any) -> int | None:
    """Return the bytes of the tensors of a request's media; ``None`` if not known.

    A feature that SGLang keeps elsewhere, as in its cache, says nothing about others.
    """
    inputs = getattr(tokenized, "mm_inputs", None)
    features = [each.feature for each in getattr(inputs, "mm_items", None) or ()]
    sizes = [getattr(each, "nbytes", 0) for each in features]
    return sum(sizes) if sizes and all(sizes) else None
