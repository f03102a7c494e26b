"""Pure-ASGI middleware that makes any ASGI application safe to leave.

Map of the package::

    _types       the ASGI callables, as types                 (floor)
    _owned       sources of a response that are closed with the request
    _request     RequestScope: what a request knows of its client
    _inbox       Inbox: what was read and not yet asked for
    _progress    Progress: how far the answer has come
    _exchange    Exchange: one request and its response, the one reader of both
    _middleware  LifecycleMiddleware: an exchange around every call
    _scope       request_scope: the same for servers that do not speak ASGI
    _body        BodyLimit: 413 before a body is buffered

Nothing here imports a web framework or a server.
"""

from __future__ import annotations

from lifecycle_asgi._body import BodyLimit, BodyTooLarge
from lifecycle_asgi._middleware import LifecycleMiddleware
from lifecycle_asgi._request import RequestScope, request_of
from lifecycle_asgi._scope import request_scope

__all__ = (
    "BodyLimit",
    "BodyTooLarge",
    "LifecycleMiddleware",
    "RequestScope",
    "request_of",
    "request_scope",
)

# Tracebacks and logs name what users import, not where it happens to live.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
