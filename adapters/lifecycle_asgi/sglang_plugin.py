"""SGLang: `Admission` around its HTTP server, and hand-off to its scheduler.

SGLang calls `register` by the entry point ``sglang.srt.plugins`` in each of its
processes, and applies the hooks that it registers. Nothing is installed unless the
environment has ``LIFECYCLE_BYTES``: having this package is not a reason to limit a
server. With it, a server that cannot be limited does not start.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Any, Final

from lifecycle_asgi.admission import Admission, handed_off
from lifecycle_asgi.admission_settings import AdmissionSettings
from lifecycle_asgi.media_profiles import server_of
from lifecycle_asgi.request import CURRENT

_SERVER: Final = "sglang.srt.entrypoints.http_server"
# Every process of SGLang has this module, so hooks on it import nothing. Launchers of
# servers and of `Engine` call both methods, schedulers the first.
_ARGUMENTS: Final = "sglang.srt.server_args"
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager"
_VARIABLE: Final = "LIFECYCLE_BYTES"
_APP: Final = "SGLANG_HTTP_SERVER_APP_PATH"
_OURS: Final = f"{__name__}:app"
_DONE: Final = "lifecycle_hands_off"
_log: Final = logging.getLogger("lifecycle").log


def register() -> None:
    """Register the hooks; they do nothing where no server is launched.

    Raises:
        SystemExit: This SGLang lacks what is hooked. It would log any other exception,
            and serve without a limit.
    """
    if not os.environ.get(_VARIABLE):
        return
    try:
        hooks = import_module("sglang.srt.plugins.hook_registry")
        arguments = import_module(_ARGUMENTS).ServerArgs
        for name, hook in (("resolve_once", _refuse), ("check_server_args", _start)):
            getattr(arguments, name)
            target = f"{_ARGUMENTS}.ServerArgs.{name}"
            hooks.HookRegistry.register(target, hook, hooks.HookType.BEFORE)
    except (AttributeError, ImportError) as error:
        raise SystemExit(_refusal(f"unknown to this SGLang ({error})")) from error


def _refuse(arguments: Any) -> None:
    """Refuse to launch a server that answers without `Admission`."""
    rust = getattr(import_module("sglang.srt.environ").envs, "SGLANG_RUST_SERVER", None)
    if rust is not None and rust.get():
        raise RuntimeError(_refusal("SGLANG_RUST_SERVER=1 serves without Python"))
    for name in ("encoder_only", "smg_grpc_mode", "grpc_mode"):
        if getattr(arguments, name, False):
            raise RuntimeError(_refusal(f"{name}=True has a server of its own"))


def _refusal(reason: str) -> str:
    remedy = f"unset {_VARIABLE}, and put `lifecycle proxy` in front of HTTP"
    return f"{_VARIABLE}={os.environ[_VARIABLE]} limits nothing: {reason}; {remedy}"


def _start(arguments: Any) -> None:
    """Install `Admission` in the server that is about to be launched, and say so."""
    _refuse(arguments)
    size, warning = os.environ[_VARIABLE], logging.WARNING
    if _SERVER not in sys.modules:
        idle = "%s=%s: no HTTP server in this process, nothing to limit"
        _log(warning, idle, _VARIABLE, size)
        return
    if (port := getattr(arguments, "grpc_port", None)) is not None:
        ignored = "grpc_port=%s: requests by gRPC are not limited; close it to clients"
        _log(warning, ignored, port)
    workers = getattr(arguments, "tokenizer_worker_num", 1)
    settings = AdmissionSettings.from_environment(os.environ)
    if workers == 1:
        _install(settings)
    else:
        if settings.bytes == "auto":
            learned = f"is for one process, and there are {workers} tokenizer workers"
            remedy = "set a size such as 8GiB, and LIFECYCLE_SHARED"
            raise RuntimeError(f"{_VARIABLE}=auto {learned}; {remedy}")
        if settings.shared is None:
            each = "%s=%s counts in each of %d tokenizer workers; set LIFECYCLE_SHARED"
            _log(warning, each, _VARIABLE, size, workers)
        if (path := os.environ.setdefault(_APP, _OURS)) != _OURS:
            _log(warning, "%s=%s: not limited, unless it limits itself", _APP, path)
    level, released = logging.INFO, "at the scheduler"
    if not _hand_off():
        level, released = warning, "with the answer: use SGLang 0.5.23, which has "
        released += "TokenizerManager._send_one_request"
    named, gib = server_of(str(settings.profile)), settings.budget / 2**30
    _log(level, "Admission: %.3g GiB, profile %s, released %s", gib, named, released)


def _install(settings: AdmissionSettings) -> Any:
    """Return SGLang's application, with `Admission` around it, once.

    SGLang's own check of ``--api-key`` is added later, so it comes first.
    """
    app = import_module(_SERVER).app
    if not any(each.cls is Admission for each in app.user_middleware):
        app.add_middleware(Admission, environment={}, **asdict(settings))
    return app


def _hand_off() -> bool:
    """Report each request that SGLang has sent to its scheduler; whether it can be."""
    manager = import_module(_MANAGER).TokenizerManager
    send = getattr(manager, "_send_one_request", None)
    if send is None or hasattr(send, _DONE):
        return send is not None

    @functools.wraps(send)
    async def sending(self: Any, tokenized: Any, *args: Any, **options: Any) -> Any:
        rid = getattr(tokenized, "rid", None)
        state = getattr(self, "rid_to_state", {}).get(rid)
        asked = getattr(state, "obj", None)
        size = _feature_bytes(tokenized)  # before they move to shared memory
        sent = await send(self, tokenized, *args, **options)
        request = CURRENT.get()
        # SGLang itself looks every four seconds, while an answer is not streamed. One
        # that is made in the background outlives its client.
        if request is not None and not getattr(asked, "background", False):
            request.when_gone(lambda: _abort(self, rid))
        # The parts of a batch are sent one after the other, and end with the response.
        if getattr(asked, "is_single", False):
            handed_off(tensor_bytes=size)
        return sent

    setattr(sending, _DONE, True)
    manager._send_one_request = sending  # noqa: SLF001 - all requests pass it
    return True


def _abort(manager: Any, rid: str | None) -> None:
    # Several managers ask their scheduler for an unknown id, too, which also ends
    # requests whose ids begin with it.
    if rid in manager.rid_to_state:
        manager.abort_request(rid)


def __getattr__(name: str) -> Any:
    """Return SGLang's application with `Admission`, as ``app``.

    With several tokenizer workers, each imports its application by the name in
    ``SGLANG_HTTP_SERVER_APP_PATH``, and loads no plug-ins.
    """
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _hand_off()
    return _install(AdmissionSettings.from_environment(os.environ))


def _feature_bytes(tokenized: Any) -> int | None:
    """Return the bytes of the tensors of a request's media; ``None`` if not known.

    A feature that SGLang keeps elsewhere, as in its cache, says nothing about others.
    """
    inputs = getattr(tokenized, "mm_inputs", None)
    features = [each.feature for each in getattr(inputs, "mm_items", None) or ()]
    sizes = [getattr(each, "nbytes", 0) for each in features]
    return sum(sizes) if sizes and all(sizes) else None
