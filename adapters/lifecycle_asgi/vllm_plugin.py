"""Hand-off in vLLM: `Admission` learns when the engine has a request.

vLLM calls `register` by the entry point ``vllm.general_plugins`` in each of its
processes. Requests that are not streamed would otherwise hold their bytes until their
end, although the API server is done with their media once the engine has them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from importlib import import_module
from typing import Any

from lifecycle_asgi.admission import handed_off

_ENGINE = "vllm.v1.engine.async_llm"
_DONE = "lifecycle_hands_off"


def register() -> None:
    """Have vLLM's engine client report when its engine has got a request.

    Idempotent. Without `Admission` a request is not affected, and neither is a version
    of vLLM that has no such client. A budget that limits nothing is logged: vLLM's
    front end in Rust takes no middleware.
    """
    budget = os.environ.get("LIFECYCLE_BYTES")
    if budget and os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        logging.getLogger("vllm.lifecycle").warning(
            "LIFECYCLE_BYTES=%.40s limits nothing: VLLM_USE_RUST_FRONTEND takes no "
            "middleware; put `lifecycle proxy` in front, or leave the variable out",
            budget,
        )
    try:
        client = import_module(_ENGINE).AsyncLLM
        send = client._add_request  # noqa: SLF001 - what `add_request` sends with
    except Exception:  # noqa: BLE001 - vLLM would not start without its plug-ins
        return
    if not hasattr(send, _DONE):
        client._add_request = _handing_off(send)  # noqa: SLF001


def _handing_off(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(send)
    async def hand_off(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        sent = await send(self, request, *args, **kwargs)
        handed_off(tensor_bytes=tensor_bytes(request) or None)
        return sent

    setattr(hand_off, _DONE, True)
    return hand_off


def tensor_bytes(request: Any) -> int:
    """Return the bytes of the tensors in a request of vLLM's engine.

    0 if it has none, or keeps them elsewhere; nothing is raised, as the request is
    more important than its size. Media that vLLM has cached are not in it.
    """
    features = getattr(request, "mm_features", None) or ()
    try:
        return sum(_nbytes(getattr(each, "data", None)) for each in features)
    except Exception:  # noqa: BLE001 - of classes of another project
        return 0


def _nbytes(value: Any, depth: int = 6) -> int:
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if depth == 0 or value is None or isinstance(value, str | bytes):
        return 0
    if hasattr(value, "get_data"):
        return _nbytes(value.get_data(), depth - 1)
    if hasattr(value, "values"):
        value = value.values()
    if hasattr(value, "data") and not isinstance(value, Iterable):
        return _nbytes(value.data, depth - 1)
    if isinstance(value, Iterable):
        return sum(_nbytes(each, depth - 1) for each in value)
    return 0
