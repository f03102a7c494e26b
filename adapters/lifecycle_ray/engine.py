"""The engine as a server sees it: replicas on a cluster, replaced when they die."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import anyio.to_thread
import ray

from lifecycle import EngineLost
from lifecycle_zmq import Backend, Health, Restarts, Supervisor

from ._placement import Placement, join_cluster, take_back_sigterm
from ._replica import Actor, Replica, Settings
from ._routes import Routes, conversation, weigh


class Box(Protocol):
    """What holds the tensors until the hand-off, such as a `lifecycle.Payload`."""

    def take(self) -> Mapping[str, Any]:
        """Give up the value, once."""
        ...


class RayEngine:
    """Engines on Ray actors, each with a client, and a new actor for one that died.

    Every replica is on its own: when one dies, everybody who waits for it is told, and
    nobody else. Each new actor is an incarnation of its own, placed by Ray wherever
    there is room; nothing that was meant for one reaches another. All methods belong to
    the event loop that entered it.

    Args:
        factory: Makes the backend, in the actor: something that Ray can pickle, or
            ``"package.module:name"`` for what is installed there.
        replicas: How many, at least one.
        placement: What each takes, and where.
        address: Of a Ray cluster, as for ``ray.init``. ``None`` uses the one that this
            process has joined already, or starts one on this machine and ends it again,
            for all who use it: for several engines call ``ray.init`` before them.
        local: Options of ``ray.init`` for that one.
        ready_timeout: Seconds that an actor may take until it serves, the wait for a
            place included.
        hold: Bytes held for one stream whose reader has no credit. Beyond them it ends
            as ``slow_client``.
        stall: Seconds that a reader may take nothing while something is held for it.
        busy_after: Seconds without a turn of an engine's loop until `health` says so.
        stalled_after: Seconds that one step of a backend may take; then everybody there
            is told ``stalled`` and the actor is replaced.
        silent_after: Seconds that an actor may answer nothing at all, ``silent``; more
            than one, as that is how long an idle one takes.
        owner_timeout: Seconds after which an actor that nobody pulls from ends all its
            streams.
        restarts: Makes what says when the next actor of a replica may start; ``None``:
            as for `lifecycle_zmq.ZmqEngine`.
        weigh: How many tokens a request may take, to choose the replica with the least
            to do.
        conversation: What a request belongs to: what belongs together goes to one
            replica; ``None`` is nothing. By default its ``session`` of that ``share``,
            as the bundled engine has them.
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
            raise ValueError(f"{replicas} replicas serve nobody; give at least 1")
        self._address = address
        self._local = dict(local or {})
        self._replicas = [
            Replica(Supervisor(partial(Actor, settings), restarts()))
            for settings in (
                Settings(
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
        self._routes = Routes(self._replicas, weigh, conversation)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Join the cluster and begin to make the actors; `wait_ready` tells the rest.

        Raises:
            ConnectionError: There is no cluster at that address.
            ValueError: It is one for Ray's client, ``ray://``, which is no member.
        """
        async with AsyncExitStack() as stack:
            join = partial(join_cluster, self._address, self._local)
            if await anyio.to_thread.run_sync(join):
                stack.push_async_callback(_leave_cluster)
                take_back_sigterm()
            for replica in self._replicas:
                await stack.enter_async_context(replica)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Kill the actors, and leave the cluster if this joined it.

        Cancellation: shielded; to leave takes seconds, in which the loop goes on.
        """
        self.close()
        await self._stack.__aexit__(None, None, None)  # noqa: ASYNC102 - cut above

    def close(self) -> None:
        """Give all replicas up now; everybody who waits is told ``closed``."""
        for replica in self._replicas:
            replica.close()

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        return any(it.ready for it in self._replicas)

    @property
    def health(self) -> Health:
        """How the replica that does best is doing; see `ZmqEngine.health`."""
        seen = [it.health for it in self._replicas]
        return next((it for it in _BEST_FIRST if it in seen), seen[0])

    @property
    def pid(self) -> int | None:
        """Always ``None``: the processes may be on other machines; see `places`."""
        return None

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """``pid`` and ``node`` of each replica's actor; empty where none serves."""
        return [it.place for it in self._replicas]

    @property
    def incarnation(self) -> int:
        """How many actors were made so far."""
        return sum(it.incarnation for it in self._replicas)

    @property
    def streams(self) -> int:
        """How many streams were started and are not done."""
        return sum(it.streams for it in self._replicas)

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Live tokens and bytes of each replica, as requests are given to them."""
        return self._routes.loads()

    async def wait_ready(self, replicas: int = 1) -> None:
        """Wait until so many replicas take requests.

        Raises:
            EngineLost: Too many of them ended before they ever served, or are broken.
            ValueError: There are not so many.

        Cancellation: nothing changes.
        """
        there = len(self._replicas)
        if not 1 <= replicas <= there:
            raise ValueError(f"{replicas} replicas of {there}; wait for 1 to {there}")
        self._replicas[0].check()  # where it is not raised in a group
        # Without a wait, so that whoever has no time for one is told, too.
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
        self, key: str, request: Mapping[str, Any], tensors: Box | None = None
    ) -> AsyncIterator[Any]:
        """Hand a request to the replica with the least to do and return its items.

        The tensors are put into the object store, and dropped before this coroutine
        first waits, whatever becomes of the request.

        Args:
            key: What the stream is called until `end`; not in use.
            request: Plain values, at most 1 MiB on the wire.
            tensors: Box of name to C-contiguous buffer or tensor, at most seven.

        Raises:
            EngineLost: No replica serves, or it died; the request may have run.
            RequestRejected: The engine, or a limit of the wire, refused it.
            ValueError: The key is in use, empty or too long.

        Cancellation: the engine may run the request; `end` of its key stops it.
        """
        replica = self._routes.of(key)
        if replica is None:
            nbytes = getattr(tensors, "nbytes", None) or 0
            replica = self._routes.place(key, request, nbytes)
        starting = replica.start(key, request, tensors)
        del request, tensors
        return await starting

    def cancel(self, key: str) -> None:
        """Ask the engine to stop a stream at its next step; unknown keys are fine."""
        replica = self._routes.of(key)
        if replica is not None:
            replica.cancel(key)

    async def end(self, key: str) -> None:
        """Make the engine forget a stream; return when it has released everything.

        Cancellation: END is on its way all the same; call again to wait for the rest.
        """
        replica = self._routes.of(key)
        if replica is not None:
            await replica.end(key)

    async def status(self) -> dict[str, Any]:
        """Return the counters of the replica; of several, all of them and their sums.

        Raises:
            EngineLost: No replica serves.

        Cancellation: the answers are dropped when they come.
        """
        self._replicas[0].check()  # where it is not raised in a group
        lost: list[EngineLost] = []
        told: dict[str, dict[str, Any]] = {
            str(number): {} for number in range(len(self._replicas))
        }

        async def ask(name: str, replica: Replica) -> None:
            try:
                told[name] = await replica.status()
            except EngineLost as error:
                lost.append(error)

        async with anyio.create_task_group() as tasks:
            for name, replica in zip(told, self._replicas, strict=True):
                tasks.start_soon(ask, name, replica)
        if len(lost) == len(told):
            raise lost[0]
        if len(told) == 1:
            return told["0"]
        return _sums(list(told.values())) | {"replicas": told}

    def reset(self) -> None:
        """Forget all deaths: a replica that is broken, or backs off, starts now."""
        for replica in self._replicas:
            replica.reset()


async def _leave_cluster() -> None:
    # It ends one process after another, and waits for each.
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(ray.shutdown)


_BEST_FIRST: tuple[Health, ...] = (
    "serving",
    "busy",
    "starting",
    "restarting",
    "stopped",
    "stalled",
    "broken",
    "closed",
)


def _sums(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the numbers of all, those within mappings, too."""
    sums: dict[str, Any] = {}
    for name in {name: None for it in told for name in it}:
        values = [it[name] for it in told if name in it]
        if all(isinstance(it, dict) for it in values):
            sums[name] = _sums(values)
        elif all(isinstance(it, int | float) for it in values):
            sums[name] = sum(values)
    return sums
