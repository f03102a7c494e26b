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
from dataclasses import fields
from importlib import import_module
from typing import Any, Final

from lifecycle_asgi.admission import Admission, handed_off
from lifecycle_asgi.admission_settings import AdmissionSettings
from lifecycle_asgi.media_profiles import server_of

_SERVER: Final = "sglang.srt.entrypoints.http_server"
# Every process of SGLang has this module, so hooks here import nothing. Servers and
# `Engine` call the second method of it, and schedulers do not.
_ARGUMENTS: Final = "sglang.srt.server_args"
_METHODS: Final = ("resolve_once", "check_server_args")
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager"
_VARIABLE: Final = "LIFECYCLE_BYTES"
_APP: Final = "SGLANG_HTTP_SERVER_APP_PATH"
_DONE: Final = "lifecycle_hands_off"
# Flags of servers that are not the one above.
_OTHERS: Final = ("encoder_only", "smg_grpc_mode", "grpc_mode")
_logger = logging.getLogger("lifecycle")


def register() -> None:
    """Register the hooks; they do nothing where no server is launched.

    Raises:
        SystemExit: This SGLang lacks what is hooked. It would log another exception,
            and serve without a limit.
    """
    if not os.environ.get(_VARIABLE):
        return
    try:
        hooks = import_module("sglang.srt.plugins.hook_registry")
        known = import_module(_ARGUMENTS).ServerArgs
        for name, hook in zip(_METHODS, (refuse, start), strict=True):
            getattr(known, name)
            target = f"{_ARGUMENTS}.ServerArgs.{name}"
            hooks.HookRegistry.register(target, hook, hooks.HookType.BEFORE)
    except (AttributeError, ImportError) as error:
        raise SystemExit(_refusal(f"unknown to this SGLang ({error})")) from error


def refuse(arguments: Any) -> None:
    """Refuse to launch a server that answers without `Admission`.

    Args:
        arguments: SGLang's ``ServerArgs``.

    Raises:
        RuntimeError: It is one of those.
    """
    rust = getattr(import_module("sglang.srt.environ").envs, "SGLANG_RUST_SERVER", None)
    if rust is not None and rust.get():
        raise RuntimeError(_refusal("SGLANG_RUST_SERVER=1 serves without Python"))
    for name in _OTHERS:
        if getattr(arguments, name, False):
            raise RuntimeError(_refusal(f"{name}=True has a server of its own"))


def start(arguments: Any) -> None:
    """Install `Admission` in the server that is about to be launched, and say so.

    Args:
        arguments: SGLang's ``ServerArgs``.

    Raises:
        RuntimeError: SGLang would serve without it.
        ValueError: A variable ``LIFECYCLE_*`` cannot be read.
    """
    refuse(arguments)
    if _SERVER not in sys.modules:
        idle = "%s=%s: no HTTP server in this process, nothing to limit"
        _logger.warning(idle, _VARIABLE, os.environ[_VARIABLE])
        return
    if (port := getattr(arguments, "grpc_port", None)) is not None:
        ignored = "grpc_port=%s: requests by gRPC are not limited; close it to clients"
        _logger.warning(ignored, port)
    if not hand_off():
        late = "this SGLang has no %s.TokenizerManager._send_one_request: requests are "
        late += "released with their answers; use a version that has it, as 0.5.23"
        _logger.warning(late, _MANAGER)
    workers = getattr(arguments, "tokenizer_worker_num", 1)
    if workers == 1:
        _logger.info(_describe(install()))
        return
    ours = f"{__name__}:app"
    if (path := os.environ.setdefault(_APP, ours)) != ours:
        foreign = "%s=%s: nothing limits this application unless it does; or unset %s"
        _logger.warning(foreign, _APP, path, _APP)
    share = f"in each of {workers} tokenizers; for that in all, divide {_VARIABLE} by"
    settings = AdmissionSettings.from_environment(os.environ)
    _logger.warning("%s, %s %d", _describe(settings), share, workers)


def install() -> AdmissionSettings:
    """Put `Admission` around SGLang's application, which has not been started yet.

    Idempotent. SGLang's own check of ``--api-key`` is added later, so it comes first.

    Returns:
        The settings of the environment, which count unless there is one already.
    """
    settings = AdmissionSettings.from_environment(os.environ)
    app = import_module(_SERVER).app
    if not any(each.cls is Admission for each in app.user_middleware):
        options = {each.name: getattr(settings, each.name) for each in fields(settings)}
        app.add_middleware(Admission, environment={}, **options)
    return settings


def hand_off() -> bool:
    """Report each request that SGLang has sent to its scheduler; whether it can be.

    Idempotent.
    """
    manager = import_module(_MANAGER).TokenizerManager
    send = getattr(manager, "_send_one_request", None)
    if send is None or hasattr(send, _DONE):
        return send is not None

    @functools.wraps(send)
    async def sending(self: Any, tokenized: Any, *args: Any, **options: Any) -> Any:
        last = _is_last(self, tokenized)
        size = _feature_bytes(tokenized)  # before they move to shared memory
        sent = await send(self, tokenized, *args, **options)
        if last:
            handed_off(tensor_bytes=size)
        return sent

    setattr(sending, _DONE, True)
    manager._send_one_request = sending  # noqa: SLF001 - all requests pass it
    return True


def __getattr__(name: str) -> Any:
    """Return SGLang's application with `Admission`, as ``app``.

    With several tokenizer workers, each imports its application by the name in
    ``SGLANG_HTTP_SERVER_APP_PATH``, and loads no plug-ins.
    """
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    install()
    hand_off()
    return import_module(_SERVER).app


def _refusal(reason: str) -> str:
    size = os.environ.get(_VARIABLE)
    remedy = f"unset {_VARIABLE}, and put `lifecycle proxy` in front of HTTP"
    return f"{_VARIABLE}={size} limits nothing: {reason}; {remedy}"


def _describe(settings: AdmissionSettings) -> str:
    size, profile = f"{settings.bytes / 2**30:.3g} GiB", settings.profile
    named = server_of(profile) if isinstance(profile, str) else "of yours"
    until = "at the scheduler" if hand_off() else "with the answer"
    shadow = ", refusing nothing (shadow)" if settings.shadow else ""
    return f"Admission: {size}, profile {named}, released {until}{shadow}"


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
