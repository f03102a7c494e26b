"""Common mistakes are answered with the remedy."""

import copy
import gc
import logging
import math
import pickle
import re
from collections.abc import Awaitable, Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import anyio
import pytest

import lifecycle
from lifecycle import (
    AdmissionTimeout,
    CostTooLarge,
    EngineLost,
    Gate,
    GateFull,
    Lease,
    LifecycleError,
    Payload,
    Session,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    SessionRegistry,
    Stream,
    StreamTimeout,
    managed,
    strip,
)
from lifecycle.lowlevel import check_int, check_seconds
from lifecycle.testing import assert_quiescent

pytestmark = pytest.mark.anyio

SECRET = "the-secret-picture"


async def words() -> Any:
    yield "word"


def test_refuses_order_that_there_is_not() -> None:
    """A gate of an unknown order is refused, and would not silently be first come."""
    with pytest.raises(
        ValueError, match="order must be one of fifo, fair, adaptive, not 'lifo'"
    ):
        Gate(slots=None, order="lifo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"max_wait": "10"}, "max_wait must be a number of seconds or None, not str"),
        ({"max_wait": True}, "max_wait must be a number of seconds or None, not bool"),
        ({"max_wait": -1}, "max_wait must be 0 or more seconds or None, not -1"),
        ({"max_waiting": True}, "max_waiting must be a whole number, not bool"),
        ({"slots": True}, "slots must be a whole number, not bool"),
        ({"enforce": "no"}, "enforce must be True or False, not str"),
        ({"name": 5}, "name must be a string, not int"),
        ({"clock": 5}, "clock must be callable, not int"),
    ],
)
def test_refuses_option_of_gate(odd: dict[str, Any], words: str) -> None:
    """Each is refused where it is given, by its name."""
    with pytest.raises((TypeError, ValueError), match=f"^{words}$"):
        Gate(**{"slots": None} | odd)


@pytest.mark.parametrize("number", [10**400, 10**6000], ids=["400", "6000"])
async def test_shows_a_huge_number_in_brief(number: int) -> None:
    """A number of hundreds of digits has an error as any other, and a short one."""
    gate = Gate(slots=2, bytes=number, name="photos")
    no_float = "must be seconds that a float can hold, not .*; give math.inf for no"
    with pytest.raises(ValueError, match=f"^max_wait {no_float} limit$") as wait:
        Gate(slots=None, max_wait=number)
    with pytest.raises(ValueError, match=f"^max_wait {no_float} limit$"):
        await gate.admit(max_wait=-number)
    with pytest.raises(ValueError, match=f"^it {no_float} limit$"):
        check_seconds(it=number)
    with pytest.raises(ValueError, match="^reserve must be from 0 to below 1, "):
        Gate(slots=None, order="fair", reserve=number)
    with pytest.raises(ValueError, match="^reserve must be 0 unless order='fair', "):
        Gate(slots=None, reserve=Fraction(1, number))
    with pytest.raises(ValueError, match=r"^it must be 0 seconds or more, .{,130}$"):
        check_seconds(it=-(10**300))
    with pytest.raises(ValueError, match="^slots must be 0 or more, not ") as amount:
        gate.try_admit(slots=-number)
    with pytest.raises(ValueError, match="^it must be 0 or more, not ") as option:
        check_int(it=-number)
    with pytest.raises(CostTooLarge, match="can never pass gate 'photos' of ") as cost:
        gate.try_admit(slots=number, bytes=2 * number)
    with gate.try_admit(bytes=number) as lease:
        errors = [it.value for it in (wait, amount, option, cost)]
        shown = [gate, lease, Payload("", nbytes=number), *errors]
        assert [type(it) for it in shown if len(str(it)) > 650] == []


def test_shows_both_ends_of_a_long_number() -> None:
    """A hundred characters of its beginning, and twenty of its end."""
    with pytest.raises(ValueError, match=r", not -1230{96}\.\.\.0{18}45$"):
        check_int(it=-(123 * 10**400 + 45))
    with pytest.raises(ValueError, match=r", not -10{158}$"):
        check_int(it=-(10**158))


def test_names_the_limits_of_a_gate() -> None:
    """A number without a name might be slots or bytes."""
    with pytest.raises(TypeError, match=r"limits by name: Gate\(slots=8\), not int"):
        Gate(1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "maker"), [(Lease, "gate.admit"), (Session, "sessions.open")]
)
def test_says_who_makes_it(kind: Callable[..., Any], maker: str) -> None:
    """One that were made by hand would belong to no gate and no registry."""
    with pytest.raises(TypeError, match=f"is not made by its class: use .*{maker}"):
        kind()


async def test_names_seconds_that_are_no_number() -> None:
    """Every span of time that is no number is refused by its name, and nothing runs."""

    async def open_() -> None: ...

    def words_of(name: str) -> Any:
        return pytest.raises(TypeError, match=f"^{name} must be a number of seconds, ")

    with words_of("end_timeout"):
        SessionRegistry(end_timeout=None)  # type: ignore[arg-type]
    with words_of("grace"):
        Stream(words(), grace=None)  # type: ignore[arg-type]
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            for odd in (None, "5"):
                with words_of("timeout"):
                    await session.start(open_, timeout=odd)  # type: ignore[arg-type]
            with words_of("idle"):
                session.stream(words(), idle="5")  # type: ignore[arg-type]
        with words_of("deadline"):
            await sessions.drain(None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="deadline must be .*, not NaN"):
            await sessions.drain(math.nan)
        assert not sessions.draining


async def test_takes_seconds_of_every_kind_of_number() -> None:
    """A decimal number stops neither the gate nor the registry and all its sessions."""

    async def open_() -> str:
        return "stream"

    second: Any = Decimal(1)
    gate = Gate(slots=1)
    async with SessionRegistry(end_timeout=second) as sessions:
        with sessions.open("a") as session:
            assert await session.start(open_, timeout=second) == "stream"
        with sessions.open("b") as session:
            source = session.stream(words(), total=second, grace=second)
            async with source as stream:
                assert [word async for word in stream] == ["word"]
        with await gate.admit():
            other = create_other(gate)
            with pytest.raises(AdmissionTimeout):
                await other(Decimal("0.001"))
        assert await sessions.drain(second) == 0


def create_other(gate: Gate) -> Any:
    """What waits at the gate in a task of its own."""

    async def wait(max_wait: Any) -> None:
        error: Exception | None = None

        async def other() -> None:
            nonlocal error
            try:
                await gate.admit(max_wait=max_wait)
            except Exception as raised:  # noqa: BLE001 - raised below, in no group
                error = raised

        async with anyio.create_task_group() as group:
            group.start_soon(other)
        if error is not None:
            raise error

    return wait


def test_refuses_bound_of_quarantine_that_is_no_whole_number() -> None:
    """It is found out at once, and not by the first END that fails."""
    for odd in (None, -1, 0.5):
        with pytest.raises(ValueError, match="max_quarantined must be"):
            SessionRegistry(max_quarantined=odd)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keep", "words"),
    [("a.b", r"list of paths, as in \['a.b'\]"), ([5], "to keep is a string, not int")],
)
def test_refuses_paths_to_keep_that_are_none(keep: Any, words: str) -> None:
    """A string is not taken for a list of its letters."""
    payload = {"a": {"b": 1}}
    with pytest.raises(TypeError, match=words):
        strip(payload, keep=keep)
    assert payload == {"a": {"b": 1}}


@pytest.mark.parametrize("odd", [5, b"pixels", [{"pixels": b""}], ()])
def test_refuses_to_strip_what_is_no_mapping(odd: Any) -> None:
    """A payload that is not stripped stays, and nothing would tell."""
    with pytest.raises(TypeError, match="strip takes a mapping that can be changed, "):
        strip(odd)


def test_says_who_can_be_called_back() -> None:
    """What cannot be called is found out at once, and not when a stream ends."""
    source = words()
    with pytest.raises(TypeError, match="on_close must be callable, not str"):
        Stream(source, on_close=["close"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="on_release must be callable, not int"):
        Payload(b"", on_release=5)  # type: ignore[arg-type]


async def test_warns_of_a_stream_that_is_iterated_again() -> None:
    """Nothing more would come, and that looks like an answer without words."""
    async with Stream(words()) as stream:
        assert [word async for word in stream] == ["word"]
        with pytest.warns(RuntimeWarning, match="ended after 1 items, .* make another"):
            assert [word async for word in stream] == []


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")  # trio
async def test_warns_of_a_stream_that_is_left_by_break() -> None:
    """Its source is closed by the garbage collector, if ever."""
    endless = managed(gate=Gate(slots=1))(endless_words)

    async def leave(stream: Any) -> None:
        async for _ in stream:
            break
        del stream
        gc.collect()

    for make in (lambda: Stream(endless_words()), endless):
        with pytest.warns(ResourceWarning, match="after 1 items .* async with block"):
            await leave(make())


async def endless_words() -> Any:
    while True:
        yield "word"


@pytest.mark.parametrize(
    ("open_", "remedy"),
    [
        (words, "open_ returned async_generator.*without yield"),
        (lambda: 5, "open_ returned int.*without yield"),
        (5, "not int; pass the function itself, without calling it"),
    ],
)
async def test_says_what_opens_a_stream(open_: Any, remedy: str) -> None:
    """What cannot be awaited is refused, and the lease is given back."""
    gate = Gate(slots=1)
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            lease = await gate.admit()
            with pytest.raises(TypeError, match=remedy):
                await session.start(open_, lease=lease)
    assert gate.statistics().slots_in_use == 0


async def no_argument() -> None: ...
async def two_arguments(_stream: object, _key: str) -> None: ...
async def option_needed(
    _stream: object, *, _key: str, _more: str = "", _most: str = ""
) -> None: ...
async def more_options(_stream: object, _key: str = "", *, _more: str = "") -> None: ...
async def any_arguments(*_: object) -> None: ...


class Ender:
    """Ends with methods."""

    async def no_argument(self) -> None: ...
    async def one_argument(self, _stream: object) -> None: ...


@pytest.mark.parametrize(
    "end", [no_argument, two_arguments, option_needed, Ender().no_argument]
)
async def test_refuses_end_that_takes_no_one_argument(end: Any) -> None:
    """The engine would hold the stream, as the END of it could not be called."""
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            name = re.escape(end.__qualname__)
            with pytest.raises(TypeError, match=f"calls end with .* {name} does not"):
                await session.start(no_argument, end=end)
        assert not sessions.quarantined()


class Mimic:
    """Has the attributes of a function, without their values, as mocks have."""

    __code__ = object()

    def __call__(self, _source: object) -> None: ...


@pytest.mark.parametrize(
    "end",
    [
        more_options,
        any_arguments,
        Ender().one_argument,
        partial(two_arguments, _key="a"),
        Mimic(),
    ],
)
async def test_takes_whatever_ends_with_one_argument(end: Any) -> None:
    """Parameters with defaults are no mistake."""
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            await session.start(no_argument, end=end)
        await session.quiet()
        assert not sessions.quarantined()


async def test_logs_which_end_could_not_be_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The place of the error is the library's, but the mistake is not."""
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            await session.start(no_argument, end=partial(no_argument))
        await session.quiet()
    assert "session 'a#1', no_argument, failed with TypeError at" in caplog.text


async def test_refuses_lease_or_end_that_was_forgotten_to_be_one() -> None:
    """An ``await`` too few or a call too many raises before anything begins."""
    gate = Gate(slots=1)

    async def open_() -> None: ...

    async def end(_: object) -> None: ...

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            for words_of, odd in (("a lease, awaited", "lease"), ("end, a", "end")):
                called = gate.admit() if odd == "lease" else end(None)
                with pytest.raises(TypeError, match=f"{words_of}.*, not coroutine"):
                    await session.start(open_, **{odd: called})  # type: ignore[arg-type]
                called.close()
            assert session.phase == "open"
            await session.start(open_, end=end, lease=await gate.admit())
    assert gate.statistics().slots_in_use == 0


@pytest.mark.parametrize("owner", [Gate, SessionRegistry])
def test_refuses_observer_that_would_not_be_awaited(owner: Callable[..., Any]) -> None:
    """A coroutine function would be called, and nothing of it would ever run."""

    async def observe(_event: object) -> None: ...

    for odd, kind in ((observe, "async function"), ("module:observe", "str")):
        with pytest.raises(TypeError, match=f"plain function of an event, not {kind}"):
            owner(observer=odd)


def test_refuses_stream_of_what_is_no_asynchronous_iterator() -> None:
    """A list is refused where it is given, and not shown."""
    with pytest.raises(TypeError, match="asynchronous iterator, not list") as mistake:
        Stream([SECRET])  # type: ignore[arg-type]
    assert SECRET not in str(mistake.value)


async def test_logs_end_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    """A failed END is heard of without any observer, but for the words of its error."""

    async def open_() -> None: ...

    async def end(_: object) -> None:
        raise KeyError(SECRET)

    with caplog.at_level(logging.WARNING, "lifecycle"):
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                await session.start(open_, end=end)
    assert re.search(
        r"END of session 'a#1', \S+<locals>.end, failed with KeyError at "
        r"test_mistakes.py:\d+; "
        r"the engine may still hold it",
        caplog.text,
    )
    assert SECRET not in caplog.text


async def test_refuses_what_names_no_session() -> None:
    """A generation in words would never be that of a session, and ``None`` no id."""
    async with SessionRegistry() as sessions:
        for odd in ("1", True):
            with pytest.raises(TypeError, match="^generation must be a whole number"):
                sessions.remove("a", generation=odd)  # type: ignore[arg-type]
        for ask in (sessions.get, lambda: sessions.get(5), lambda: sessions.get(key=5)):
            with pytest.raises(TypeError, match="^get takes an id or key=, a string"):
                ask()


async def test_names_session_that_is_or_is_not_there() -> None:
    """The error names the id that was asked for."""
    async with SessionRegistry() as sessions:
        with sessions.open("request-1"):
            with pytest.raises(
                SessionExists, match="a live session has id 'request-1'"
            ):
                sessions.open("request-1")
        with pytest.raises(SessionNotFound, match="no live session has id 'request-1'"):
            sessions.get("request-1")


@pytest.mark.parametrize(
    ("limits", "cost", "words"),
    [
        ({"bytes": 5}, {"bytes": 6}, "6 bytes can never pass gate 'gate' of 5 bytes"),
        ({"slots": 1}, {"slots": 2}, "2 slots can never pass gate 'gate' of 1 slots"),
        (
            {"slots": 1, "bytes": 5},
            {"slots": 2, "bytes": 6},
            "2 slots and 6 bytes can never pass gate 'gate' of 1 slots and 5 bytes",
        ),
    ],
)
def test_names_limit_that_request_is_beyond(
    limits: dict[str, int], cost: dict[str, int], words: str
) -> None:
    """A request that can never fit is refused by the limit that it breaks, and no other."""
    with pytest.raises(CostTooLarge, match=f"^a request of {words}; make it smaller$"):
        Gate(**limits).try_admit(**cost)  # type: ignore[arg-type]


async def test_says_that_gate_without_a_queue_is_full() -> None:
    """Where the queue is switched off, the refusal names the option."""
    gate = Gate(slots=1, max_waiting=0)
    with await gate.admit():
        async with anyio.create_task_group() as group:

            async def other() -> None:
                with pytest.raises(GateFull, match="is full, and max_waiting is 0;"):
                    await gate.admit()

            group.start_soon(other)


def test_shows_no_address_for_what_is_left_as_it_is() -> None:
    """The default that changes nothing reads so in ``help()``."""
    assert Gate.admit.__kwdefaults__ is not None
    assert repr(Gate.admit.__kwdefaults__["max_wait"]) == "<unchanged>"
    assert lifecycle.Gate.resize.__kwdefaults__ is not None
    assert repr(Gate.resize.__kwdefaults__["slots"]) == "<unchanged>"


async def test_refuses_lease_that_was_released_before() -> None:
    """A start would run without any capacity that is held for it."""
    gate = Gate(slots=1)

    async def open_() -> None: ...

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            lease = await gate.admit()
            lease.release()
            with pytest.raises(RuntimeError, match="released before; admit one"):
                await session.start(open_, lease=lease)
            assert session.phase == "open"
        with pytest.raises(SessionEnded, match="'a' has ended: completed; open anoth"):
            await session.start(open_)


async def test_takes_plain_function_as_end() -> None:
    """It has run when it returns, so its END has not failed."""
    ended: list[str | None] = []

    async def open_() -> str:
        return "stream"

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            await session.start(open_, end=ended.append)
        await session.quiet()
        assert sessions.statistics().ends_failed == 0
    assert ended == ["stream"]


async def test_refuses_registry_of_another_loop() -> None:
    """A call from another loop or thread raises at once."""

    async def open_() -> None: ...

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            waits: list[Callable[[], Awaitable[object]]] = [
                partial(session.start, open_),
                partial(sessions.cancel, "a"),
                partial(sessions.drain, 0.0),
                session.quiet,
            ]
            calls: list[Callable[[], object]] = [
                partial(sessions.open, "b"),
                session.close,
                session.stop,
                sessions.close_all,
            ]

            def refused() -> Any:
                return pytest.raises(RuntimeError, match="the loop it was entered in")

            async def elsewhere() -> None:
                for wait in waits:
                    with refused(), anyio.fail_after(5):
                        await wait()
                for call in calls:
                    with refused():
                        call()

            for backend in ("asyncio", "trio"):
                other = partial(anyio.run, elsewhere, backend=backend)
                await anyio.to_thread.run_sync(other)
            for call in calls:
                with refused():
                    await anyio.to_thread.run_sync(call)
            assert session.phase == "open"
            assert not sessions.draining
            await session.start(open_)
        assert sessions.statistics().opened == 1
        assert not await anyio.to_thread.run_sync(session.close)  # it has ended
    assert await sessions.drain(0.0) == 0  # as a server may that is half down


async def test_refuses_id_that_is_no_string() -> None:
    """A key that forgot to return would give all requests one id."""
    async with SessionRegistry() as sessions:
        with pytest.raises(TypeError, match="id of a session is a string, not NoneTyp"):
            sessions.open(None)  # type: ignore[arg-type]
        assert sessions.statistics().opened == 0


async def test_refuses_unknown_outcome_without_live_sessions() -> None:
    """A typing error in a shutdown raises, also where no session is live."""
    async with SessionRegistry() as sessions:
        with pytest.raises(ValueError, match="'shutdwon' is no outcome of a session"):
            sessions.close_all("shutdwon")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        StreamTimeout("late", deadline="idle"),
        SessionEnded("over", outcome="shutdown"),
        EngineLost("gone", reason="killed", retry_after=2.0),
        GateFull("full", retry_after=1.5),
        AdmissionTimeout("slow", retry_after=1.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_sends_errors_to_another_process_whole(error: LifecycleError) -> None:
    """One that cannot be read back breaks a whole pool of processes."""
    error.add_note("said by a test")
    for copied in (copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))):
        other = copied(error)
        assert (type(other), str(other)) == (type(error), str(error))
        assert vars(other) == vars(error)


async def test_refuses_copies_of_what_keeps_accounts() -> None:
    """A second gate would admit as much again; a second session would end it twice."""
    gate = Gate(slots=1)
    async with SessionRegistry() as sessions, Stream(words()) as stream:
        with sessions.open("a") as session:
            for one in (gate, sessions, session, stream):
                for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=f"^a {type(one).__name__} can"):
                        copied(one)
    assert_quiescent(gate, sessions)
