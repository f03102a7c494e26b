"""The clients: some wait for their answer, some disconnect, some send bad input.

They use the real OpenAI SDK over a real socket. Retries are made here and not in
the SDK, so that refusals are seen and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import openai

from .traffic import PHASES, Job, Phase

TIMEOUT = 90.0
"""Seconds after which a request without an answer counts as hung."""


@dataclass(slots=True)
class DemoStats:
    """What the clients saw; every job is counted under exactly one ending.

    Attributes:
        endings: Jobs by how they ended.
        retries: Refusals with ``Retry-After``, by HTTP status.
        problems: What should not have happened, in words.
        in_flight: Size of the payloads of running requests, by number of the job.
        peak_bytes: The largest total of these sizes at any moment.
    """

    endings: Counter[str] = field(default_factory=Counter)
    retries: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def enter(self, job: Job) -> None:
        """Record that *job* was sent."""
        # What cannot be decoded would not take anything.
        decodable = job.picture if job.bad is None else None
        self.in_flight[job.number] = decodable.payload if decodable else 0
        self.peak_bytes = max(self.peak_bytes, sum(self.in_flight.values()))

    def leave(self, job: Job, ending: str) -> None:
        """Record how *job* ended."""
        del self.in_flight[job.number]
        self.endings[ending] += 1


class HungUp(Exception):
    """The client disconnected on purpose."""


@dataclass(slots=True)
class Client:
    """One client, which sends its jobs one after the other.

    Attributes:
        sdk: Shared by all clients, as in one application.
        model: The model's name.
        stats: Counts the endings.
        phase_of: The phase of a request by its id, as the server shows it, or
            ``None`` if it is not in flight.
        changed: Waits until the server's view was read again.
    """

    sdk: openai.AsyncOpenAI
    model: str
    stats: DemoStats
    phase_of: Callable[[str], Phase | None]
    changed: Callable[[], Any]

    async def work(self, jobs: Sequence[Job]) -> None:
        """Send *jobs* one after the other."""
        for job in jobs:
            self.stats.enter(job)
            ending = "hung"
            with anyio.move_on_after(TIMEOUT):
                ending = await self._send(job)
            if ending == "hung":
                self.stats.problems.append(f"request {job.number} was never answered")
            self.stats.leave(job, ending)

    async def _send(self, job: Job) -> str:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._try(job, f"demo-{job.number}-{attempt}")
            except openai.APIStatusError as error:
                if error.status_code in (429, 503):
                    self.stats.retries[error.status_code] += 1
                    await anyio.sleep(_retry_after(error))
                    continue
                return self._refused(job, error.status_code)
            except openai.APIConnectionError as error:
                self.stats.problems.append(f"request {job.number}: {error}")
                return "connection broke"
            except openai.APIError as error:
                # No status: the error came inside the stream.
                if error.code != "engine_lost":
                    self.stats.problems.append(f"request {job.number}: {error.code}")
                return f"error mid stream: {error.code}"

    def _refused(self, job: Job, status: int) -> str:
        if job.bad is None:
            self.stats.problems.append(f"request {job.number} was refused: {status}")
            return f"refused {status}"
        return f"bad input refused: {job.bad} ({status})"

    async def _try(self, job: Job, request: str) -> str:
        if job.leaves is None:
            await self._ask(job, request)
            if job.bad is not None:
                self.stats.problems.append(f"request {job.number} is bad: {job.bad}")
                return "bad input answered"
            return "answered"
        return await self._leave(job, request)

    async def _leave(self, job: Job, request: str) -> str:
        """Ask, and hang up in the phase that the job names."""
        gone: Phase | None = None
        failure: openai.OpenAIError | None = None
        async with anyio.create_task_group() as group:

            async def hang_up() -> None:
                nonlocal gone
                gone = await self._moment(job, request)
                group.cancel_scope.cancel()

            if job.leaves != "mid stream":
                group.start_soon(hang_up)
            try:
                await self._ask(job, request)
            except HungUp:
                gone = "mid stream"
            except openai.OpenAIError as error:
                failure = error  # raised below, where no group wraps it
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        # A quick answer comes before a slow client has left.
        return "answered" if gone is None else f"hung up: {gone}"

    async def _moment(self, job: Job, request: str) -> Phase:
        """Wait until *request* is in the phase in which its client leaves."""
        wanted = PHASES.index(job.leaves) if job.leaves else 0
        while True:
            await self.changed()
            phase = self.phase_of(request)
            if phase is not None and PHASES.index(phase) >= wanted:
                return phase

    async def _ask(self, job: Job, request: str) -> None:
        answer = await self.sdk.chat.completions.create(
            **job.body(self.model), extra_headers={"x-request-id": request}
        )
        if not job.stream:
            return
        async with answer:
            chunks = 0
            async for chunk in answer:
                if chunk.choices and chunk.choices[0].delta.content:
                    chunks += 1
                if job.leaves == "mid stream" and chunks >= job.after:
                    raise HungUp


def _retry_after(error: openai.APIStatusError) -> float:
    """Return the seconds that the server asks a client to wait."""
    headers = error.response.headers
    if "retry-after-ms" in headers:
        return float(headers["retry-after-ms"]) / 1000
    return float(headers.get("retry-after", 1))
