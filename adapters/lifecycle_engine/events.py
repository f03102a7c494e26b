"""What an engine does, as frozen facts for the observers of the core's events.

The engine is another process and counts by itself; the server asks it now and then
while there are requests, so that there is an event a second and none a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lifecycle.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasured(Event):
    """What an engine did since the event before, and how it stands.

    Attributes:
        engine: Its number; ``"0"`` if there is only one.
        interval_s: Seconds that the counts below are of.
        steps: Of the scheduler.
        step_s: Seconds of one, on average; 0 if there was none.
        prefill_tokens: Prompt tokens that were read.
        prefill_s: Seconds in the model for them.
        decode_tokens: Tokens that were made after the first ones.
        decode_s: Seconds in the model for them.
        batch: Requests of one decode step, on average; 0 if there was none.
        tokens_per_s: Tokens that were made, first ones included, of all requests.
        waiting: Requests in line now.
        prefilling: Those whose prompt is being read.
        running: Those that stream.
        slots_free: KV slots that a request could take.
        kv_used: Share of the KV positions that requests hold, from 0 to 1.
        payload_bytes: Tensors that the engine holds for prompts.
        device_bytes: Memory in use on the device; ``None`` where there is none.
    """

    engine: str
    interval_s: float
    steps: int
    step_s: float
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    batch: float
    tokens_per_s: float
    waiting: int
    prefilling: int
    running: int
    slots_free: int
    kv_used: float
    payload_bytes: int
    device_bytes: int | None


class Measures:
    """Turns what an engine tells of itself, again and again, into events."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, dict[str, float]]] = {}

    def idle(self, now: float) -> None:
        """Take note that nothing was done until *now*."""
        for name, (_, counted) in self._before.items():
            self._before[name] = now, counted

    def events(self, status: Mapping[str, Any], now: float) -> Iterator[EngineMeasured]:
        """Yield an event for each engine that told its counters before.

        One that began anew has counted from there only.

        Args:
            status: What `Engine.status` returned; one of several engines has each
                of them under ``replicas``. A backend of another kind is passed over.
            now: Seconds, of a clock that does not go back.
        """
        several = status.get("replicas", {"0": status})
        for name, told in several.items():
            backend = told.get("backend", {})
            if "times" not in backend:
                continue
            counted = _counted(backend)
            since, before = self._before.get(name, (None, {}))
            self._before[name] = now, counted
            if since is None:
                continue
            # Each is looked at: a new one may have made more steps of less.
            if any(counted[each] < before[each] for each in counted):
                before = dict.fromkeys(counted, 0)
            done = {each: counted[each] - before[each] for each in counted}
            yield _event(name, now - since, done, backend)


def _counted(backend: Mapping[str, Any]) -> dict[str, float]:
    times = backend["times"]
    return {
        "steps": backend["steps"],
        "tokens": backend["tokens"],
        "step_seconds": times["step_seconds"],
        **{
            f"{kind}_{count}": times[kind][count]
            for kind in ("prefill", "decode")
            for count in ("runs", "tokens", "seconds")
        },
    }


def _event(
    name: str, interval: float, done: Mapping[str, Any], backend: Mapping[str, Any]
) -> EngineMeasured:
    return EngineMeasured(
        engine=name,
        interval_s=interval,
        steps=done["steps"],
        step_s=_by(done["step_seconds"], done["steps"]),
        prefill_tokens=done["prefill_tokens"],
        prefill_s=done["prefill_seconds"],
        decode_tokens=done["decode_tokens"],
        decode_s=done["decode_seconds"],
        batch=_by(done["decode_tokens"], done["decode_runs"]),
        tokens_per_s=_by(done["tokens"], interval),
        waiting=backend["waiting"],
        prefilling=backend["prefilling"],
        running=backend["running"],
        slots_free=backend["slots_free"],
        kv_used=backend["kv_used"],
        payload_bytes=backend["payload_bytes"],
        device_bytes=backend["runner"].get("device_bytes"),
    )


def _by(amount: float, count: float) -> float:
    return amount / count if count else 0.0
