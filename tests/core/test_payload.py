"""Payload and strip: what is handed over is gone."""

import array
import collections
import copy
import math
import pickle
import traceback
import types
import weakref
from collections.abc import Generator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Payload, SessionRegistry, strip

SECRET = "the-secret-picture"


class Tensor:
    """Something heavy that a weak reference can watch."""

    def __repr__(self) -> str:
        return SECRET


def watched() -> tuple[Tensor, "weakref.ref[Tensor]"]:
    """Make a tensor, and what tells whether it is alive."""
    tensor = Tensor()
    return tensor, weakref.ref(tensor)


class TestPayload:
    def test_gives_its_value_once(self, no_collector: None) -> None:
        """The second taker gets an error, and the box keeps nothing."""
        tensor, ref = watched()
        payload = Payload(tensor, nbytes=5)
        assert not payload.taken
        assert payload.take() is tensor
        del tensor
        assert ref() is None
        assert payload.taken
        with pytest.raises(RuntimeError, match="taken or cleared before"):
            payload.take()

    def test_forgets_when_cleared(self, no_collector: None) -> None:
        """A box that is cleared is as empty as one that was taken."""
        tensor, ref = watched()
        payload = Payload(tensor)
        del tensor
        payload.clear()
        payload.clear()
        assert ref() is None
        assert payload.taken
        with pytest.raises(RuntimeError):
            payload.take()

    def test_tells_how_it_was_emptied(self) -> None:
        """on_release is called once, with the way it went."""
        released: list[str] = []
        first, second = (Payload(1, on_release=released.append) for _ in range(2))
        first.take()
        first.clear()
        second.clear()
        second.clear()
        assert released == ["taken", "cleared"]

    def test_may_hold_nothing(self) -> None:
        """None is a value like any other."""
        payload: Payload[None] = Payload(None)
        assert not payload.taken
        assert payload.take() is None
        assert payload.taken

    def test_shows_a_size_and_never_the_value(self) -> None:
        """Neither repr nor str nor an error shows what is inside."""
        payload = Payload(Tensor(), nbytes=5)
        assert f"{payload!r} {payload}" == " ".join(["<Payload of 5 bytes>"] * 2)
        payload.clear()
        assert repr(payload) == "<Payload of 5 bytes, taken>"

    def test_refuses_size_that_is_no_whole_number(self) -> None:
        """Sizes are added up, and must come back to nothing."""
        for odd in (-1, 1.5, math.nan, "5"):
            with pytest.raises(ValueError, match="^nbytes must be "):
                Payload(b"", nbytes=odd)  # type: ignore[arg-type]

    def test_cannot_be_copied(self) -> None:
        """A copy would be a second holder."""
        payload = Payload([1])
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                duplicate(payload)
        assert not payload.taken


class TestStrip:
    def test_empties_in_place(self, no_collector: None) -> None:
        """All other holders of the mapping hold an empty one."""
        tensor, ref = watched()
        inner = {"values": tensor, "grid": [1, 2]}
        payload = {"image": inner, "text": "x"}
        del tensor
        strip(payload)
        assert payload == {}
        assert inner == {}
        assert ref() is None

    def test_keeps_what_is_named(self, no_collector: None) -> None:
        """A kept path survives with all that lies under it, and nothing beside it."""
        tensor, ref = watched()
        deltas = {"values": [1, [2]]}
        payload = {
            "pixel_values": tensor,
            "mrope": {"position_deltas": deltas, "positions": [tensor, [tensor]]},
            "length": 7,
        }
        del tensor
        strip(payload, keep=["mrope.position_deltas", "length"])
        assert payload == {"mrope": {"position_deltas": deltas}, "length": 7}
        assert deltas == {"values": [1, [2]]}
        assert ref() is None

    @pytest.mark.parametrize("path", ["b", "a.c", "a.b.c", "", "a.", ".a", "list.0"])
    def test_strips_the_rest_for_an_unknown_path(self, path: str) -> None:
        """A path that leads nowhere keeps nothing, and is reported afterwards."""
        payload = {"a": {"b": 1, "x": 2}, "list": [{"x": 1}], "y": {"z": 3}}
        with pytest.raises(KeyError, match="the rest was stripped") as caught:
            strip(payload, keep=["y.w", "a.b", path])
        assert payload == {"a": {"b": 1}}
        assert repr(path) in str(caught.value)
        assert "'y.w'" in str(caught.value)

    def test_empties_what_others_hold(self, no_collector: None) -> None:
        """Lists, queues and user mappings inside are emptied too, at any depth."""
        tensor, ref = watched()
        shared: list[Any] = [tensor]
        queue = collections.deque([tensor])
        mapping = collections.UserDict({"x": [tensor]})
        strip({"a": [{"b": shared}], "queue": queue, "mapping": mapping})
        del tensor
        assert (shared, len(queue), len(mapping)) == ([], 0, 0)
        assert ref() is None

    def test_leaves_raw_buffers_alone(self) -> None:
        """A buffer is dropped from its mapping; its bytes are not ours to resize."""
        numbers, raw = array.array("d", [1.0]), bytearray(b"abc")
        view = memoryview(raw)
        payload = {"numbers": numbers, "raw": raw, "deep": [numbers, raw]}
        strip(payload)
        assert payload == {}
        assert numbers.tolist() == [1.0]
        assert bytes(view) == b"abc"

    def test_keeps_a_path_also_where_its_parent_appears_twice(self) -> None:
        """What is kept is not touched, wherever else it or its parent appears."""
        inner = {"deltas": [1], "pixels": [2]}
        payload = {"first": inner, "second": inner, "third": [inner, inner["deltas"]]}
        strip(payload, keep=["first.deltas"])
        assert payload == {"first": {"deltas": [1]}}
        assert inner == {"deltas": [1]}

    def test_ends_for_containers_that_hold_themselves(self) -> None:
        """Cycles are emptied like anything else, and kept like anything else."""
        payload: dict[str, Any] = {"x": [1]}
        payload["self"] = payload
        payload["list"] = [payload]
        strip(payload, keep=["x"])
        assert payload == {"x": [1]}
        kept: dict[str, Any] = {"k": {}}
        kept["k"]["self"] = kept["k"]
        strip(kept, keep=["k"])
        assert kept["k"]["self"] is kept["k"]

    def test_empties_what_is_nested_deep(self, no_collector: None) -> None:
        """Depth is no limit, neither of what is stripped nor of what is kept."""
        tensor, ref = watched()
        payload: dict[str, Any] = {"end": tensor}
        kept: dict[str, Any] = {"end": 1}
        for _ in range(100_000):
            payload, kept = {"x": [payload]}, {"x": [kept]}
        del tensor
        strip({"payload": payload, "kept": kept}, keep=["kept"])
        assert ref() is None
        assert payload == {}
        assert kept["x"][0]["x"]


def test_forgets_payload_of_an_error_but_not_its_lines(no_collector: None) -> None:
    """An error that is kept keeps its traceback, and no local of a finished frame."""
    tensor, ref = watched()

    def encode(box: Payload[Tensor]) -> None:
        value = box.take()
        raise OSError(type(value).__name__)

    box = Payload(tensor)
    del tensor
    with pytest.raises(OSError, match="Tensor") as caught:
        encode(box)
    assert ref() is not None
    Payload.forget(caught.value)
    assert ref() is None
    assert "encode" in "".join(traceback.format_exception(caught.value))


def test_forgets_nothing_of_a_coroutine_that_goes_on() -> None:
    """A frame that an error came through and that is only suspended goes on."""
    errors: list[OSError] = []

    @types.coroutine
    def pause() -> Generator[None, None, None]:
        yield

    async def survive() -> Tensor:
        tensor = Tensor()
        try:
            raise OSError("kept elsewhere")
        except OSError as error:
            errors.append(error)
            await pause()
        return tensor

    going_on = survive()
    going_on.send(None)
    Payload.forget(errors[0])
    with pytest.raises(StopIteration) as done:
        going_on.send(None)
    assert isinstance(done.value.value, Tensor)


@pytest.mark.anyio
class TestHandOff:
    """The payload is dead when hand-off returns, without any help of a collector."""

    @pytest.mark.parametrize("way", ["success", "error", "caught", "cancelled"])
    async def test_leaves_nothing_behind(self, no_collector: None, way: str) -> None:
        """On success, on an error that is kept, and on cancellation alike."""
        kept: list[BaseException] = []
        tensor, ref = watched()
        sent = anyio.Event()

        async def encode(payload: Payload[Tensor]) -> None:
            tensor = payload.take()
            await checkpoint()
            assert tensor
            if way == "error":
                raise OSError("refused")
            if way == "caught":
                try:
                    raise OSError("refused")
                except OSError:
                    del tensor
                    await checkpoint()
            sent.set()
            if way == "cancelled":
                await anyio.sleep_forever()

        async with SessionRegistry() as sessions:
            with anyio.CancelScope() as scope:
                try:
                    with sessions.open("a") as session:
                        box = session.box(tensor, nbytes=1)
                        del tensor
                        if way == "cancelled":
                            scope.cancel()
                        await session.start(lambda: encode(box), timeout=0.05)
                except OSError as error:
                    kept.append(error)
            await session.quiet()
            assert ref() is None
            assert len(kept) == (way == "error")
            if kept:
                assert "encode" in "".join(traceback.format_exception(kept[0]))

    async def test_forgets_frames_of_nested_errors(self, no_collector: None) -> None:
        """Causes, contexts and groups hold frames as well, and lose their locals."""
        tensor, ref = watched()

        async def fail(box: Payload[Tensor]) -> None:
            tensor = box.take()
            try:
                try:
                    raise KeyError("inner")
                except KeyError as inner:
                    raise ValueError("outer") from inner
            except ValueError as outer:
                errors = [outer, OSError(str(len([tensor])))]
                raise ExceptionGroup("several", errors) from None

        async with SessionRegistry() as sessions:
            with pytest.raises(ExceptionGroup) as caught:
                with sessions.open("a") as session:
                    box = session.box(tensor)
                    del tensor
                    await session.start(lambda: fail(box))
            assert ref() is None
            assert isinstance(caught.value.exceptions[0].__cause__, KeyError)
