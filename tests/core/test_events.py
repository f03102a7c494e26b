"""Events and observers: what is reported, and that it can hold no payload."""

import inspect
import logging
import sys
import typing
from typing import Any, Literal

import anyio
import pytest
import structlog
from anyio.lowlevel import checkpoint
from structlog.testing import capture_logs

from lifecycle import Gate, GateFull, SessionRegistry, events
from lifecycle.events import (
    DrainFinished,
    EndFailed,
    Event,
    LeaseGranted,
    LeaseReleased,
    SessionOpened,
    combine_observers,
    structlog_observer,
)
from lifecycle.testing import RecordingObserver, assert_quiescent

EVENTS = [
    kind
    for _name, kind in inspect.getmembers(events, inspect.isclass)
    if issubclass(kind, Event) and kind is not Event
]


@pytest.mark.parametrize("kind", EVENTS)
def test_takes_fields_by_name(kind: type[Event]) -> None:
    """A field that is added in the middle breaks nobody's code."""
    assert kind.__match_args__ == ()


@pytest.mark.parametrize("kind", EVENTS)
def test_holds_its_fields_alone(kind: type[Event]) -> None:
    """An event has no dictionary beside its fields: some come by the thousand."""
    assert kind.__dictoffset__ == 0


def leaves(annotation: Any) -> set[object]:
    """The types and literals that a field may hold."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    arguments = typing.get_args(annotation)
    return set().union(*map(leaves, arguments)) if arguments else {annotation}


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_has_no_field_for_a_payload(kind: type[Event]) -> None:
    """Fields are ids, counts, seconds and literals: a payload fits into none."""
    fields = typing.get_type_hints(kind)
    assert fields
    for name, annotation in fields.items():
        assert leaves(annotation) <= {str, int, float, bool, type(None)}, name
    text = {name for name, annotation in fields.items() if annotation is str}
    assert text <= {"gate", "session", "error"}
    assert not hasattr(kind, "__dict__") or "__slots__" in vars(kind)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_is_a_frozen_fact(kind: type[Event]) -> None:
    """An event cannot be changed, nor be given another attribute."""
    values = dict.fromkeys(typing.get_type_hints(kind))
    event = kind(**values)
    with pytest.raises(AttributeError):
        setattr(event, next(iter(values)), 1)
    with pytest.raises((AttributeError, TypeError)):
        event.payload = b"x"
    assert kind.__doc__


class Refusing:
    """An observer that cannot cope."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, event: Event) -> None:
        self.calls += 1
        raise OSError(f"no room for {type(event).__name__}")


@pytest.mark.anyio
async def test_survives_an_observer_that_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is reported once, to the logger of the library, and breaks nothing."""
    refusing = Refusing()
    gate = Gate(slots=1, observer=refusing)
    for _ in range(3):
        with await gate.admit():
            with pytest.raises(GateFull):
                gate.try_admit()
    assert refusing.calls == 9
    [record] = [r for r in caplog.records if r.name == "lifecycle"]
    assert record.levelno == logging.ERROR
    assert "LeaseGranted" in record.getMessage()
    assert_quiescent(gate)
    async with SessionRegistry(observer=refusing) as sessions:
        with sessions.open("a") as session:
            session.box(b"x", nbytes=1)
            await session.start(checkpoint)
    assert len([r for r in caplog.records if r.name == "lifecycle"]) == 2
    assert_quiescent(sessions)


@pytest.mark.anyio
async def test_lets_an_observer_use_the_gate() -> None:
    """An observer is called without the lock, in the order of what happened."""
    names: list[str] = []

    def observe(event: Event) -> None:
        names.append(type(event).__name__)
        now = gate.statistics()
        assert now.slots_in_use in (0, 1)
        if isinstance(event, LeaseReleased) and len(names) < 6:
            gate.try_admit().release()

    gate = Gate(slots=1, observer=observe)
    with anyio.fail_after(2), await gate.admit():
        pass
    assert names == ["LeaseGranted", "LeaseReleased"] * 3
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_tells_the_life_of_a_request() -> None:
    """Gate and registry together tell each step of a request, once and in order."""
    seen = RecordingObserver()
    gate = Gate(slots=1, observer=seen)
    async with SessionRegistry(observer=seen) as sessions:
        with sessions.open("a") as session:
            lease = await gate.admit(bytes=3)
            box = session.box(b"x", nbytes=3)

            async def open_() -> str:
                box.take()
                await checkpoint()
                return "stream"

            await session.start(open_, lease=lease)
    assert seen.names() == [
        "SessionOpened",
        "LeaseGranted",
        "PayloadReleased",
        "LeaseReleased",
        "StartSettled",
        "SessionClosed",
    ]


class TestStructlog:
    def test_writes_events_as_fields(self) -> None:
        """Each event is one line with its name, its fields and the level it needs."""
        with capture_logs() as logs:
            observe = structlog_observer(structlog.get_logger())
            observe(LeaseGranted(gate="g", slots=1, bytes=2, waited_s=0.12345678))
            observe(SessionOpened(session="a", generation=1))
            observe(EndFailed(session="a", generation=1, error="OSError"))
            observe(LeaseReleased(gate="g", slots=1, bytes=2, lost=True))
            observe(LeaseReleased(gate="g", slots=1, bytes=2, lost=False))
        assert logs[0] == {
            "event": "lifecycle.lease_granted",
            "log_level": "debug",
            "gate": "g",
            "slots": 1,
            "bytes": 2,
            "waited_s": 0.123457,
        }
        assert [line["log_level"] for line in logs] == [
            "debug",
            "info",
            "warning",
            "warning",
            "debug",
        ]
        assert logs[1]["event"] == "lifecycle.session_opened"

    def test_makes_a_logger_of_its_own(self) -> None:
        """Without a logger it asks structlog for one."""
        with capture_logs() as logs:
            structlog_observer()(DrainFinished(cut=1, duration_s=2.0))
        assert [line["event"] for line in logs] == ["lifecycle.drain_finished"]

    def test_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where structlog is missing, the error names the extra."""
        monkeypatch.setitem(sys.modules, "structlog", None)
        with pytest.raises(ImportError, match=r"anyio-lifecycle\[observe\]"):
            structlog_observer()


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_warns_of_what_needs_attention_alone(kind: type[Event]) -> None:
    """A failed END and a lost lease are warnings, and no other event is one."""
    values = dict.fromkeys(typing.get_type_hints(kind))
    with capture_logs() as logged:
        structlog_observer()(kind(**values))
    (entry,) = logged
    assert (entry["log_level"] == "warning") is (kind is EndFailed)


def test_combines_observers() -> None:
    """Each observer gets each event, also when one before it fails."""
    seen: list[Event] = []

    def fail(_: Event) -> None:
        raise ValueError("no")

    observe = combine_observers(None, seen.append)
    gate = Gate(slots=1, observer=combine_observers(fail, observe))
    gate.try_admit().release()
    assert [type(event).__name__ for event in seen] == ["LeaseGranted", "LeaseReleased"]
