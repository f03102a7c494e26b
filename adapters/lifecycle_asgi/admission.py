"""`Admission`: admission control around the application of any server, in one line."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias, Unpack

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from lifecycle import CostTooLarge, GateFull, GateStatistics, Lease, Payload
from lifecycle.events import Observer
from lifecycle.lowlevel import event_loop_clock
from lifecycle_asgi.admission_settings import AdmissionOptions, AdmissionSettings
from lifecycle_asgi.api_keys import ApiKeys
from lifecycle_asgi.asgi_types import AnyGate, App, Message, Receive, Scope, Send
from lifecycle_asgi.body import (
    FIRST_CHARGE,
    BodyReader,
    BodyTooLarge,
    BodyTooSlow,
    ClientLeft,
    RequestBody,
)
from lifecycle_asgi.events import client_timeout
from lifecycle_asgi.heap import LARGE, Heap
from lifecycle_asgi.lanes import (
    ClientShares,
    Lane,
    ShadowLog,
    make_lanes,
    reporting,
    shares,
)
from lifecycle_asgi.learned_budget import LearnedBudget
from lifecycle_asgi.limits import ClientIdentity
from lifecycle_asgi.media_body import BodyEstimator
from lifecycle_asgi.media_memory import Correction, MemoryEstimate
from lifecycle_asgi.media_profiles import media_profile, server_of
from lifecycle_asgi.memory_limit import announce, size_text
from lifecycle_asgi.middleware import LifecycleMiddleware
from lifecycle_asgi.refusals import (
    REFUSALS,
    ApiError,
    ClientLimitExceeded,
    MemoryTooLarge,
    Refusal,
    Unauthorised,
    describe,
    identified,
    protocol_response,
)
from lifecycle_asgi.request import declared_length, request_of
from lifecycle_asgi.responses import (
    MAX_UNACCEPTABLE,
    Refusing,
    Response,
    send_response,
    with_headers_of,
)
from lifecycle_asgi.websocket import denial

_SCOPE_KEY: Final = "lifecycle.admission"
_CURRENT: Final[ContextVar[AdmittedRequest | None]] = ContextVar(
    "lifecycle_admission", default=None
)
_NOTHING: Final = MemoryEstimate()
_NO_LESSON: Final[Callable[[], object]] = object
_METHODS_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
# SGLang looks for a disconnect every four seconds: `_wait_one_response` in its
# managers/tokenizer_manager.py.
_SECONDS_TO_LOOK: Final = MappingProxyType({"sglang": 5.0})
# Of the kernel's memory, beside those, for bodies that wait in line: one in so many.
_ROOM: Final = 16
# A round trip, for most clients.
_PROBE_SECONDS: Final = 0.05
# Larger bodies are never small, whatever the bytes.
_MAX_SMALL_BODY: Final = 65536
# The media of larger bodies are found in a thread: the event loop would wait.
_MAX_INLINE_BODY: Final = 2**20
# Ratios of the tensors of media to their estimate, as far as they are learned.
_FLOOR, _CEILING = 0.25, 4.0
# Bytes charged for each byte of a body: the bytes, their text, and the parsed values.
_BODY_COPIES: Final = 3

Price: TypeAlias = Callable[
    [Scope, bytes], Awaitable[MemoryEstimate | None] | MemoryEstimate | None
]


def admitted_request(scope: Scope) -> AdmittedRequest:
    """Return what `Admission` above knows of a request with a body.

    Raises:
        KeyError: There is no `Admission` above, or the request has ended.
    """
    request: AdmittedRequest = scope[_SCOPE_KEY]
    return request


def handed_off(scope: Scope | None = None, *, tensor_bytes: int | None = None) -> None:
    """Release what a request was admitted with: the engine has it now. Idempotent.

    For hooks that learn when an engine has taken over a request. Without one, the first
    bytes of a streamed response tell, and the end of any other.

    Args:
        tensor_bytes: Bytes of the tensors of its media, if known. Later estimates are
            corrected by them.
        scope: The ASGI scope of the request. Default: the request that the current
            task, or the task that created it, works on. Without `Admission` above,
            nothing happens.
    """
    request = _CURRENT.get() if scope is None else scope.get(_SCOPE_KEY)
    if request is not None:
        request.hand_off(tensor_bytes)


class Admission:
    """Admits requests by the memory that they will need, before they need it.

    Pure ASGI, and made with the application alone, as servers make their middleware:
    ``vllm serve MODEL --middleware lifecycle_asgi.Admission``. Settings come from the
    arguments, and from ``LIFECYCLE_*`` in the environment. Per request:

    * Without a valid API key, it is refused before a byte of the body is read. The
      handshake of a WebSocket needs one, too; nothing else of it is limited.
    * The rest of a refused body is read and dropped, within limits, as many servers
      would otherwise reset the connection, and with it the answer.
    * Its body is admitted by its declared length before it is read, or metered.
    * The memory that it needs until hand-off is admitted: the sizes of its images are
      read from their headers, which needs Pillow (the extra ``media``).
    * The body is given to the application once, without a copy.
    * The memory is released with the first bytes of a streamed response, by
      `handed_off` or `RequestScope.release_body`, or at the end; with
      ``release="end"``, the first bytes release nothing.
    * A client that leaves ends its request, as under `LifecycleMiddleware`; behind a
      body that waits in line, too, for which the kernel may take a sixteenth of the
      bytes beside them.

    Three lanes divide the bytes: a sixteenth is for small requests without media, three
    sixteenths are for bodies that arrive or wait, and the rest is for requests that the
    application works on. A request keeps its lease until it has the one of the next
    lane, and then waits for a slot, if those are limited. A request with a slot waits
    for nothing, so no two requests wait for each other. In each lane, clients share by
    cost and seconds, and one client may have half of the queue. Where the queue for
    slots is full, a request is refused before its body is read.

    A client that says when it gives up, as the SDKs of OpenAI and Anthropic do, does
    not wait for longer, nor at all if its turn would come too late.

    Args:
        app: The application to wrap.
        client: Returns the client of a request. Default: the network address, or the
            API key where there are several.
        price: Returns what a request needs until hand-off, besides its body; ``None``
            is nothing. May be asynchronous, and raise `ApiError` to refuse the request.
            Default: what its media need.
        answer: Returns status, headers and body of a refusal, given the scope and the
            reason. Default: in the format of the API of the request.
        gates: Gates of yours for some lanes, by their names in `statistics`: to share
            one with other work in the process. Their limits count, not those of the
            settings.
        observer: Called with each grant and refusal of the gates made here.
        environment: Instead of that of the process.
        **options: Attributes of `AdmissionSettings`.

    Raises:
        TypeError: An option is unknown or of another type.
        ValueError: An option, or a variable of the environment, is out of range.
    """

    def __init__(
        self,
        app: App,
        *,
        client: Callable[[Scope], bytes] | None = None,
        price: Price | None = None,
        answer: Callable[[Scope, Refusal | Unauthorised], Response] | None = None,
        gates: Mapping[str, AnyGate] | None = None,
        observer: Observer | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Unpack[AdmissionOptions],
    ) -> None:
        environment = os.environ if environment is None else environment
        settings = AdmissionSettings.from_environment(environment, **options)
        self._app, self._settings = app, settings
        server_key = environment.get("VLLM_API_KEY", "")
        self._keys = ApiKeys(
            settings.api_keys,
            server_key=server_key,
            prefixes=settings.guarded_prefixes,
        )
        shared = len(settings.api_keys) < 2
        self._identity = ClientIdentity(() if shared else settings.api_keys)
        self._client_of = client or self._identity
        profile = media_profile(settings.profile)
        if settings.tensor_pixels is not None:
            profile = replace(profile, tensor_pixels=settings.tensor_pixels)
        self._price = price or self._estimate_media
        self._estimator = BodyEstimator(profile)
        self._estimating: RunVar[anyio.CapacityLimiter] = RunVar("lifecycle_estimating")
        self._answer = answer or _answer
        self._reading: set[BodyReader | Refusing] = set()
        self._heap, self._learn = Heap(), _NO_LESSON
        self._correction = Correction(floor=_FLOOR, ceiling=_CEILING)
        nbytes = settings.budget
        self._lanes = make_lanes(settings, nbytes, gates or {}, observer, _export)
        self._small, self._bodies = self._lanes["small"], self._lanes["bodies"]
        self._requests, self._slots = self._lanes["requests"], self._lanes.get("slots")
        most = settings.per_client
        self._shares = ClientShares(most) if most else None
        lane = self._bodies.statistics().bytes
        self._max_body = settings.largest_body(lane, _BODY_COPIES, gates or {})
        self._ceiling = 0
        body = self._max_body if self._max_body < settings.max_body else None
        if settings.bytes == "auto":
            floor = _BODY_COPIES * self._max_body
            learned = LearnedBudget(self._requests.gate, floor=floor, body=body)
            self._ceiling, self._learn = learned.ceiling, learned.observe
        else:
            announce(nbytes, shared=settings.shared, body=body)
        # Small requests with media keep their lease while they wait in another lane.
        # All of those together leave half of this lane to the others.
        small, bodies, _ = shares(nbytes)
        fits = small // (4 * _BODY_COPIES * max(1, settings.max_waiting))
        self._max_small_body = min(_MAX_SMALL_BODY, fits)
        fits = max(1, bodies // (4 * _BODY_COPIES))
        self._first_charge = min(FIRST_CHARGE, self._max_body, fits)
        delay, room = _cancel_delay(settings), nbytes // _ROOM
        self._watched = LifecycleMiddleware(self._serve, cancel_delay=delay, room=room)
        self._shadow = ShadowLog(self.lanes) if settings.shadow else None

    def statistics(self) -> dict[str, GateStatistics]:
        """Return the state of each lane.

        ``small``, ``bodies`` and ``requests``, and ``slots`` where they are limited.
        """
        return {name: lane.statistics() for name, lane in self._lanes.items()}

    @property
    def gates(self) -> tuple[AnyGate, ...]:
        """The gates of all lanes, for metrics and for a live view."""
        return tuple(lane.gate for lane in self._lanes.values())

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes, for metrics: they count refusals that their gates do not know."""
        return tuple(self._lanes.values())

    @property
    def ratios(self) -> Mapping[int, float]:
        """Real bytes of tensors divided by estimated ones; see `Correction.ratios`."""
        return self._correction.ratios

    def check(self, scope: Scope) -> None:
        """Refuse a request by its head, if that is enough to know.

        For a server that asks before it does anything else for a request. One that
        passes may be refused later, as others may come first. In shadow all pass.

        Raises:
            BodyTooLarge: It declares a larger body than the limit.
            Refused: The queue for slots is full, or its client has half of it.
        """
        if self._shadow is not None:
            return
        declared = declared_length(scope)
        if declared is not None and declared > self._max_body:
            raise BodyTooLarge(self._max_body)
        if self._slots is not None:
            self._slots.check(self._client(scope))

    async def refuse(
        self, scope: Scope, receive: Receive, send: Send, error: ApiError
    ) -> None:
        """Refuse a request for a reason that only its server knows.

        Instead of a call of this object. The rest of the body is dropped, as in those.

        Cancellation:
            The answer may be cut off.
        """
        await self._refuse(scope, RequestBody(receive), send, error)

    def close(self) -> None:
        """Refuse what waits or arrives, and bodies that are incomplete. Idempotent.

        For a server that shuts down. Requests that the application works on go on.
        """
        for gate in self.gates:
            gate.close()
        for reading in self._reading:
            reading.stop()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            Passes through; a request that waits leaves its queue.
        """
        if scope["type"] == "http" and self._settings.load_header:
            send = reporting(send, self.lanes)
        if _has_body(scope) and not self._keys.accept(scope):
            await self._refuse(scope, RequestBody(receive), send, Unauthorised())
        elif scope["type"] == "websocket" and not self._keys.accept(scope):
            await send_response(
                identified(scope, denial(scope, send), Unauthorised(), dict),
                self._answer(scope, Unauthorised()),
            )
        else:
            await self._watched(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _has_body(scope):
            await self._app(scope, receive, send)
            return
        request = AdmittedRequest(
            receive,
            send,
            self._correction,
            timeout=self._settings.body_timeout,
            learn=self._learn,
            heap=self._heap,
        )
        if self._settings.release == "end":
            request.until_end = True
            request_of(scope).keep_bytes(request.release)
        scope[_SCOPE_KEY] = request
        try:
            refusal = await self._refusal(scope, request)
            if request.admitted:
                token = _CURRENT.set(request)
                try:
                    await self._app(scope, request.receive, request.send)
                finally:
                    _CURRENT.reset(token)
        finally:
            request.end()
            # Servers keep the scope of an idle connection until its next request.
            scope.pop(_SCOPE_KEY, None)
            if self._shadow is not None:
                self._shadow.summarise()
        if refusal is not None:
            await self._refuse(scope, request.rest, send, refusal)

    async def _refusal(self, scope: Scope, request: AdmittedRequest) -> Refusal | None:
        """Admit *request*; return why not if it is refused."""
        try:
            await self._admit(scope, request)
        except (*REFUSALS, ApiError) as error:
            # The frames that it came through have the body, which counts no more.
            return error.with_traceback(None)
        except ClientLeft:
            pass
        return None

    async def _refuse(
        self,
        scope: Scope,
        body: RequestBody,
        send: Send,
        refusal: Refusal | Unauthorised,
    ) -> None:
        max_bytes = self._max_body
        if isinstance(refusal, Unauthorised | BodyTooLarge | CostTooLarge):
            max_bytes = MAX_UNACCEPTABLE

        async def answer(_: Scope, __: Receive, send: Send) -> None:
            refusing = Refusing(scope, body, send)
            with self._closable(refusing):
                await refusing.send(self._answer(scope, refusal))
                await refusing.linger(max_bytes=max_bytes)

        def waiting() -> dict[str, int]:
            lanes = self._lanes.values()
            return {lane.gate.name: lane.statistics().waiting for lane in lanes}

        # Outside the middleware, one of which may have given the response an id.
        send = identified(scope, send, refusal, waiting)
        await with_headers_of(self._app, answer)(scope, body.receive, send)

    async def _admit(self, scope: Scope, request: AdmittedRequest) -> None:
        self._learn()
        self.check(scope)
        declared, client = declared_length(scope), self._client(scope)
        small = declared is not None and declared <= self._max_small_body
        arrival = self._small if small else self._bodies
        self._count(request, client, arrival)
        size = self._first_charge if declared is None else min(declared, self._max_body)
        state, now = request_of(scope), arrival.gate.statistics()
        if arrival.is_full(client, now) and state.probe_waiting():
            # Some of the waiting clients may have left: this request takes their place.
            await anyio.sleep(_PROBE_SECONDS)
            now = arrival.gate.statistics()
        with state.phase("queue"):
            request.lease = await arrival.admit(_BODY_COPIES * size, client, now=now)
        with state.phase("read"):
            request.body = await self._read(request, arrival, declared)
        length = len(request.body)
        deadline = event_loop_clock()() + client_timeout(scope)
        if not request.partial:
            request.estimate = await self._estimate(scope, request.body)
        has_media = request.estimate.total > 0
        left = len(request.body)
        lane = self._small
        if has_media:
            lane, length = self._requests, left  # the estimate counts what was dropped
        elif left < length:  # *price* has parsed it, and it waits behind no media
            lane = arrival
        elif length > self._max_small_body:
            lane = self._requests
        if lane is not arrival:
            with state.phase("queue"):
                lease = await self._enter(lane, length, request, client, deadline)
            request.release(then=lease)
        if self._slots is not None:
            with state.phase("queue"):
                request.slot = await self._slots.admit(0, client, deadline=deadline)
        request.admitted, state.body = True, request

    async def _enter(
        self, lane: Lane, length: int, it: AdmittedRequest, client: str, deadline: float
    ) -> Lease:
        """Admit what *it* needs; again, if a budget shrank so that it is alone now."""
        slots, until = int(it.estimate.total > 0), math.inf
        end = event_loop_clock()() + self._settings.max_wait
        while True:
            needed = self._needed(length, it.estimate) or 1  # an empty body
            try:
                return await lane.admit(
                    needed, client, slots=slots, deadline=deadline, until=until
                )
            except CostTooLarge:
                # A learned budget may have risen again since it refused this one.
                if not self._ceiling and self._needed(length, it.estimate) >= needed:
                    raise
                until = end

    def _count(self, request: AdmittedRequest, client: str, arrival: Lane) -> None:
        """Count a request of *client*, and refuse one beyond its limit."""
        if self._shares is None:
            return
        try:
            request.leave = self._shares.enter(client)
        except ClientLimitExceeded as refusal:
            arrival.counted(refusal)
            if self._shadow is None:
                raise

    async def _estimate(self, scope: Scope, body: bytes) -> MemoryEstimate:
        found = self._price(scope, body)
        del body  # *price* may drop the last reference to it
        return (await found if inspect.isawaitable(found) else found) or _NOTHING

    def _estimate_media(
        self, scope: Scope, body: bytes
    ) -> Awaitable[MemoryEstimate] | MemoryEstimate:
        """Return what the media of *body* need; of a large one, found in a thread."""
        estimate = self._estimator.estimate
        if len(body) <= _MAX_INLINE_BODY:
            return estimate(scope, body)
        # Boxed: a worker thread refers to what it was given until it runs again.
        box = Payload(body, nbytes=len(body))

        def run() -> MemoryEstimate:
            return estimate(scope, box.take())

        # Each event loop has its own: a limiter wakes no other, and is of one kind.
        limiter = self._estimating.get(None) or anyio.CapacityLimiter(1)
        self._estimating.set(limiter)
        return anyio.to_thread.run_sync(run, limiter=limiter)

    def _client(self, scope: Scope) -> str:
        return self._identity.digest(self._client_of(scope)).hex()

    async def _read(
        self, request: AdmittedRequest, lane: Lane, declared: int | None
    ) -> bytes:
        assert request.lease is not None
        reader = BodyReader(
            request.rest,
            lane.grow,
            request.lease,
            declared=declared,
            copies=_BODY_COPIES,
            max_body=self._max_body,
            slow_after=self._settings.slow_after,
        )
        with self._closable(reader):
            try:
                return await reader.read()
            except (BodyTooLarge, BodyTooSlow, GateFull):
                if self._shadow is None:
                    raise
            # The application reads the rest, as if nothing stood before it.
            lane.count_refusal()
            request.partial, request.rest.timeout = True, None
            return reader.take()

    @contextmanager
    def _closable(self, reading: BodyReader | Refusing) -> Iterator[None]:
        """Stop *reading* when this is closed, or now if it is."""
        if self._bodies.gate.closed:
            reading.stop()
        self._reading.add(reading)
        try:
            yield
        finally:
            self._reading.discard(reading)

    def _needed(self, length: int, estimate: MemoryEstimate) -> int:
        """Return the bytes to admit for a body of *length* and its media.

        Neither the body, which has arrived, nor a guess, an upper bound or what was
        learned from others is a reason to refuse a request for ever: then it counts as
        all there is, and is served alone. With the bytes of the other lanes it may
        certainly need a third more.

        Raises:
            MemoryTooLarge: It certainly needs more than that.
        """
        needed = _BODY_COPIES * length + self._correction.bytes(estimate)
        capacity = self._requests.gate.statistics().bytes
        if capacity is None or needed <= capacity:
            return needed
        most = max(capacity, self._ceiling) * 4 // 3
        if estimate.certain <= most:
            return capacity
        if self._shadow is not None:
            self._requests.count_refusal()
            return capacity
        what = f"The request needs {size_text(estimate.certain)} of memory"
        limit = f"and this server has {size_text(most)} for one"
        message = f"{what}, {limit}; send less, or media of fewer pixels"
        raise self._requests.counted(MemoryTooLarge(message))


class AdmittedRequest:
    """One request: its lease, and its body until the application asks for it.

    Args:
        receive: The server's.
        send: The server's.
        correction: Learns from what the request really needed.
        learn: Called before the bytes are released.
        heap: Notified once they are released.
        timeout: Seconds for the whole body.

    Attributes:
        admitted: The application may work on it.
        body: The body, until the application has it.
        estimate: Of its media.
        lease: The bytes that it holds until hand-off.
        leave: Called at its end.
        partial: The body is one that would be refused, or its beginning.
        slot: The slot that it holds until its end, where slots are limited.
        rest: What the server has yet to receive.
        until_end: The first bytes of the response release nothing.
    """

    __slots__ = (
        "_correction",
        "_heap",
        "_learn",
        "_send",
        "admitted",
        "body",
        "estimate",
        "lease",
        "leave",
        "partial",
        "rest",
        "slot",
        "until_end",
    )

    def __init__(
        self,
        receive: Receive,
        send: Send,
        correction: Correction,
        *,
        timeout: float,
        learn: Callable[[], object] = _NO_LESSON,
        heap: Heap,
    ) -> None:
        self.rest = RequestBody(receive, timeout=timeout)
        self._send = send
        self._correction, self._learn, self._heap = correction, learn, heap
        self.admitted = self.partial = self.until_end = False
        self.estimate = _NOTHING
        self.body: bytes | None = None
        self.lease: Lease | None = None
        self.leave: Callable[[], object] = object
        self.slot: Lease | None = None

    async def receive(self) -> Message:
        """The application's ``receive``: the whole body, then what the server has.

        Cancellation:
            No message is lost.
        """
        body, self.body = self.body, None
        if body is None:
            return await self.rest.receive()
        more = self.partial and not self.rest.complete
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(self, message: Message) -> None:
        """The application's ``send``.

        Cancellation:
            As for the server's ``send``.
        """
        first = message["type"] == "http.response.body" and message.get("body")
        if first and not self.until_end:
            self.release()
        await self._send(message)

    def hand_off(self, tensor_bytes: int | None) -> None:
        """Release the lease, and learn from the tensors if their size is known."""
        # A guess is not corrected: nothing in the next request is like this one.
        if self.lease is not None and tensor_bytes and not self.estimate.assumed:
            self.learn(tensor_bytes)
        self.release()

    def learn(self, tensor_bytes: int) -> None:
        """Correct later estimates by the bytes that the tensors really have."""
        self._correction.learn(self.estimate, tensor_bytes)

    def drop_body(self) -> None:
        """Free the body: the application gets an empty one.

        Without media, the request keeps what it was admitted with until hand-off.
        """
        self.body = b""

    def take_lease(self) -> Lease | None:
        """Return the lease, which the caller releases from now on."""
        lease, self.lease = self.lease, None
        return lease

    def release(self, *, then: Lease | None = None) -> None:
        """Release the bytes, and hold *then* in their place. Idempotent."""
        lease, self.lease = self.lease, then
        if lease is not None:
            try:
                self._learn()
            finally:
                lease.release()
                if lease.bytes >= LARGE:
                    self._heap.freed(lease.bytes)

    def end(self) -> None:
        """Release everything, and drop a body that was not read. Idempotent."""
        self.body = None
        try:
            if not (self.until_end and self.admitted):  # owned streams may have them
                self.release()
        finally:
            slot, self.slot = self.slot, None
            if slot is not None:
                slot.release()
            leave, self.leave = self.leave, object
            leave()
            if self.estimate.work >= LARGE:  # another may have had its lease
                self._heap.freed(self.estimate.work)


def _cancel_delay(settings: AdmissionSettings) -> float:
    if settings.cancel_delay is not None:
        return settings.cancel_delay
    named = settings.profile if isinstance(settings.profile, str) else "default"
    return _SECONDS_TO_LOOK.get(server_of(named), 0.0)


def _export(where: str | int) -> Any:
    from lifecycle_asgi.prometheus import export  # needs prometheus_client

    return export(where)


def _answer(scope: Scope, refusal: Refusal | Unauthorised) -> Response:
    return protocol_response(scope, describe(refusal))


def _has_body(scope: Scope) -> bool:
    if scope.get("method") not in _METHODS_WITH_BODY:  # a WebSocket has none
        return False
    return declared_length(scope) != 0
