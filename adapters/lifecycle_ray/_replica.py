"""One actor with its client, from its creation until it is killed; and the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import anyio.to_thread
import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from lifecycle import EngineLost
from lifecycle_zmq import EngineClient, SupervisedEngine
from lifecycle_zmq.supervision.life import Life

from ._actor import EngineActor, Factory, Served
from ._link import RayLink
from ._placement import Placement
from ._results import result

_CONCURRENCY = {"pull": 1, "control": 4}
_LOOK_SECONDS = 0.25
_LONGEST_GAP = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every actor of one replica is made with; see `RayEngine`."""

    factory: Factory | str
    replica: int
    placement: Placement
    hold: int
    stall: float
    ready_timeout: float
    busy_after: float
    stalled_after: float
    silent_after: float
    owner_timeout: float


class Replica(SupervisedEngine["Actor"]):
    """One of the replicas of a `RayEngine`: an actor, and its replacement."""

    def _last_words(self) -> str:
        current = self._supervisor.current
        return f"; {current.output}" if current is not None and current.output else ""

    @property
    def place(self) -> Mapping[str, Any]:
        """Process and node of the actor that is there; empty without one."""
        current = self._supervisor.current
        return current.place if current is not None and self.ready else {}

    def check(self) -> None:
        """Raise `RuntimeError` before it was entered, and in any other thread."""
        self._supervisor.check_entered()
        self._supervisor.check_thread()

    def lost(self) -> EngineLost | None:
        """What to raise while no actor is being made, and none is there."""
        it = self._supervisor
        return it.loss() if it.closing or it.broken else None

    def holds(self, key: str) -> bool:
        """Whether a stream of that key was started here and is not done."""
        return self._client is not None and key in self._client


class Actor(Life):
    """One actor with its client: an incarnation of a replica.

    An actor is never restarted as what it was. Ray would, but it tells of the death
    only when that is done; a new one is told in milliseconds, and nothing that was
    meant for one can reach the other. Where it runs is Ray's to choose, again.
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        retry_after: float,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(number, retry_after, changed)
        self._settings = settings
        self._actor: Any = None
        self._turns = 0
        # Seconds in which the actor said nothing, and in which its loop made no turn.
        self._silent = self._still = 0.0
        self.place: Mapping[str, Any] = {}
        self.output = ""

    @property
    def health(self) -> Literal["serving", "busy", "stalled"] | None:
        """How it is doing, as far as the last pull has shown."""
        if self.client is None:
            return None
        if not self.client.ready:
            return "stalled" if self.client.lost == "stalled" else None
        return "busy" if self._still > self._settings.busy_after else "serving"

    async def run(self) -> None:
        """Make the actor, serve, kill it; an error of any of it is a reason.

        Cancellation: the actor is killed, its waiters are told.
        """
        try:
            await self._run()
        except Exception as error:  # noqa: BLE001 - told by whoever waits for it
            self.reason = told(error, "start_failed")
            self.output = str(error)[-2000:]
        finally:
            self._kill()

    async def _run(self) -> None:
        await anyio.to_thread.run_sync(self._make)
        with anyio.move_on_after(self._settings.ready_timeout) as waiting:
            self.place = await result(self._actor.hello.remote())
        if waiting.cancelled_caught:
            self.reason = "start_timeout"
            return
        async with EngineClient(
            lambda handle: RayLink(
                self._actor, handle, served=self._look, failed=self._fail
            ),
            incarnation=self._number,
            retry_after=self._retry_after,
        ) as client:
            self.client = client
            try:
                await self._serve(client)
            finally:
                client.lose("closed")
                self.reason = client.lost or "closed"
                self.client = None

    async def _serve(self, client: EngineClient) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._await_ready, client)
            tasks.start_soon(self._watch, client)
            await client.wait_lost()
            tasks.cancel_scope.cancel()
        self._changed()

    async def _watch(self, client: EngineClient) -> None:
        limits, seen = self._settings, anyio.current_time()
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            now = anyio.current_time()
            # A longer gap is our own loop's, which has not read yet what came in it.
            gap, seen = min(now - seen, _LONGEST_GAP), now
            self._silent += gap
            self._still += gap
            if self._silent > limits.silent_after:
                client.lose("silent")
            elif self._still > limits.stalled_after:
                client.lose("stalled")

    def _look(self, served: Served) -> None:
        self._silent = 0.0
        if served.turns != self._turns or not served.working:
            self._turns = served.turns
            self._still = 0.0

    def _fail(self, error: BaseException) -> None:
        if self.client is not None:
            self.client.lose(told(error, "ray_failed"))

    def _make(self) -> None:
        it = self._settings
        remote: Any = ray.remote
        make = remote(concurrency_groups=_CONCURRENCY)(EngineActor)
        self._actor = make.options(
            max_restarts=0,
            max_task_retries=0,
            **it.placement.options(it.replica),
        ).remote(
            it.factory,
            incarnation=self._number,
            hold=it.hold,
            stall=it.stall,
            owner_timeout=it.owner_timeout,
        )

    def _kill(self) -> None:
        # Whatever may run there for us ends with it, known to us or not.
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            ray.kill(actor)


def told(error: BaseException, otherwise: str) -> str:
    """Return what became of an actor, in one word."""
    if isinstance(error, OutOfMemoryError):
        return "out_of_memory"
    if isinstance(error, ActorUnavailableError):
        return "unreachable"
    if isinstance(error, RayActorError):
        # Ray has no other way to say it.
        return "node_died" if "its node has died" in str(error) else "died"
    return otherwise
