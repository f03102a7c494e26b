"""`LiveView`: what a running application does and holds, in a browser or a terminal.

Reads the requests that pass through it, and shows them at paths of its own, as
one page and as server-sent events. Nothing is computed while there is no viewer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, Final
from weakref import ref

import anyio

from lifecycle.debug import who_holds
from lifecycle.lowlevel import owner
from lifecycle_asgi.api_keys import with_basic
from lifecycle_asgi.asgi_types import AnyGate, App, Message, Receive, Scope, Send
from lifecycle_asgi.events import LIVE_KEY, LiveRequest, LiveRequests
from lifecycle_asgi.limits import ClientIdentity, client_address, is_loopback
from lifecycle_asgi.live_snapshot import (
    Snapshots,
    cancel,
    find,
    held_objects,
    is_cancellable,
)
from lifecycle_asgi.live_warnings import WarningLimits
from lifecycle_asgi.responses import send_response

# Also from a zip file, as zipapp makes one.
_PAGE: Final = files("lifecycle_asgi").joinpath("live_view.html")
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
# Behind a proxy on the same machine, every client has its address.
_FORWARDED: Final = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})
_TOKEN_HEADER: Final = b"x-lifecycle-token"
_MAX_ID: Final = 300
# Until viewers connect again: servers wait for open responses before they exit.
_STREAM_SECONDS: Final = 10.0
# Seconds between two questions of what holds bytes: each stops the event loop for a
# walk over the heap.
_HOLDERS_SECONDS: Final = 1.0
_HTML: Final = b"text/html; charset=utf-8"
_JSON: Final = b"application/json"
_TEXT: Final = b"text/plain; charset=utf-8"

Headers = list[tuple[bytes, bytes]]


def local_client(scope: Scope) -> bool:
    """Whether a request comes from this machine, by its own name for itself.

    The peer is a loopback address, ``Host`` names one, and no proxy has forwarded the
    request. A page of another site that has its name resolved to a loopback address
    (DNS rebinding) has the wrong ``Host``.
    """
    client = scope.get("client")
    if client is None or was_forwarded(scope):
        return False
    headers = scope.get("headers", ())
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    return len(hosts) == 1 and all(
        map(is_loopback, (str(client[0]), _name_of(hosts[0])))
    )


def was_forwarded(scope: Scope) -> bool:
    """Whether a proxy says that it passes on the request of another client."""
    return any(name in _FORWARDED for name, _ in scope.get("headers", ()))


def _name_of(host: str) -> str:
    """Return *host* without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class LiveView:
    """Shows the live requests of an application at ``/_lifecycle``.

    Pure ASGI, to be put around all other middleware. Every request that passes is
    shown, with its phase, its client, the bytes that it holds, and its rate; and so is
    every gate that one of them came to. Leases and sessions belong to the request in
    whose context they were made, also in its threads and tasks.

    =============================  =====================================================
    ``GET /_lifecycle``            the page
    ``GET /_lifecycle/events``     the same as server-sent events, one each second
    ``GET /_lifecycle/snapshot``   one of these events, as JSON
    ``POST /_lifecycle/cancel``    ends the request whose id is the body
    ``POST /_lifecycle/holders``   what keeps the bytes of that request
    =============================  =====================================================

    All other paths are the application's. Of a request, neither headers nor query nor
    body are shown, only method, path, client and ids. Both ``POST`` need the token that
    the events contain, in ``x-lifecycle-token``, so that no other site can send them.

    Args:
        app: The application to wrap.
        gates: Gates to show before a request comes to them.
        engine: Returns ``health``, ``incarnation`` and ``pid`` of an engine.
        keys: Keys of operators: a viewer sends one of them as ``Bearer``, in
            ``x-api-key``, or as the password that a browser asks for.
        allow: Whether the sender of a scope may look, in place of *keys*. Default:
            clients on this machine that no proxy has forwarded.
        cancel: Whether viewers may cancel requests. Needs *keys*, or an *allow* of your
            own: a proxy on this machine lends its address to every client.
        client: Returns what identifies a client, as that of an `Admission`, or a name
            for it. Default: `client_address`. Of a `ClientIdentity`, part of the hash
            is shown, and no key.
        path: Where the view is.
        limits: When a warning is due.

    Raises:
        TypeError: *keys* is a single string, each letter of which would be a key.
        ValueError: *path* does not begin with a slash, or ends with one; *keys* and
            *allow* are both given; or *cancel* without either.
    """

    def __init__(
        self,
        app: App,
        *,
        gates: Iterable[AnyGate] = (),
        engine: Callable[[], Mapping[str, Any]] | None = None,
        keys: Sequence[str] = (),
        allow: Callable[[Scope], bool] | None = None,
        cancel: bool = False,
        client: Callable[[Scope], bytes | str] = client_address,
        path: str = "/_lifecycle",
        limits: WarningLimits | None = None,
    ) -> None:
        if not path.startswith("/") or path.endswith("/"):
            raise ValueError(
                f"path is {path!r}; it needs a slash in front, none behind"
            )
        given = _holds_key(keys)
        if given and allow:
            raise ValueError("keys and allow are both given; one says who may look")
        if cancel and not (given or allow):
            raise ValueError(
                "cancel is True, for every client with an address of this machine, as "
                "behind a proxy; add keys=[...], or a function as allow"
            )
        self._app = app
        self._requests = LiveRequests(gates, client)
        self._pages = LivePages(
            self._requests,
            engine=engine,
            allow=given or allow or local_client,
            challenge=given is not None,
            cancel=cancel,
            path=path,
            limits=limits,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection.

        Cancellation:
            Passes through.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in self._pages.paths:
            await self._pages(scope, receive, send)
        else:
            await self._show(scope, receive, send)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and note what it does."""
        shown = self._requests.begin(scope)

        async def receive_noted() -> Message:
            shown.receiving(None)
            message = await receive()
            shown.receiving(message)
            return message

        async def send_noted(message: Message) -> None:
            shown.sending = time.monotonic()
            await send(message)
            shown.sent_message(message)

        scope[LIVE_KEY] = shown
        context = owner.set(shown.claim)
        try:
            await self._app(scope, receive_noted, send_noted)
        finally:
            owner.reset(context)
            self._requests.end(shown)
            # Servers keep the scope of an idle connection until its next request.
            scope.pop(LIVE_KEY, None)


def _holds_key(keys: Sequence[str]) -> Callable[[Scope], bool] | None:
    """Return whether a scope has one of *keys*; ``None`` if there are none."""
    identity = ClientIdentity(keys)
    if not keys:
        return None
    return lambda scope: identity.issued(with_basic(scope)) is not None


class LivePages:
    """What a `LiveView` serves, as an application, for requests that others note.

    Args:
        requests: The requests to show.
        engine: As of `LiveView`.
        allow: As of `LiveView`.
        cancel: Whether viewers may cancel requests.
        challenge: Whether a browser that may not look asks for a key.
        path: As of `LiveView`.
        limits: As of `LiveView`.

    Attributes:
        paths: The paths that it serves.
    """

    def __init__(
        self,
        requests: LiveRequests,
        *,
        engine: Callable[[], Mapping[str, Any]] | None,
        allow: Callable[[Scope], bool],
        cancel: bool,
        challenge: bool = False,
        path: str = "/_lifecycle",
        limits: WarningLimits | None = None,
    ) -> None:
        self._requests = requests
        self._snapshots = Snapshots(requests, limits or WarningLimits(), engine)
        self._allow = allow
        self._cancel_allowed = cancel
        self._challenge = challenge
        self._token = secrets.token_urlsafe(24)
        self._asked_holders = 0.0
        self._page, self._page_headers = _read_page()
        self._gets = {
            path: self._send_page,
            f"{path}/": self._send_page,
            f"{path}/events": self._send_events,
            f"{path}/snapshot": self._send_snapshot,
        }
        self._posts = {
            f"{path}/cancel": self._cancel,
            f"{path}/holders": self._holders,
        }
        self.paths = frozenset((*self._gets, *self._posts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to one of the paths.

        Cancellation:
            Passes through.
        """
        method, path = scope["method"], scope["path"]
        if not self._allow(scope) and self._challenge:
            basic = [(b"www-authenticate", b'Basic realm="lifecycle"')]
            await _answer(send, 401, b"Send a key of the live view", more=basic)
        elif not self._allow(scope):
            what = (
                "The live view is for clients on the machine of the server; ask there"
            )
            await _answer(send, 403, what.encode())
        elif method in ("GET", "HEAD") and path in self._gets:
            await self._gets[path](receive, send)
        elif method == "POST" and path in self._posts:
            if self._came_from_view(scope):
                id_ = await _read_id(receive)
                await self._posts[path](id_, send)
            else:
                await _answer(
                    send, 403, b"Send the token of the events, from this site"
                )
        else:
            await _answer(
                send, 405, b"The page takes GET; cancel and holders take POST"
            )

    def _came_from_view(self, scope: Scope) -> bool:
        """Whether a POST has the token, and comes from a page of this very site."""
        headers = dict(scope["headers"])
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        if origin is not None and origin.partition(b"://")[2] != host:
            return False
        token = headers.get(_TOKEN_HEADER, b"")
        return secrets.compare_digest(token, self._token.encode())

    async def _send_page(self, _: Receive, send: Send) -> None:
        await _answer(send, 200, self._page, _HTML, self._page_headers)

    async def _send_snapshot(self, _: Receive, send: Send) -> None:
        await _answer(send, 200, self._event(), _JSON)

    async def _send_events(self, receive: Receive, send: Send) -> None:
        """Send a snapshot each second, until the viewer leaves, or for a while."""
        headers = [*_SAFE_HEADERS, (b"content-type", b"text/event-stream")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(start)
        until = time.monotonic() + _STREAM_SECONDS
        left = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_wait_disconnect, receive, left)
            with suppress(OSError):  # of a viewer that has left
                await self._send_each_second(send, until, left)
                if not left.is_set():
                    await send({"type": "http.response.body", "body": b""})
            tasks.cancel_scope.cancel()

    async def _send_each_second(
        self, send: Send, until: float, left: anyio.Event
    ) -> None:
        retry = b"retry: 200\n"
        while not left.is_set() and time.monotonic() < until:
            body = retry + b"data: " + self._event() + b"\n\n"
            part = {"type": "http.response.body", "body": body, "more_body": True}
            await send(part)
            retry = b""
            with anyio.move_on_after(self._snapshots.pause):
                await left.wait()

    def _event(self) -> bytes:
        about = {"token": self._token, "cancel": self._cancel_allowed}
        text = json.dumps(about)[:-1] + "," + self._snapshots.text()[1:]
        return text.encode()

    async def _cancel(self, id_: str, send: Send) -> None:
        found = find(self._requests, id_)
        if not self._cancel_allowed:
            await _answer(
                send, 403, b"Cancelling is off; make LiveView(cancel=True, keys=[...])"
            )
        elif found is None:
            await _answer(send, 404, b"No request with this id is running")
        elif not is_cancellable(found):
            what = b"It cannot be cancelled: there is no LifecycleMiddleware around it"
            await _answer(send, 409, what)
        else:
            cancel(found)
            await _answer(send, 200, b"cancelled")

    async def _holders(self, id_: str, send: Send) -> None:
        found, now = find(self._requests, id_), time.monotonic()
        if found is None:
            await _answer(send, 404, b"No request with this id is running")
            return
        if now - self._asked_holders < _HOLDERS_SECONDS:
            await _answer(send, 429, b"This stops the server for a moment; ask later")
            return
        self._asked_holders = now
        # A dictionary of names: this frame must not be one of the holders.
        body = json.dumps(_holders_of(ref(found))).encode()
        await _answer(send, 200, body, _JSON)


def _holders_of(request: ref[LiveRequest]) -> dict[str, list[str]]:
    """Return the places that keep the bytes of a request, by what they keep."""
    found: dict[str, list[str]] = {}
    shown = request()
    for name, held in [] if shown is None else held_objects(shown):
        found[name] = [str(each) for each in who_holds(held)]
    return found


async def _wait_disconnect(receive: Receive, left: anyio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left.set()


async def _read_id(receive: Receive) -> str:
    """Return the body, up to a limit that every id is below."""
    body, more = b"", True
    while more and len(body) <= _MAX_ID:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body[:_MAX_ID].decode("utf-8", "replace")


# Answers are not kept, framed, sniffed or told to other sites.
_SAFE_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = _TEXT,
    more: Headers | None = None,
) -> None:
    headers = [
        *_SAFE_HEADERS,
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        *(more or []),
    ]
    await send_response(send, (status, headers, body))


def _read_page() -> tuple[bytes, Headers]:
    """Return the page, and a policy: only its own script and style, by hashes."""
    page = _PAGE.read_text(encoding="utf-8")
    hashes = {"script": "'none'", "style": "'none'"}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; "
        f"style-src {hashes['style']}; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), [(b"content-security-policy", policy.encode())]
