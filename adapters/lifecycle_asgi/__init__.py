"""Pure-ASGI middleware that makes any ASGI application safe to leave.

Map of the package::

    _types       the ASGI callables, as types                 (floor)
    events       what becomes of requests, for an observer  (floor)
    _owned       sources of a response that are closed with the request
    _copies      bodies that a framework keeps, dropped at hand-off
    _places      where an exception came from, without its words
    _record      Record: what is told of one request
    _log         request_log: an observer that writes one line a request
    _request     RequestScope: what a request knows of its client
    _inbox       Inbox: what was read and not yet asked for
    _progress    Progress: how far the answer has come
    _exchange    Exchange: one request and its response, the one reader of both
    _middleware  LifecycleMiddleware: an exchange around every call
    _scope       request_scope: the same for servers that do not speak ASGI
    media        find_media: what of a request is no text
    _refusals    what is said to whoever is refused
    _share       ClientLimit: 429 to whoever has its share in flight
    _body        BodyLimit: 413 before a body is buffered

Nothing here imports a web framework or a server.
"""

from __future__ import annotations

from lifecycle_asgi._body import BodyLimit
from lifecycle_asgi._log import request_log
from lifecycle_asgi._middleware import LifecycleMiddleware
from lifecycle_asgi._record import tell_refusal
from lifecycle_asgi._refusals import BodyTooLarge, BodyTooSlow, ShareUsedUp
from lifecycle_asgi._request import RequestScope, request_of
from lifecycle_asgi._scope import request_scope
from lifecycle_asgi._share import ClientLimit, KnownKeys, client_address

__all__ = (
    "BodyLimit",
    "BodyTooLarge",
    "BodyTooSlow",
    "ClientLimit",
    "KnownKeys",
    "LifecycleMiddleware",
    "RequestScope",
    "ShareUsedUp",
    "client_address",
    "request_log",
    "request_of",
    "request_scope",
    "tell_refusal",
)

# Tracebacks and logs name what users import, not where it happens to live.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
