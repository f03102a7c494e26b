from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lifecycle_engine import Emitted, Scheduler, SimRunner
from lifecycle_zmq import Finish


class WrongRunner(SimRunner):
    """Returns a wrong value in place of one item, once."""

    def __init__(self) -> None:
        super().__init__(slots=4, max_length=60, sleep=lambda _: None)
        self.instead: Any = None
        self.at = "nowhere"

    def prefill(self, *args: Any) -> Any:
        emitted = super().prefill(*args)
        return self._replace(emitted) if self.at == "prefill" else emitted

    def decode(self, slots: Sequence[int]) -> Any:
        made = super().decode(slots)
        if self.at == "decode":
            made[1] = self._replace(made[1])
        return made

    def _replace(self, _made: Any) -> Any:
        self.at = "nowhere"
        return self.instead


class Word(int):
    """An int subclass, such as array elements are."""


BAD = {
    "tuple": ((7,), "the runner returned a tuple, not an Emitted"),
    "none": (None, "None"),
    "token": (Emitted([7], "7"), "token of an Emitted is a str, not int or NoneType"),  # type: ignore[arg-type]
    "unhashable": (Emitted([7], [7]), "token of an Emitted is a list"),  # type: ignore[arg-type]
    "word": (Emitted([7], Word(7)), "token of an Emitted is a Word"),
    "last": (Emitted([7], 7, last=[]), "last of an Emitted is a list, not bool"),  # type: ignore[arg-type]
    "error": (ValueError("secret words"), "ValueError"),
}


def ends(scheduler: Scheduler) -> dict[str, Finish]:
    """Run until idle; return how each stream ended."""
    found = {}
    while scheduler.busy:
        for output in scheduler.step():
            if output.finish is not None:
                found[output.key] = output.finish
    return found


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("kind", BAD)
def test_invalid_item_fails_only_its_request(kind: str, at: str) -> None:
    """One of three requests fails with the reason; the others complete; all is freed."""
    runner = WrongRunner()
    scheduler = Scheduler(runner)
    for key in "abc":
        scheduler.start(key, {"input_ids": [1, 2], "max_tokens": 9}, {})
        scheduler.step()
    runner.instead, words = BAD[kind]
    runner.at = at
    if at == "prefill":
        scheduler.start("d", {"input_ids": [1, 2], "max_tokens": 9}, {})
    finished = ends(scheduler)
    bad = finished.pop("d" if at == "prefill" else "b")
    assert (bad.reason, bad.code) == ("failed", f"{at}_failed")
    assert words in (bad.message or "")
    assert "secret" not in (bad.message or "")
    assert {finish.reason for finish in finished.values()} == {"completed"}
    assert len(finished) == (3 if at == "prefill" else 2)
    assert scheduler.status()["slots_free"] == 4
    assert runner.kv_bytes == 0


def test_lazy_items_that_raise_fail_the_step() -> None:
    """A lazy result that raises half-way delivers no part of a step."""

    class Lazy(WrongRunner):
        def decode(self, slots: Sequence[int]) -> Any:
            return self._lazily(super().decode(slots))

        def _lazily(self, made: Sequence[Any]) -> Iterator[Any]:
            yield made[0]
            if self.at == "here":
                self.at = "nowhere"
                raise RuntimeError("secret")
            yield from made[1:]

    runner = Lazy()
    scheduler = Scheduler(runner)
    for key in "ab":
        scheduler.start(key, {"input_ids": [1, 2], "max_tokens": 9}, {})
        scheduler.step()
    runner.at = "here"
    finished = ends(scheduler)
    assert {finish.code for finish in finished.values()} == {"decode_failed"}
    assert scheduler.status()["slots_free"] == 4
    scheduler.start("c", {"input_ids": [1, 2], "max_tokens": 9}, {})
    assert ends(scheduler)["c"].reason == "completed"


def test_failing_runner_status_replaces_only_its_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading the status of a running engine ends no request."""
    runner = WrongRunner()
    monkeypatch.setattr(runner, "status", lambda: 1 / 0)
    status = Scheduler(runner).status()
    assert status["runner"] == {"error": "ZeroDivisionError"}
    assert status["slots_free"] == 4
