"""The bundled engine: a vision-language model server in two processes.

The engine process (`worker`) runs a `Scheduler` over a `Runner`; the API process
turns chats into engine requests with a `Processor`. Names are imported when they are
first used, so that neither process pays for the other one's dependencies.
"""

# A map of the package; each line imports from those above it.
#
#   _compat, events, errors       optional dependencies, events, API errors
#   multimodal/                   limits on media, their size, their decoding
#   processing/                   chats to engine requests, tokens to text
#   core/, model/, sim, worker    the engine process
#   api/                          OpenAI's, Anthropic's and the plain API
#   server/                       the HTTP server
#   config, factory, doctor, cli  settings, what is made of them, the command line

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lifecycle_asgi.refusals import ApiError as ApiError
    from lifecycle_engine.api.request_body import RequestParser as RequestParser
    from lifecycle_engine.config import (
        AccessConfig as AccessConfig,
        AdmissionConfig as AdmissionConfig,
        ConfigError as ConfigError,
        EngineConfig as EngineConfig,
        HttpConfig as HttpConfig,
        ModelConfig as ModelConfig,
        ServerConfig as ServerConfig,
        load_config as load_config,
    )
    from lifecycle_engine.core.model_runner import (
        DeviceLost as DeviceLost,
        Emitted as Emitted,
        PrefillsTogether as PrefillsTogether,
        Prompt as Prompt,
        PromptChunk as PromptChunk,
        Resumes as Resumes,
        Runner as Runner,
        Sampling as Sampling,
    )
    from lifecycle_engine.core.scheduler import Scheduler as Scheduler
    from lifecycle_engine.errors import (
        BadChat as BadChat,
        BadImage as BadImage,
        ChatTooLong as ChatTooLong,
    )
    from lifecycle_engine.events import EngineMeasured as EngineMeasured
    from lifecycle_engine.factory import (
        CheckpointError as CheckpointError,
        make_app as make_app,
    )
    from lifecycle_engine.model.transformers_runner import (
        TransformersRunner as TransformersRunner,
    )
    from lifecycle_engine.multimodal.limits import (
        MediaLimits as MediaLimits,
        read_image_size as read_image_size,
    )
    from lifecycle_engine.processing.chat_processor import (
        ChatProcessor as ChatProcessor,
    )
    from lifecycle_engine.processing.processor import (
        Chat as Chat,
        ChatDefaults as ChatDefaults,
        Detokenizer as Detokenizer,
        Empty as Empty,
        Message as Message,
        Prepared as Prepared,
        Processor as Processor,
        defaults_of as defaults_of,
        in_arena as in_arena,
        payload_capacity as payload_capacity,
    )
    from lifecycle_engine.server.access import AccessRules as AccessRules
    from lifecycle_engine.server.app import (
        AppSettings as AppSettings,
        create_app as create_app,
    )
    from lifecycle_engine.server.remote_images import (
        FetchLimits as FetchLimits,
        HttpsGet as HttpsGet,
        RemoteImages as RemoteImages,
    )
    from lifecycle_engine.server.service import (
        Deadlines as Deadlines,
        Engine as Engine,
        Service as Service,
    )
    from lifecycle_engine.server.uvicorn_protocol import (
        ConnectionLimits as ConnectionLimits,
        http_protocol as http_protocol,
    )
    from lifecycle_engine.sim import (
        SimCost as SimCost,
        SimProcessor as SimProcessor,
        SimRunner as SimRunner,
    )

_MODULES = {
    "api.request_body": ("RequestParser",),
    "config": (
        "AccessConfig",
        "AdmissionConfig",
        "ConfigError",
        "EngineConfig",
        "HttpConfig",
        "ModelConfig",
        "ServerConfig",
        "load_config",
    ),
    "core.model_runner": (
        "DeviceLost",
        "Emitted",
        "PrefillsTogether",
        "Prompt",
        "PromptChunk",
        "Resumes",
        "Runner",
        "Sampling",
    ),
    "core.scheduler": ("Scheduler",),
    "errors": ("ApiError", "BadChat", "BadImage", "ChatTooLong"),
    "events": ("EngineMeasured",),
    "factory": ("CheckpointError", "make_app"),
    "model.transformers_runner": ("TransformersRunner",),
    "multimodal.limits": ("MediaLimits", "read_image_size"),
    "processing.chat_processor": ("ChatProcessor",),
    "processing.processor": (
        "Chat",
        "ChatDefaults",
        "Detokenizer",
        "Empty",
        "Message",
        "Prepared",
        "Processor",
        "defaults_of",
        "in_arena",
        "payload_capacity",
    ),
    "server.service": ("Deadlines", "Engine", "Service"),
    "server.access": ("AccessRules",),
    "server.app": ("AppSettings", "create_app"),
    "server.remote_images": ("FetchLimits", "HttpsGet", "RemoteImages"),
    "server.uvicorn_protocol": ("ConnectionLimits", "http_protocol"),
    "sim": ("SimCost", "SimProcessor", "SimRunner"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = tuple(sorted(_MODULE_OF))


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
