"""A small world around the real core, and the laws that hold in it.

Several clients of one server: each opens a session, boxes a payload, is
admitted, starts a stream on a scripted engine and reads it. Everything about
them is drawn from a seed. Faults strike at given steps: a client is cancelled
(by scope, natively) or leaves, a session is ended from outside, the engine dies
and comes back, the gate is closed or resized, the registry drains.
"""

from __future__ import annotations

import asyncio
import math
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from link import Gap, LossyLink

from lifecycle import (
    EngineLost,
    Gate,
    GateClosed,
    GateStatistics,
    Lease,
    Payload,
    Refused,
    Session,
    SessionEnded,
    SessionExists,
    SessionRegistry,
    StartTimeout,
    StreamTimeout,
    managed,
)
from lifecycle.events import (
    DrainStarted,
    EndFailed,
    Event,
    SessionClosed,
    SessionOpened,
    StartSettled,
    StreamEnded,
)
from lifecycle.testing import Script, ScriptedEngine, Simulated, simulate, simulate_trio

Fault = tuple[str, int]

# No world lives longer than this, in virtual seconds.
BOUND = 120.0

_EXPECTED = {
    Refused: "refused",
    EngineLost: "engine_lost",
    StartTimeout: "deadline",
    StreamTimeout: "deadline",
}


class Blob:
    """A payload that can be watched."""

    __slots__ = ("__weakref__",)


class ScriptError(Exception):
    """What a script makes the engine raise."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """What one client wants."""

    number: int
    id: str
    arrives: float
    cost: int
    actual: int | None
    patience: float | None
    prepare: float
    style: str
    priority: int
    script: Script
    start_timeout: float
    idle: float | None
    reads: int
    children: int
    guarded: bool


@dataclass(slots=True, eq=False)
class Client:
    """What became of one client so far."""

    plan: Plan
    scope: anyio.CancelScope
    task: Any = None
    session: Session | None = None
    lease: Lease | None = None
    # Of each child: most have one, a fan-out has two.
    opening: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    sources: dict[int, Any] = field(default_factory=dict)
    struck: set[str] = field(default_factory=set)


_ODD = ("fail", "hang", "refuse", "mute", "slow_end", "bad_end", "deaf")


def _draw_plan(rng: random.Random, number: int, styles: tuple[str, ...]) -> Plan:
    """Draw one client. Most are ordinary, so that the odd ones meet others."""
    items = rng.choice((1, 2, 2, 3))
    odd = rng.choice(_ODD) if rng.random() < 0.35 else ""
    ends = {"slow_end": 0.05, "deaf": math.inf}
    script = Script(
        items=tuple(range(items)),
        start_delay=math.inf if odd == "mute" else rng.choice((0, 0, 0.002, 0.01)),
        item_delay=rng.choice((0, 0, 0.001, 0.01)),
        refuse=ScriptError() if odd == "refuse" else None,
        fail_at=rng.randrange(items) if odd == "fail" else None,
        error=ScriptError(),
        hang_at=rng.randrange(items) if odd == "hang" else None,
        end_delay=ends.get(odd, 0),
        end_error=ScriptError() if odd == "bad_end" else None,
    )
    cost = rng.choice((1, 3, 3, 5, 5, 9, 9, 13))
    return Plan(
        number=number,
        id=f"r{rng.randrange(2)}" if rng.random() < 0.3 else f"c{number}",
        arrives=rng.choice((0, 0, 0, 0.001, 0.02)),
        cost=cost,
        actual=rng.choice((1, cost + 4)) if rng.random() < 0.2 else None,
        patience=rng.choice((0.003, 0.02)) if rng.random() < 0.3 else None,
        prepare=rng.choice((0, 0, 0.001, 0.01)),
        style=rng.choice(styles),
        priority=rng.choice((0, 0, 1)),
        script=script,
        start_timeout=rng.choice((0.03, 30.0 if odd == "mute" else 0.5)),
        idle=0.05 if odd == "hang" else None,
        reads=rng.choice((99, 99, 99, 0, 1)),
        children=2 if rng.random() < 0.15 else 1,
        guarded=rng.random() < 0.5,
    )


STYLES = ("session", "session", "session", "two_phase", "generator", "plain")


class World:
    """One server and its clients.

    Args:
        seed: Decides about everything but the schedule.
        faults: What strikes at which step; ``None`` draws up to two.
        styles: Ways in which clients may use the library.
    """

    def __init__(
        self,
        seed: int,
        faults: list[tuple[int, Fault]] | None = None,
        styles: tuple[str, ...] = STYLES,
    ) -> None:
        rng = random.Random(seed)
        # A world of one style can be held to stricter laws.
        mixed = rng.random() < 0.4
        styles = styles if mixed else styles[:1]
        count = rng.choice((2, 3, 3, 4))
        self.plans = [_draw_plan(rng, i, styles) for i in range(count)]
        self.slots = rng.choice((1, 2, 2))
        self.bytes = rng.choice((9, 10, 12))
        self.smallest = self.bytes
        self.max_waiting = rng.choice((None, None, None, 1))
        self.order = rng.choice(("fifo", "fifo", "fifo", "lanes", "fair"))
        # In every other world of lanes the newest goes first once the queue stands.
        self.stands = self.order == "lanes" and seed % 2 == 1
        self.enforce = rng.random() < 0.95
        self.remote = rng.random() < 0.3
        self.rng = rng
        self.exact = all(plan.style == "session" for plan in self.plans)
        possible = self.possible_faults()
        drawn = [
            (rng.randrange(1, 90), rng.choice(possible))
            for _ in range(rng.choice((0, 1, 1, 2)))
        ]
        self.faults = drawn if faults is None else faults
        self.clients: list[Client] = []
        self.by_key: dict[str, Client] = {}
        self.asked: list[Client] = []
        self.payloads: list[weakref.ref[Blob]] = []
        self.outcomes: dict[int, str] = {}
        self.settled: dict[int, list[str]] = {}
        self.ended: set[tuple[int, int]] = set()
        self.asks = self.granted = self.ends_failed = self.streams = 0
        self.disturbed = self.closed = self.drained = False
        self.broken_law: str | None = None
        self.step = 0
        self.gate: Gate | None = None

    def possible_faults(self) -> list[Fault]:
        """Each fault that can strike this world."""
        kinds = ("cancel", "native", "gone", "stop")
        return [
            *((kind, plan.number) for plan in self.plans for kind in kinds),
            *(("die", 0), ("close", 0), ("drain", 0), ("drain", 1)),
            *(("resize", 0), ("resize", 1), ("resize", 3), ("shrink", 4)),
            ("quit", 0),
        ]

    # The program.

    async def main(self) -> None:
        """Run the whole story, and check the laws at its end."""
        self.broken, self.draining = anyio.Event(), anyio.Event()
        self.drain_over = anyio.Event()
        self.engine = ScriptedEngine(lambda key: self.by_key[key].plan.script)
        self.sessions = SessionRegistry(end_timeout=0.5, observer=self._observe)
        self.gate = gate = Gate(
            slots=self.slots,
            bytes=self.bytes,
            max_waiting=self.max_waiting,
            max_wait=0.01 if self.stands else None,
            order="adaptive" if self.stands else self.order.replace("lanes", "fifo"),
            reserve=0.3 if self.order == "fair" else 0.0,
            enforce=self.enforce,
        )
        self.quit = anyio.CancelScope()
        async with anyio.create_task_group() as network:
            self.wire: Any = self.engine
            if self.remote:
                chances = {"lose": 0.05, "double": 0.2}
                self.wire = LossyLink(self.engine, self.rng, network, **chances)
            with self.quit:
                async with self.sessions:
                    await self._serve(gate)
                    assert not self.sessions.live(), "sessions without an owner"
            while self.remote and self.wire.busy:
                await anyio.sleep(0.01)
            network.cancel_scope.cancel()
        self.check()
        self._check_end(gate)

    async def _serve(self, gate: Gate) -> None:
        self._decorate(gate)
        kinds = {fault[0] for _, fault in self.faults}
        async with anyio.create_task_group() as keepers:
            if kinds & {"die", "resize", "shrink"}:
                keepers.start_soon(self._mend, gate)
            if "drain" in kinds:
                keepers.start_soon(self._drain)
            async with anyio.create_task_group() as clients:
                for plan in self.plans:
                    client = Client(plan, anyio.CancelScope())
                    self.clients.append(client)
                    clients.start_soon(self._live, client)
            if self.draining.is_set():
                await self.drain_over.wait()
            keepers.cancel_scope.cancel()

    async def _mend(self, gate: Gate) -> None:
        """Repair what a fault broke, a while later."""
        while True:
            await self.broken.wait()
            self.broken = anyio.Event()
            await anyio.sleep(0.02)
            self.engine.restart()
            gate.resize(slots=self.slots, bytes=self.bytes)

    async def _drain(self) -> None:
        await self.draining.wait()
        await self.sessions.drain(self.drain_deadline)
        now = self.sessions.statistics()
        assert not now.live + now.closing, "not quiet after a drain"
        self.drain_over.set()

    async def _live(self, client: Client) -> None:
        self._identify(client)
        plan = client.plan
        try:
            with client.scope:
                if plan.arrives:
                    await anyio.sleep(plan.arrives)
                if plan.style == "session":
                    await self._by_session(client)
                else:
                    await self._by_stream(client)
        except (*_EXPECTED, SessionEnded, SessionExists, ScriptError, Gap):
            pass
        except asyncio.CancelledError:
            if "native" not in client.struck:
                raise

    def _identify(self, client: Client) -> None:
        try:
            client.task = asyncio.current_task()
        except RuntimeError:
            client.task = None  # trio, which has no native cancellation

    async def _by_session(self, client: Client) -> None:
        try:
            session = self.sessions.open(client.plan.id)
        except GateClosed:
            assert self.sessions.draining
            raise
        self._adopt(client, session)
        left: type[BaseException] | None = None
        ended: str | None = None
        try:
            with session:
                try:
                    await self._work(client, session)
                except BaseException as error:
                    left = type(error)
                    raise
                finally:
                    ended = session.outcome
        except SessionEnded as error:
            assert error.outcome == session.outcome
            raise
        finally:
            self._check_outcome(session, left, ended)

    async def _work(self, client: Client, session: Session) -> None:
        plan = client.plan
        blob = Blob()
        seen = weakref.ref(blob)
        self.payloads.append(seen)
        box = session.box(blob, nbytes=plan.cost)
        del blob
        lease = client.lease = await self._admit(client)
        # Leaving the block must not release what a start has taken over.
        with lease if plan.guarded else nullcontext():
            await self._prepare(client, lease)
            try:
                source, *others = await self._start(client, session, box, lease)
            except Exception:  # and it is alive here, with its traceback
                # It may be with a sibling of the one that failed, still opening.
                handed = 0 in client.opened - client.opening
                assert not handed or seen() is None, "the payload outlives its hand-off"
                raise
        assert session.outcome is None, "started for a session that is over"
        assert seen() is None, "the payload lives after hand-off"
        assert not lease.held, "the lease is held after hand-off"
        del others  # whatever is not read is ended with the session
        stream = session.stream(source, first_item=plan.idle, idle=plan.idle)
        self.streams += 1
        whole = await self._read(client, stream)
        assert whole or source.closed, "a source that was not closed"
        if whole and session.outcome is None:
            assert stream.items == len(plan.script.items), "items are missing"

    async def _prepare(self, client: Client, lease: Lease) -> None:
        plan = client.plan
        try:
            if plan.prepare:
                await anyio.sleep(plan.prepare)
            if plan.actual is not None:
                self.disturbed = True
                lease.settle(bytes=plan.actual)
                assert lease.bytes == plan.actual
        except BaseException:
            lease.release()
            raise

    async def _start(
        self, client: Client, session: Session, box: Payload[Blob], lease: Lease
    ) -> list[Any]:
        plan = client.plan
        pairs = [
            (
                partial(self._open, client, session, box, child),
                partial(self._end, client, session, child=child),
            )
            for child in range(plan.children)
        ]
        if plan.children > 1:
            return await session.start_all(
                pairs, lease=lease, timeout=plan.start_timeout
            )
        ((open_, end),) = pairs
        return [
            await session.start(open_, end=end, lease=lease, timeout=plan.start_timeout)
        ]

    async def _admit(self, client: Client) -> Lease:
        gate, plan = self.gate, client.plan
        assert gate is not None
        self.asks += 1
        before = gate.statistics()
        alone = self.exact and not (self.asked or gate.closed or before.waiting)
        step = self.step
        self.asked.append(client)
        try:
            lease = await gate.admit(
                bytes=plan.cost,
                max_wait=plan.patience,
                key=plan.id,
                priority=plan.priority if self.order == "lanes" else 0,
            )
            self._check_turn(client, waited=self.step != step)
        finally:
            self.asked.remove(client)
        if alone and _would_fit(before, plan.cost):
            assert self.step == step, "waited for no other request"
        return lease

    def _check_turn(self, client: Client, *, waited: bool) -> None:
        """No request is granted before earlier ones that still wait."""
        if self.order != "fifo" or not (self.enforce and self.exact):
            return
        earlier = self.asked[: self.asked.index(client)]
        held = sum(_is_held(c.lease) for c in self.clients if c.lease is not None)
        assert self.gate is not None
        now = self.gate.statistics()
        others = now.admitted - now.released - held - 1
        # Waiting tasks resume in any order once they are granted.
        if not waited or not others:
            overtaken = [
                c
                for c in earlier
                if not (c.struck or c.plan.patience or c.plan.cost > self.smallest)
                # One whose session was ended wants nothing more, and is on its way.
                and (c.session is None or c.session.outcome is None)
            ]
            assert not overtaken or self.closed, "overtaken in the queue"

    async def _read(self, client: Client, stream: Any) -> bool:
        expected = 0
        async with stream as items:
            if client.plan.reads == 0:
                return False
            async for item in items:
                assert item == expected, "items out of order"
                expected += 1
                if expected > client.plan.reads:
                    return False
        return True

    async def _open(
        self, client: Client, session: Session, box: Payload[Blob], child: int = 0
    ) -> Any:
        self._law(child not in client.opened, "opened twice")
        alone = client.plan.children == 1
        self._law(not alone or session.outcome is None, "opened for a closed session")
        self._law(_is_held(client.lease), "released before hand-off")
        client.opened.add(child)
        client.opening.add(child)
        # In this frame, as a careless user would; only one child carries it.
        payload = None if child else box.take()
        key = f"{session.key}/{child}" if child else session.key
        self.by_key[key] = client
        try:
            client.sources[child] = await self.wire.start(key, payload)
            return client.sources[child]
        finally:
            client.opening.discard(child)
            self._law(_is_held(client.lease), "released while the start went on")

    async def _end(
        self, client: Client, session: Session, source: object, *, child: int = 0
    ) -> None:
        alone = client.plan.children == 1
        self._law(
            not alone or session.outcome is not None, "ended before it was closed"
        )
        self._law(child not in client.opening, "ended before the start had settled")
        self._law(child in client.opened, "ended without a start")
        self._law(source is client.sources.pop(child, None), "ended something else")
        self._law((session.generation, child) not in self.ended, "ended twice")
        self.ended.add((session.generation, child))
        settled = self.settled.get(session.generation, ())
        known = set(settled) & {"started", "unknown"}
        self._law(bool(known), f"ended after starts that {settled}")
        await self.wire.end(f"{session.key}/{child}" if child else session.key)

    def _decorate(self, gate: Gate) -> None:
        if self.exact:
            return
        decorator = managed(
            gate=gate,
            cost=lambda client, _image: client.plan.cost,
            sessions=self.sessions,
            key=lambda client, _image: client.plan.id,
            scrub="image",
        )

        async def two_phase(client: Client, image: Any, *, session: Session) -> Any:
            self._adopt(client, session)
            return await session.start(
                partial(self._open, client, session, image),
                end=partial(self._end, client, session),
                timeout=client.plan.start_timeout,
            )

        async def generator(
            client: Client, image: Any, *, lease: Lease, session: Session
        ) -> AsyncIterator[int]:
            self._adopt(client, session)
            client.lease = lease
            source = await session.start(
                partial(self._open, client, session, image),
                end=partial(self._end, client, session),
                lease=lease,
                timeout=client.plan.start_timeout,
            )
            assert not lease.held
            async for item in source:
                yield item

        async def plain(
            client: Client, image: Any, *, lease: Lease
        ) -> AsyncIterator[int]:
            client.lease = lease
            payload = image.take()
            await anyio.sleep(client.plan.prepare)
            assert lease.held
            del payload
            for item in client.plan.script.items:
                yield item
                assert not lease.held, "held after the first item"

        admitted = managed(gate=gate, cost=lambda client, _image: client.plan.cost)
        self.styles = {
            "two_phase": decorator(two_phase),
            "generator": decorator(generator),
            "plain": lambda *args: admitted(plain)(args[0], Payload(args[1])),
        }

    async def _by_stream(self, client: Client) -> None:
        blob = Blob()
        seen = weakref.ref(blob)
        self.payloads.append(seen)
        stream: Any = self.styles[client.plan.style](client, blob)
        del blob
        if client.plan.idle is not None:
            with anyio.move_on_after(1.0):  # such a stream has no deadlines
                await self._read(client, stream)
        else:
            await self._read(client, stream)
        alone = client.opening  # a start that goes on without its consumer
        assert seen() is None or alone, "the payload lives after the stream"

    def _adopt(self, client: Client, session: Session) -> None:
        client.session = session
        self.by_key[session.key] = client
        if "gone" in client.struck:
            session.cancelled_as = "client_gone"

    def _observe(self, event: Event) -> None:
        if isinstance(event, SessionClosed):
            self._law(event.generation not in self.outcomes, "closed twice")
            self.outcomes[event.generation] = event.outcome
        elif isinstance(event, StartSettled):
            self.settled.setdefault(event.generation, []).append(event.how)
        elif isinstance(event, SessionOpened):
            self._law(not self.drained, "opened after a drain began")
        elif isinstance(event, DrainStarted):
            self.drained = True
        elif isinstance(event, EndFailed):
            self.ends_failed += 1
        elif isinstance(event, StreamEnded):
            self.streams -= 1

    # Faults.

    def strike(self, fault: Fault) -> None:
        """Let *fault* happen now."""
        kind, number = fault
        if self.gate is None:
            return
        match kind:
            case "die":
                self.engine.die()
                self.broken.set()
            case "close":
                self.gate.close()
                self.closed = True
                self.granted = self.gate.statistics().admitted
            case "drain":
                self.drain_deadline = 0.02 * number
                self.draining.set()
            case "resize":
                self.disturbed = True
                self.gate.resize(slots=number)
                self.broken.set()
            case "shrink":
                self.disturbed = True
                self.smallest = number  # larger requests are refused already
                self.gate.resize(bytes=number)
                self.broken.set()
            case "quit":
                for client in self.clients:
                    client.struck.add(kind)
                self.quit.cancel()
            case _ if number < len(self.clients):
                self._strike_client(kind, self.clients[number])

    def _strike_client(self, kind: str, client: Client) -> None:
        session = client.session
        client.struck.add(kind)
        if kind == "stop":
            if session is not None:
                session.stop()
        elif kind == "native" and client.task is not None:
            client.task.cancel()
        else:
            if kind == "gone" and session is not None:
                session.cancelled_as = "client_gone"
            client.scope.cancel()

    # Laws.

    def _law(self, kept: bool, law: str) -> None:
        """Note a law that is broken where an assertion would be taken for news."""
        if not kept:
            self.broken_law = law

    def check(self) -> None:
        """Hold the world to the laws that are true after every step."""
        self.step += 1
        if self.gate is None:
            return
        assert self.broken_law is None, self.broken_law
        self._check_gate(self.gate)
        now = self.sessions.statistics()
        assert now.opened == now.live + sum(now.outcomes.values()), "counters"
        assert now.payloads >= 0 <= now.payload_bytes, "payloads counted out twice"
        engine = self.engine
        assert not engine.double_ends, "END twice"
        if self.remote:
            return  # a start that is given up is ended before it is answered
        assert not engine.early_ends, "END before START was settled"
        for key in engine.live:
            session = self.by_key[key].session
            assert session is not None
            assert session.phase != "quiet", (
                "the engine has a session that will not be ended"
            )

    def _check_gate(self, gate: Gate) -> None:
        now = gate.statistics()
        slots, nbytes = now.slots_in_use, now.bytes_in_use
        assert now.slots is not None
        assert now.bytes is not None
        over = slots > now.slots or nbytes > now.bytes
        if self.closed or (over and self.enforce and not self.disturbed):
            assert now.admitted == self.granted, "granted over capacity, or closed"
        self.granted, self.disturbed = now.admitted, False
        most = self.max_waiting
        assert most is None or now.waiting <= most, "the queue is too long"
        if not self.exact:
            return
        held = [c.lease for c in self.clients if c.lease is not None and c.lease.held]
        on_the_way = now.admitted - now.released - len(held)
        assert on_the_way >= 0, "more leases held than granted"
        assert now.waiting <= len(self.asked), "a request waits that is not asked for"
        assert now.received == self.asks, "requests received, and what became of them"
        if on_the_way:
            return
        assert slots == len(held), "slots in use are not those of live leases"
        assert nbytes == sum(lease.bytes for lease in held), "bytes in use"
        if now.waiting == len(self.asked) > 0 and not self.asked[0].struck:
            first = _would_fit(now, self.asked[0].plan.cost)
            assert not first or self.order != "fifo", "a free place beside a waiter"
            most = max(client.plan.cost for client in self.asked)
            assert most <= now.bytes, "a request waits that can never fit"
            if not slots and now.slots and self.order != "lanes":
                assert not first, "an empty gate, and a request waits"

    def _check_outcome(
        self, session: Session, left: type[BaseException] | None, ended: str | None
    ) -> None:
        """The first to end a session decides its outcome."""
        expected: str = "failed"
        if ended is not None:
            expected = ended
        elif left is None:
            expected = "completed"
        elif issubclass(left, anyio.get_cancelled_exc_class()):
            expected = session.cancelled_as
        else:
            expected = next(
                (name for kind, name in _EXPECTED.items() if issubclass(left, kind)),
                "failed",
            )
        assert session.outcome == expected, f"{session.outcome}, not {expected}"

    def _check_end(self, gate: Gate) -> None:
        now = gate.statistics()
        assert now.slots_in_use == now.bytes_in_use == 0, "leases left"
        assert not now.waiting, "waiters left"
        assert now.admitted == now.released, "leases not given back"
        assert not now.lost, "leases lost to the collector"
        then = self.sessions.statistics()
        assert not then.live + then.closing, "sessions left"
        assert not then.payloads + then.payload_bytes, "payloads left in boxes"
        assert len(self.outcomes) == then.opened, "a session without an outcome"
        assert then.ends_failed == self.ends_failed, "failed ENDs"
        assert not self.streams, "streams that ended twice or never"
        assert not self.engine.live, "sessions left in the engine"
        begun = [
            generation
            for generation, hows in self.settled.items()
            for how in hows
            if how in {"started", "unknown"}
        ]
        assert sorted(begun) == sorted(g for g, _ in self.ended), "starts and ENDs"
        for client in self.clients:
            assert client.session is None or client.session.phase == "quiet"
            assert not client.sources, "a stream that was not ended"
            settled = (
                self.settled.get(client.session.generation, ())
                if client.session
                else ()
            )
            assert len(settled) <= client.plan.children, "settled twice"
        self.clients.clear()
        self.by_key.clear()
        assert not any(seen() for seen in self.payloads), "payloads left"
        assert anyio.current_time() < BOUND, "too late"


def _would_fit(now: GateStatistics, cost: int) -> bool:
    assert now.slots is not None
    assert now.bytes is not None
    return now.slots_in_use < now.slots and now.bytes_in_use + cost <= now.bytes


def _is_held(lease: Lease | None) -> bool:
    return lease is None or lease.held


def run(
    seed: int,
    faults: list[tuple[int, Fault]] | None = None,
    *,
    backend: str = "asyncio",
    schedule: int | None = None,
) -> Simulated[None]:
    """Run the world of *seed* in the schedule of *schedule*, or of *seed* too."""
    world = World(seed, faults)
    at: dict[int, list[Fault]] = {}
    for step, fault in world.faults:
        at.setdefault(step, []).append(fault)

    def strike(these: list[Fault]) -> None:
        for fault in these:
            world.strike(fault)

    runner = simulate if backend == "asyncio" else simulate_trio
    return runner(
        world.main,
        seed=seed if schedule is None else schedule,
        faults={step: partial(strike, these) for step, these in at.items()},
        check=world.check,
        max_steps=5_000,
    )
