"""Clients as they are: some stay, some leave, some send nonsense.

They use the real OpenAI SDK over a real socket. Retries are made here and not in
the SDK, so that being told to come back later is seen and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import openai

from lifecycle_engine.demo.traffic import PHASES, Job, Phase

PATIENCE = 90.0
"""Seconds after which a request without an answer counts as hung."""


@dataclass(slots=True)
class Ledger:
    """What the clients saw; every job ends in exactly one line of it.

    Attributes:
        seen: Jobs by ending.
        told: Times that a client was told to come back later, by HTTP status.
        wrong: What should not have happened, in words.
        in_flight: What the payloads of the requests on their way would take, by
            number of the job.
        peak_bytes: The most that they would have taken at any moment.
    """

    seen: Counter[str] = field(default_factory=Counter)
    told: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def enter(self, job: Job) -> None:
        """Note that *job* is on its way."""
        # What cannot be decoded would not take anything.
        decodable = job.picture if job.bad is None else None
        self.in_flight[job.number] = decodable.payload if decodable else 0
        self.peak_bytes = max(self.peak_bytes, sum(self.in_flight.values()))

    def leave(self, job: Job, ending: str) -> None:
        """Note how *job* ended."""
        del self.in_flight[job.number]
        self.seen[ending] += 1


class HungUp(Exception):
    """The client left on purpose."""


@dataclass(slots=True)
class Client:
    """One client's way through its jobs, one at a time.

    Attributes:
        sdk: Shared by all clients, as in one application.
        model: The model's name.
        ledger: Where endings are noted.
        phase_of: The phase of a request by its id, as the server shows it, or
            ``None`` if it is not in flight.
        changed: Waits until the server's view was read again.
    """

    sdk: openai.AsyncOpenAI
    model: str
    ledger: Ledger
    phase_of: Callable[[str], Phase | None]
    changed: Callable[[], Any]

    async def work(self, jobs: Sequence[Job]) -> None:
        """Send *jobs* one after the other."""
        for job in jobs:
            self.ledger.enter(job)
            ending = "hung"
            with anyio.move_on_after(PATIENCE):
                ending = await self._send(job)
            if ending == "hung":
                self.ledger.wrong.append(f"request {job.number} was never answered")
            self.ledger.leave(job, ending)

    async def _send(self, job: Job) -> str:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._try(job, f"demo-{job.number}-{attempt}")
            except openai.APIStatusError as error:
                if error.status_code in (429, 503):
                    self.ledger.told[error.status_code] += 1
                    await anyio.sleep(_retry_after(error))
                    continue
                return self._refused(job, error.status_code)
            except openai.APIConnectionError as error:
                self.ledger.wrong.append(f"request {job.number}: {error}")
                return "connection broke"
            except openai.APIError as error:
                # No status: the error came inside the stream.
                if error.code != "engine_lost":
                    self.ledger.wrong.append(f"request {job.number}: {error.code}")
                return f"told mid stream: {error.code}"

    def _refused(self, job: Job, status: int) -> str:
        if job.bad is None:
            self.ledger.wrong.append(f"request {job.number} was refused: {status}")
            return f"refused {status}"
        return f"bad input refused: {job.bad} ({status})"

    async def _try(self, job: Job, request: str) -> str:
        if job.leaves is None:
            await self._ask(job, request)
            if job.bad is not None:
                self.ledger.wrong.append(f"request {job.number} is bad: {job.bad}")
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
