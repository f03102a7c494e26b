"""Many made-up requests to every endpoint, and a table of what came of them.

``python tests/http/attack.py [CASES] [SEED]``; see `make attack`.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

from schema_cases import attack, operations, target


async def main(cases: int, seed: int) -> None:
    """Attack a server of our own; any finding is raised."""
    async with target() as server:
        url = f"http://127.0.0.1:{server.port}"
        for operation in await asyncio.to_thread(operations, url):
            once = partial(attack, url, operation, cases=cases, seed=seed)
            tally = await asyncio.to_thread(once)
            told = ", ".join(f"{n} x {s}" for s, n in sorted(tally.statuses.items()))
            slowest = f"slowest {tally.slowest:.2f} s"
            print(
                f"{operation.label}: {tally.cases} cases, {slowest}: {told}", flush=True
            )
        await server.quiet()
    print("nothing was found, and nothing is left")


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:]]
    asyncio.run(main(*(numbers + [1000, 1][len(numbers) :])))
