"""A small load test of a server: throughput, time to first token, refusals.

It measures any server that speaks OpenAI's chat completions (``--url``), or starts one
with the simulated model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import openai

from lifecycle_demo.server import ServerFailed, running


@dataclass(slots=True)
class Load:
    """Results of a load test.

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
        """Return the report, one line for each figure."""
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
        openai.APIConnectionError: No server listens there.

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


async def measure(options: argparse.Namespace) -> Load:
    """Measure the server of ``--url``, or one that runs for as long as this."""
    if options.url is not None:
        return await _measure(options.url.rstrip("/"), options)
    async with running(["--runner", "sim"]) as server:
        await server.wait_ready()
        return await _measure(server.url, options)


async def _measure(url: str, options: argparse.Namespace) -> Load:
    ended = 0

    def advance() -> None:
        nonlocal ended
        ended += 1
        if sys.stderr.isatty():
            print(f"\r{ended} of {options.requests}", end="", file=sys.stderr)

    load = await run(
        url,
        requests=options.requests,
        clients=options.clients,
        tokens=options.tokens,
        advance=advance,
    )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test and print its figures; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        load = anyio.run(measure, options)
    except ServerFailed as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    except openai.APIError as error:
        remedy = f"is a server running at {options.url}? Name it without a path"
        print(f"load: {str(error).rstrip('.')}; {remedy}", file=sys.stderr)
        return 1
    print("\n".join(load.lines()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A small load test of a server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="a running server, without a path; else starts one of its own")
    add("--requests", type=_positive, default=200, help="requests in all")
    add("--clients", type=_positive, default=16, help="concurrent requests")
    add("--tokens", type=_positive, default=32, help="tokens of each answer")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
