"""``python -m lifecycle_demo``: run the demo from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import anyio

from tiny_checkpoint import cached

from .run import run
from .server import ServerFailed

BYTES = 683 * 2**20
"""Less than the clients send, so that requests have to wait for admission."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status, 0 only if nothing is left behind."""
    options = _parser().parse_args(argv)
    arguments = ["--runner", options.runner, "--slots", "24"]
    arguments += ["--bytes", str(BYTES)]
    if options.runner == "torch":
        # Built before the server starts, whose start has a time limit.
        arguments += ["--checkpoint", str(cached()), "--device", options.device]
        if options.device == "cuda":
            arguments += ["--graphs", "on"]

    async def demo() -> int:
        return await run(
            arguments=arguments,
            clients=options.clients,
            requests=options.requests,
            seed=options.seed,
        )

    try:
        return anyio.run(demo)
    except ServerFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lifecycle_demo",
        description="Run a server under unreliable clients, kill its engine, and show "
        "what is left.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--runner",
        choices=("torch", "sim"),
        default="torch",
        help="torch runs a tiny model; sim simulates one and needs no torch",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where torch runs the model; on cuda with CUDA graphs",
    )
    add("--clients", type=int, default=32, help="concurrent clients")
    add("--requests", type=int, default=160, help="requests of all clients together")
    add("--seed", type=int, default=1, help="draws pictures, requests and hang-ups")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
