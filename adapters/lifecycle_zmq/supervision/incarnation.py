"""One engine process with its client, from the spawn until it is reaped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio

from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.memory.arena import Arena
from lifecycle_zmq.process.engine_process import EngineProcess, open_pidfd
from lifecycle_zmq.process.watch import Limits
from lifecycle_zmq.supervision.life import Life
from lifecycle_zmq.supervision.liveness import LiveHealth, Liveness
from lifecycle_zmq.transport import endpoints
from lifecycle_zmq.transport.pair import Pair
from lifecycle_zmq.transport.rendezvous import Rendezvous

_VERDICTS: tuple[LiveHealth, ...] = ("stopped", "stalled")


@dataclass(frozen=True, slots=True)
class Settings:
    """What every incarnation of one engine is started with; see `ZmqEngine`."""

    argv: Sequence[str]
    env: Mapping[str, str] | None
    pass_fds: Sequence[int]
    place: Callable[[], Pair | Rendezvous]
    ready_timeout: float
    limits: Limits
    arena: Callable[[], Arena | None]


class Incarnation(Life):
    """Runs one process to its end.

    Args:
        settings: How to start it.
        number: As for `Life`, like all that follows.
        retry_after: See there.
        changed: See there.

    Attributes:
        process: The process, once spawned.
        liveness: How the process is doing, once spawned.
        output: The end of what it wrote.
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
        self.process: EngineProcess | None = None
        self.liveness: Liveness | None = None
        self.output = ""

    @property
    def why(self) -> str:
        """Why it takes no requests, in one word, from the moment that it does not."""
        lost = self.client.lost if self.client is not None else None
        return "stopped" if lost is None and self.stopped else super().why

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, as far as the last looks have shown."""
        return self.liveness is not None and self.liveness.watch.stopped

    @property
    def takes(self) -> bool:
        """Whether requests are taken, as far as the last looks have shown."""
        return super().takes and not self.stopped

    @property
    def health(self) -> LiveHealth | None:
        """How its process is doing, as of now; ``None`` if it does not serve."""
        client, liveness = self.client, self.liveness
        if client is None or liveness is None:
            return None
        if client.ready:
            return liveness.word()
        # From the verdict until the process is gone.
        return next((it for it in _VERDICTS if it == client.lost), None)

    async def run(self) -> None:
        """Spawn, serve, reap; an error of any of it is a reason, never raised.

        Cancellation: the process is killed and reaped, its waiters are told.
        """
        try:
            await self._run()
        except Exception as error:  # noqa: BLE001
            self.reason = "spawn_failed" if self.process is None else "link_fault"
            self.output += f"{type(error).__name__}: {error}"

    async def _run(self) -> None:
        place = self._settings.place()
        try:
            async with EngineClient(
                place.connect,
                incarnation=self._number,
                retry_after=self._retry_after,
                arena=self._settings.arena(),
            ) as client:
                place.hide()
                self.client = client
                try:
                    await self._run_process(place, client)
                finally:
                    self.client = None
        finally:
            place.close()

    async def _run_process(
        self, place: Pair | Rendezvous, client: EngineClient
    ) -> None:
        with Liveness(self._settings.limits) as liveness:
            process = self._spawn(place, liveness)
            self.process, self.liveness = process, liveness
            place.close()  # the engine's copy is the only one that may hold it open
            liveness.process = process
            try:
                await self._watch(process, client, liveness)
            finally:
                client.lose("closed")
                await process.close()  # noqa: ASYNC102 - shielded and bounded in there
                self.output = process.output
                self._revoke(process)

    def _revoke(self, process: EngineProcess) -> None:
        # Not before: it may have been reading until it was reaped.
        arena = self._settings.arena()
        if arena is not None and process.reaped:
            arena.take_back_all()

    def _spawn(self, place: Pair | Rendezvous, liveness: Liveness) -> EngineProcess:
        inherited = {**place.inherited, **liveness.inherited}
        arena = self._settings.arena()
        if arena is not None and arena.descriptor is not None:
            inherited["arena"] = arena.descriptor
        ours = open_pidfd(os.getpid())
        if ours is not None:
            inherited["parent"] = ours
        endpoint = endpoints.join(place.address, inherited)
        tail = ["--endpoint", endpoint, "--incarnation", str(self._number)]
        try:
            return EngineProcess(
                [*self._settings.argv, *tail],
                env=self._settings.env,
                pass_fds=[*self._settings.pass_fds, *inherited.values()],
            )
        finally:
            if ours is not None:
                os.close(ours)

    async def _watch(
        self, process: EngineProcess, client: EngineClient, liveness: Liveness
    ) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.drain)
            tasks.start_soon(self._bring_up, client, liveness)
            tasks.start_soon(self._kill_when_lost, process, client)
            tasks.start_soon(liveness.look_after, client)
            await process.wait()
            # What it said before it died was said: a finish that is there counts.
            client.drain()
            process.reap()
            client.lose(*process.reason_of(process.code or 0))
            self.reason = client.lost or "exit"
            tasks.cancel_scope.cancel()

    async def _bring_up(self, client: EngineClient, liveness: Liveness) -> None:
        with anyio.move_on_after(self._settings.ready_timeout) as waiting:
            await self._await_ready(client)
        if waiting.cancelled_caught:
            # Our own loop may have stood still, and READY be there unread.
            client.drain()
            if not client.ready:
                client.lose("start_timeout")
            await self._await_ready(client)  # settled by now
        if client.ready:
            await liveness.tell_death(client)

    async def _kill_when_lost(
        self, process: EngineProcess, client: EngineClient
    ) -> None:
        # An engine that broke the protocol, or hung up, is not to be reasoned with.
        await client.wait_lost()
        self._changed()
        process.kill()
