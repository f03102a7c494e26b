"""A small load on a running server: how fast it is, and whom it refuses."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import openai


@dataclass(slots=True)
class Load:
    """What a load run saw.

    Attributes:
        first: Seconds to the first token, of each request that was answered.
        whole: Seconds to the end, of the same.
        tokens: Pieces of text that came.
        refused: Requests that were not answered, by status, or by the kind of error.
        seconds: How long the run took.
    """

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The report, one line for each figure."""
        answered = len(self.whole)
        seconds = self.seconds or 1.0
        lines = [
            f"answered   {answered} of {answered + self.refused.total()}",
            (
                f"throughput {answered / seconds:.1f} requests/s, "
                f"{self.tokens / seconds:.0f} tokens/s"
            ),
        ]
        for name, taken in (("first token", self.first), ("whole", self.whole)):
            if len(taken) > 1:
                cuts = statistics.quantiles(taken, n=100, method="inclusive")
                shown = (f"p{at} {1000 * cuts[at - 1]:.0f} ms" for at in (50, 90, 99))
                lines.append(f"{name:<10} {', '.join(shown)}")
        lines += [
            f"refused    {count} x {what}" for what, count in self.refused.items()
        ]
        return lines


async def run(
    url: str,
    *,
    requests: int,
    clients: int,
    tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> Load:
    """Send streamed requests of text, so many at a time, without retries.

    Args:
        url: The server's, without a path.
        requests: How many in all.
        clients: How many at a time.
        tokens: Length of each answer.
        advance: Called when one has ended.

    Raises:
        openai.APIConnectionError: Nobody listens there.

    Cancellation:
        Requests under way are left.
    """
    load, left = Load(), iter(range(requests))
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        model = (await client.models.list()).data[0].id

        async def work() -> None:
            for _ in left:
                await _ask(client, model, tokens, load)
                advance()

        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(clients):
                tasks.start_soon(work)
        load.seconds = time.perf_counter() - began
    return load


async def _ask(client: openai.AsyncOpenAI, model: str, tokens: int, load: Load) -> None:
    began, first = time.perf_counter(), 0.0
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Say something"}],
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter() - began
                load.tokens += 1
    except openai.APIStatusError as error:
        load.refused[str(error.status_code)] += 1
    except openai.APIError as error:
        load.refused[error.code or type(error).__name__] += 1
    else:
        load.first.append(first)
        load.whole.append(time.perf_counter() - began)
