"""Pure ASGI middleware: disconnects, limits on bodies and clients, request events.

Modules::

    asgi_types     the ASGI callables, as types
    json_body      parse_json: long strings slice by slice; LongText
    media          find_media: the images, video, audio and files of a request
    image_structure  structure_error: files that are expensive to open
    media_memory   estimate: the memory of media, from their headers; Correction
    media_body     the media of JSON, forms and files
    media_profiles  media_profile: what media cost known servers
    events         events of a request, the live view's notes, the request log
    request        RequestScope: state of a request, and what is closed at its end
    websocket      WebSockets whose client leaves while they wait at a gate
    middleware     LifecycleMiddleware: cancels applications on a disconnect
    endpoint       cancel_on_disconnect: the same for one route
    request_scope  request_scope: the same for servers that do not speak ASGI
    body           how a body is read under a lease, or dropped
    responses      responses of a middleware itself, and so that they arrive
    refusals       refusal_response; refusals in the format of the request's API
    limits         BodyLimit, ClientIdentity
    api_keys       API keys, checked before a body is read
    lanes          gates that clients share
    vllm_plugin    hand-off in vLLM, by its entry point for plugins
    sglang_plugin  SGLang: Admission and hand-off, by its entry point for plugins
    transformers_plugin  transformers serve: Admission, and the end of leavers' work
    litserve_plugin  the same for LitServe; imported by name only
    resume         ResumableStreams: clients that leave may resume their stream
    admission      Admission: all of this around the application of any server
    live_warnings  find_warnings: what is wrong, of one moment
    live_snapshot  snapshots of the live view
    live_view      LiveView: a page and server-sent events
    prometheus     Metrics: an observer; imported by name only
    prometheus_collectors  statistics of gates and sessions, read at each scrape
    opentelemetry  Spans: an observer; imported by name only
    starlette      install, ManagedResponse; imported by name only
    testing        a client for tests that leaves; imported by name only
    uvicorn_protocol  uvicorn without trailers; imported by name only

Nothing but `lifecycle_asgi.starlette` imports a web framework, and nothing but
`lifecycle_asgi.uvicorn_protocol` and `lifecycle_asgi.litserve_plugin` a server.
"""

from __future__ import annotations

from lifecycle_asgi.admission import Admission, handed_off
from lifecycle_asgi.admission_settings import AdmissionOptions, AdmissionSettings
from lifecycle_asgi.body import BodyTooLarge, BodyTooSlow
from lifecycle_asgi.endpoint import cancel_on_disconnect
from lifecycle_asgi.events import (
    FirstItem,
    Phase,
    PhaseEnded,
    RequestEnded,
    RequestEvent,
    RequestStarted,
    request_log,
)
from lifecycle_asgi.limits import (
    BodyLimit,
    ClientIdentity,
    client_address,
)
from lifecycle_asgi.live_view import LiveView, local_client
from lifecycle_asgi.live_warnings import (
    EngineView,
    GateView,
    LiveWarning,
    RequestView,
    WarningLimits,
    find_warnings,
)
from lifecycle_asgi.media import Media, TooDeep, find_media
from lifecycle_asgi.media_memory import (
    Correction,
    ImageSize,
    ImageTooLarge,
    MediaProfile,
    MemoryEstimate,
    UnreadableImage,
    estimate,
    estimate_memory,
    read_image_header,
)
from lifecycle_asgi.media_profiles import media_profile
from lifecycle_asgi.middleware import LifecycleMiddleware
from lifecycle_asgi.refusals import ApiError, ClientLimitExceeded, refusal_response
from lifecycle_asgi.request import RequestScope, request_of
from lifecycle_asgi.request_scope import request_scope
from lifecycle_asgi.resume import ResumableResponse, ResumableStreams

__all__ = (
    "Admission",
    "AdmissionOptions",
    "AdmissionSettings",
    "ApiError",
    "BodyLimit",
    "BodyTooLarge",
    "BodyTooSlow",
    "ClientIdentity",
    "ClientLimitExceeded",
    "Correction",
    "EngineView",
    "FirstItem",
    "GateView",
    "ImageSize",
    "ImageTooLarge",
    "LifecycleMiddleware",
    "LiveView",
    "LiveWarning",
    "Media",
    "MediaProfile",
    "MemoryEstimate",
    "Phase",
    "PhaseEnded",
    "RequestEnded",
    "RequestEvent",
    "RequestScope",
    "RequestStarted",
    "RequestView",
    "ResumableResponse",
    "ResumableStreams",
    "TooDeep",
    "UnreadableImage",
    "WarningLimits",
    "cancel_on_disconnect",
    "client_address",
    "estimate",
    "estimate_memory",
    "find_media",
    "find_warnings",
    "handed_off",
    "local_client",
    "media_profile",
    "read_image_header",
    "refusal_response",
    "request_log",
    "request_of",
    "request_scope",
)

# Tracebacks and logs show the public import path, not the module in this package.
for _name in set(__all__) - {"Phase"}:  # Phase is a Literal
    globals()[_name].__module__ = __name__
del _name
