"""Look for a broken promise in whatever ``lifecycle`` is on the path.

    python tests/sim/hunt.py [--seconds 10]

Each harness in turn, the cheap ones first, until one fails or the time is up.
Prints what was found as one line of JSON, and exits with 1 if it was anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import scenarios
import soak
import world
from exploration import explore, explore_trio
from reentrancy import reenter_everywhere

from lifecycle import _gate, _lease, _lock, _queues
from lifecycle.testing import (
    cancel_everywhere,
)

_GATE = (_gate, _lease, _lock, _queues)

Trial = tuple[str, Callable[[], object]]


def trials() -> Iterator[Trial]:
    """Everything there is to try, in the order in which it pays."""
    for scenario in scenarios.EXPLORED:
        for search in (explore, explore_trio):
            yield (
                f"{search.__name__} {scenario.__name__}",
                partial(search, scenario, delays=1),
            )
    for cancelled in scenarios.CANCELLED:
        yield (
            f"cancel_everywhere {cancelled.__name__}",
            partial(cancel_everywhere, cancelled, timeout=2.0),
        )
    for seed in range(400):
        yield f"world {seed}", partial(world.run, seed)
    for seed in range(100):
        yield f"world {seed} on trio", partial(world.run, seed, backend="trio")
    for reentered in scenarios.REENTERED:
        yield (
            f"reenter_everywhere {reentered.__name__}",
            partial(reenter_everywhere, reentered, _GATE),
        )
    for seed in range(400, 1_000):
        yield f"world {seed}", partial(world.run, seed)
    for seed in range(3):
        yield f"each fault in world {seed}", partial(_sweep, seed)
    for seed in count(1_000):
        yield f"world {seed}", partial(world.run, seed)


def _sweep(seed: int) -> None:
    verdict = soak.work(soak.Job("asyncio", seed, 1, sweep=1))
    assert verdict.failure is None, verdict.failure.splitlines()[-1]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of processor time")
    seconds = parser.parse_args().seconds
    gc.disable()
    logging.disable()
    for number, (name, trial) in enumerate(trials(), start=1):
        if number % 200 == 0:
            gc.collect()
        try:
            trial()
        except BaseException as error:  # noqa: BLE001 - any failure is a find
            print(json.dumps(_found(name, number, error)))
            return 1
        if time.process_time() > seconds:
            break
    print(json.dumps({"trials": number, "seconds": round(time.process_time(), 2)}))
    return 0


def _found(name: str, number: int, error: BaseException) -> dict[str, object]:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return {
        "by": name,
        "trials": number,
        "seconds": round(time.process_time(), 2),
        "error": f"{type(error).__name__}: {error}".splitlines()[0][:150],
    }


if __name__ == "__main__":
    sys.exit(main())
