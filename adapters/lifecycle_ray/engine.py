"""`RayEngine`: replicas on a Ray cluster, replaced when they die."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

import anyio
import anyio.to_thread

from lifecycle import EngineLost
from lifecycle_ray.placement import Placement, join_cluster, restore_sigterm
from lifecycle_ray.replica import ActorInstance, ActorSettings, Replica
from lifecycle_ray.router import Router, conversation, weigh
from lifecycle_zmq import Backend, Health, Restarts, Supervisor
from lifecycle_zmq.shared_memory.tensors import TensorPayload


class RayEngine:
    """Engines on Ray actors, each with a client; an actor that dies is replaced.

    Replicas are independent: when one dies, its requests fail and no others do. Each
    new actor is a new incarnation, which Ray places on any node with free resources; no
    message for one reaches another. All methods belong to the event loop that entered
    the engine.

    Args:
        factory: Creates the backend in the actor: a function that Ray can pickle, or
            ``"package.module:name"`` of an installed one.
        replicas: Number of replicas, at least one.
        placement: Resources of each replica, and where it may run.
        address: Address of a Ray cluster, or ``"auto"`` for the one that ``ray start``
            or the environment variable ``RAY_ADDRESS`` names on this machine. ``None``
            uses the cluster that this process has joined, or starts a private one and
            stops it at the end. For several engines in one process, call ``ray.init``
            first.
        local: Options of ``ray.init`` for a private cluster.
        ready_timeout: Seconds until an actor has to be ready, including the wait for
            resources.
        hold: Bytes buffered for one stream without credit. Beyond them it ends as
            ``slow_client``.
        stall: Seconds without progress of a reader for which items are buffered.
        busy_after: Seconds without a turn of an engine's loop until `health` says so.
        stalled_after: Seconds that one step of a backend may take; then its requests
            fail as ``stalled`` and the actor is replaced.
        silent_after: Seconds without an answer after which an actor is lost as
            ``silent``; more than one, which is the interval of an idle actor.
        owner_timeout: Seconds without a pull after which an actor ends all its streams.
        restarts: Creates the restart policy of a replica; by default that of
            `lifecycle_zmq.ZmqEngine`.
        weigh: Returns how many tokens a request may take, to choose the replica with
            the least load.
        conversation: Returns the conversation of a request, which stays with one
            replica, or ``None``. By default its ``tenant`` and ``session``, as in the
            bundled engine.
    """

    def __init__(
        self,
        factory: Callable[[], Backend] | str,
        *,
        replicas: int = 1,
        placement: Placement | None = None,
        address: str | None = None,
        local: Mapping[str, Any] | None = None,
        ready_timeout: float = 300.0,
        hold: int = 128 * 2**10,
        stall: float = 30.0,
        busy_after: float = 2.0,
        stalled_after: float = 30.0,
        silent_after: float = 15.0,
        owner_timeout: float = 10.0,
        restarts: Callable[[], Restarts] = Restarts,
        weigh: Callable[[Mapping[str, Any]], int] = weigh,
        conversation: Callable[[Mapping[str, Any]], Hashable | None] = conversation,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"{replicas} replicas are too few; pass at least 1")
        self._address = address
        self._local = dict(local or {})
        self._replicas = [
            Replica(Supervisor(partial(ActorInstance, settings), restarts()))
            for settings in (
                ActorSettings(
                    factory=factory,
                    replica=number,
                    placement=placement or Placement(),
                    hold=hold,
                    stall=stall,
                    ready_timeout=ready_timeout,
                    busy_after=busy_after,
                    stalled_after=stalled_after,
                    silent_after=silent_after,
                    owner_timeout=owner_timeout,
                )
                for number in range(replicas)
            )
        ]
        self._router = Router(self._replicas, weigh, conversation)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Join the cluster and start to create the actors; see `wait_ready`.

        Raises:
            ConnectionError: No cluster answers at that address.
            RuntimeError: The engine was entered or closed before.
            ValueError: It is the address of a Ray client server, ``ray://``.
        """
        for replica in self._replicas:  # before it takes seconds to join
            replica.check_new()
        async with AsyncExitStack() as stack:
            joined: list[Callable[[], None]] = []
            given_up = threading.Event()

            def join() -> None:
                leave = join_cluster(self._address, self._local)
                joined.extend([leave] if leave is not None else [])
                if given_up.is_set():  # a native cancellation got through the wait
                    _leave(joined)

            stack.push_async_callback(_leave_cluster, joined, given_up)
            await anyio.to_thread.run_sync(join)
            if joined:
                restore_sigterm()
            for replica in self._replicas:
                await stack.enter_async_context(replica)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the actors, and leave the cluster if this joined it.

        Cancellation: shielded; leaving takes seconds without blocking the event loop.
        """
        self.close()
        await self._stack.__aexit__(None, None, None)  # noqa: ASYNC102 - bounded by close

    def close(self) -> None:
        """Stop all replicas now; their requests fail as ``closed``."""
        for replica in self._replicas:
            replica.close()

    @property
    def ready(self) -> bool:
        """Whether requests are accepted now."""
        return any(it.ready for it in self._replicas)

    @property
    def health(self) -> Health:
        """Health of the healthiest replica; see `ZmqEngine.health`."""
        seen = [it.health for it in self._replicas]
        return next((it for it in _HEALTHIEST_FIRST if it in seen), seen[0])

    @property
    def pid(self) -> int | None:
        """Always ``None``: the processes may be on other machines; see `places`."""
        return None

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """``pid`` and ``node`` of each replica's actor; empty without one."""
        return [it.place for it in self._replicas]

    @property
    def incarnation(self) -> int:
        """Number of actors created so far."""
        return sum(it.incarnation for it in self._replicas)

    @property
    def streams(self) -> int:
        """Number of unfinished streams."""
        return sum(it.streams for it in self._replicas)

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Live tokens and bytes of each replica, by which requests are routed."""
        return self._router.loads()

    async def wait_ready(self, replicas: int = 1) -> None:
        """Wait until so many replicas accept requests.

        Raises:
            EngineLost: Too many of them ended before they were ready, or are broken.
            ValueError: There are fewer replicas.

        Cancellation: nothing changes.
        """
        there = len(self._replicas)
        if not 1 <= replicas <= there:
            raise ValueError(f"{replicas} replicas of {there}; wait for 1 to {there}")
        self._replicas[0].check()  # outside a task group, whose errors are groups
        # Checked before any wait, so that a caller without time gets the error, too.
        lost = [it for it in (replica.lost() for replica in self._replicas) if it]
        if len(lost) > there - replicas:
            raise lost[0]
        ready = 0
        failures: list[EngineLost] = []
        async with anyio.create_task_group() as tasks:

            async def wait(replica: Replica) -> None:
                nonlocal ready
                try:
                    await replica.wait_ready()
                except EngineLost as error:
                    failures.append(error)
                else:
                    ready += 1
                if ready == replicas or len(failures) > there - replicas:
                    tasks.cancel_scope.cancel()

            for replica in self._replicas:
                tasks.start_soon(wait, replica)
        if ready < replicas:
            raise failures[0]

    async def start(
        self, key: str, request: Mapping[str, Any], tensors: TensorPayload | None = None
    ) -> AsyncIterator[Any]:
        """Send a request to the replica with the least load and return its items.

        The tensors are put into the object store, and dropped before this coroutine
        first waits, in any case.

        Args:
            key: Name of the stream until `end`; not in use.
            request: Plain values, at most 1 MiB on the wire.
            tensors: Container of at most seven C-contiguous buffers or tensors, by
                name.

        Raises:
            EngineLost: No replica serves, or it died; the request may have run.
            RequestRejected: The engine, or a limit of the wire, refused it.
            ValueError: The key is in use, empty or too long.

        Cancellation: the engine may run the request; `end` of its key stops it.
        """
        replica = self._router.replica_of(key)
        if replica is None:
            nbytes = getattr(tensors, "nbytes", None) or 0
            replica = self._router.place(key, request, nbytes)
        starting = replica.start(key, request, tensors)
        del request, tensors
        return await starting

    def cancel(self, key: str) -> None:
        """Ask the engine to stop a stream at its next step; unknown keys are fine."""
        replica = self._router.replica_of(key)
        if replica is not None:
            replica.cancel(key)

    async def end(self, key: str) -> None:
        """Make the engine forget a stream; return when it has released everything.

        Cancellation: END is sent in any case; call again to wait for its confirmation.
        """
        replica = self._router.replica_of(key)
        if replica is not None:
            await replica.end(key)

    async def status(self) -> dict[str, Any]:
        """Return the counters of the replica; for several, of each and their sums.

        Raises:
            EngineLost: No replica serves.

        Cancellation: pending answers are dropped.
        """
        self._replicas[0].check()  # outside a task group, whose errors are groups
        lost: list[EngineLost] = []
        found: dict[str, dict[str, Any]] = {
            str(number): {} for number in range(len(self._replicas))
        }

        async def ask(name: str, replica: Replica) -> None:
            try:
                found[name] = await replica.status()
            except EngineLost as error:
                lost.append(error)

        async with anyio.create_task_group() as tasks:
            for name, replica in zip(found, self._replicas, strict=True):
                tasks.start_soon(ask, name, replica)
        if len(lost) == len(found):
            raise lost[0]
        if len(found) == 1:
            return found["0"]
        return _sum_counters(list(found.values())) | {"replicas": found}

    def reset(self) -> None:
        """Forget all crashes: a broken replica, or one in backoff, starts now."""
        for replica in self._replicas:
            replica.reset()


async def _leave_cluster(
    joined: list[Callable[[], None]], given_up: threading.Event
) -> None:
    given_up.set()
    if joined:
        # It terminates one process after another, and waits for each.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_leave, joined)


def _leave(joined: list[Callable[[], None]]) -> None:
    """Leave the cluster, unless another thread does."""
    try:
        leave = joined.pop()
    except IndexError:
        return
    leave()


_HEALTHIEST_FIRST: tuple[Health, ...] = (
    "serving",
    "busy",
    "starting",
    "restarting",
    "stopped",
    "stalled",
    "broken",
    "closed",
)


def _sum_counters(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up all numbers, also those within mappings."""
    sums: dict[str, Any] = {}
    for name in {name: None for it in found for name in it}:
        values = [it[name] for it in found if name in it]
        if all(isinstance(it, dict) for it in values):
            sums[name] = _sum_counters(values)
        elif all(isinstance(it, int | float) for it in values):
            sums[name] = sum(values)
    return sums
