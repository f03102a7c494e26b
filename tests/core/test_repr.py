"""The `repr` of every object of ours, at every phase: no error, and no secret."""

import functools
import gc
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings, strategies as st
from more_examples import TIMES

import lifecycle
from lifecycle import Gate, Payload, SessionRegistry, Stream, events, managed, scrub

SECRET = "Tr0ub4dor"  # in each prompt, payload and key


class Secret(str):
    """A payload that shows itself, as arrays and strings do."""

    __slots__ = ()


def ours() -> Iterator[Any]:
    """Yield every object of a class of the package that is alive."""
    for each in gc.get_objects():
        if str(getattr(type(each), "__module__", "")).split(".")[0] == "lifecycle":
            yield each


def check_all() -> set[str]:
    """Show every object of ours; return the names of their classes."""
    shown = set()
    for each in ours():
        assert SECRET not in repr(each), type(each)
        shown.add(type(each).__name__)
    return shown


class World:
    """One of each thing, taken through its phases a step at a time."""

    def __init__(self, order: Any, fails: bool) -> None:
        self.gate = Gate(slots=2, bytes=100, order=order, observer=self.note)
        self.sessions = SessionRegistry(observer=self.note)
        self.fails = fails
        self.kept: list[Any] = []
        self.classes: set[str] = set()

    def note(self, event: events.Event) -> None:
        self.kept.append(event)

    def look(self) -> None:
        self.classes |= check_all()

    async def open(self, secret: Secret) -> AsyncIterator[str]:
        self.look()
        await checkpoint()
        if self.fails:
            raise ValueError(len(secret))
        return self.items(secret)

    async def items(self, secret: Secret) -> AsyncIterator[str]:
        for _ in range(2):
            self.look()
            yield secret

    def end(self, secret: Secret, _stream: object) -> None:
        self.look()
        assert secret

    async def by_hand(self, secret: Secret, how: str) -> None:
        """Take a lease, a session, a start and a stream through a request."""
        open_ = functools.partial(self.open, secret)
        end = functools.partial(self.end, secret)
        with self.sessions.open("a") as session:
            self.kept += [session, session.init_done, session.box(secret, nbytes=3)]
            lease = await self.gate.admit(bytes=60, key=secret)
            self.kept.append(lease)
            self.look()
            source = await session.start(open_, end=end, lease=lease)
            stream = session.stream(source, idle=60)
            self.kept += [source, stream]
            self.look()
            async with stream:
                await anext(stream)
                self.look()
                if how == "stop":
                    session.stop()
                    await checkpoint()

    async def decorated(self, secret: Secret, how: str) -> None:
        """Take a managed and a scrubbed stream through a request."""
        world = self

        def key(picture: Secret, prompt: Secret, secret: Secret = secret) -> str:
            return str(len(picture) + len(prompt) + len(secret))

        @managed(
            gate=self.gate,
            cost=functools.partial(
                lambda _secret, picture, prompt: len(picture + prompt), secret
            ),
            sessions=self.sessions,
            key=key,
            scrub="picture",
        )
        async def answer(
            picture: Payload[Secret], prompt: Secret
        ) -> AsyncIterator[str]:
            world.look()
            assert prompt
            return await world.open(picture.take())

        @scrub("picture")
        async def describe(
            picture: Payload[Secret], prompt: Secret
        ) -> AsyncIterator[str]:
            world.look()
            assert prompt
            async with Stream(await world.open(picture.take())) as items:
                yield await anext(items)

        for make in (answer, describe):
            stream: Any = make(secret, secret)
            self.kept.append(stream)
            self.look()
            if how != "stop":
                await anext(stream)
            self.look()
            await stream.aclose()
            self.look()

    async def wait_in_line(self, secret: Secret, _how: str) -> None:
        """Let requests wait, be refused and be cancelled."""
        lease = self.gate.try_admit(bytes=100, key=secret)
        try:
            for each in range(2):
                with anyio.move_on_after(0.001):
                    await self.gate.admit(bytes=50, key=secret + str(each))
                self.look()
            with pytest.raises(lifecycle.GateFull) as refused:
                self.gate.try_admit(bytes=1, key=secret)
            self.kept.append(refused.value.with_traceback(None))
        finally:
            lease.release()
        self.look()


async def act(order: str, fails: bool, acts: list[tuple[str, str]]) -> World:
    world = World(order, fails)
    async with world.sessions:
        for name, how in acts:
            try:
                await getattr(world, name)(Secret(f"{SECRET}!"), how)
            except (ValueError, lifecycle.LifecycleError) as error:
                world.kept.append(error)
            world.look()
            assert SECRET not in shown_variables(world.kept)
    world.look()
    return world


def shown_variables(kept: list[Any]) -> str:
    """Return what an error tracker shows of the frames of ours in kept errors."""
    shown = []
    for error in kept:
        if isinstance(error, Exception):
            for frame, _line in traceback.walk_tb(error.__traceback__):
                if "src/lifecycle" in frame.f_code.co_filename:
                    shown += [repr(value) for value in frame.f_locals.values()]
    return "\n".join(shown)


ACTS = st.tuples(
    st.sampled_from(["by_hand", "decorated", "wait_in_line"]),
    st.sampled_from(["leave", "stop"]),
)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_shows_no_secret_at_any_phase(backend: str) -> None:
    """Whatever happens to requests, no object of ours shows what they carry."""
    seen: set[str] = set()

    @settings(
        max_examples=8 * TIMES, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.sampled_from(["fifo", "fair"]),
        st.booleans(),
        st.lists(ACTS, min_size=1, max_size=3),
    )
    def run(order: str, fails: bool, acts: list[tuple[str, str]]) -> None:
        world = anyio.run(act, order, fails, acts, backend=backend)
        seen.update(world.classes)

    run()
    for order in ("fifo", "fair"):
        for fails in (False, True):
            acts = [(name, "leave") for name in ("by_hand", "decorated")]
            world = anyio.run(
                act, order, fails, [*acts, ("wait_in_line", "")], backend=backend
            )
            seen |= world.classes
    made = {"Gate", "Lease", "Session", "SessionRegistry", "Payload", "InitDone"}
    made |= {"WatchedStream", "ManagedStream", "Scrubbed", "StartTask", "Call"}
    made |= {"FairQueue", "FifoQueue", "GateFull", "Options", "RegistryState"}
    assert made <= seen


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gate(slots=-1),
        lambda: Gate(slots=None, order="random"),  # type: ignore[arg-type]
        lambda: Gate(slots=1, observer=3),  # type: ignore[arg-type]
        lambda: Payload(Secret(SECRET), nbytes=-1),
        lambda: Stream(Secret(SECRET)),  # type: ignore[arg-type]
        lambda: SessionRegistry(end_timeout=float("nan")),
    ],
)
def test_shows_what_was_not_made(make: Callable[[], object]) -> None:
    """The error of a refused argument names an object that is only half there."""
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    found = [
        repr(value)
        for frame, _line in traceback.walk_tb(caught.value.__traceback__)
        for name, value in frame.f_locals.items()
        if name == "self"
    ]
    assert found
    assert SECRET not in "".join(found)


def test_shows_a_gate_while_it_is_being_changed() -> None:
    """It does not wait for the lock, which this very thread may hold."""
    gate = Gate(slots=1)
    with gate._lock.mutex:
        assert repr(gate) == "<Gate 'gate': 0 of 1 slots, 0 of None bytes, 0 waiting>"


def test_shows_a_stream_that_was_never_made() -> None:
    """As a debugger does where its source was refused."""
    stream = Stream.__new__(Stream)
    assert (stream.closed, stream.items) == (True, 0)
