"""Find a handler that keeps every picture it receives, with one call.

Run it: python examples/who_holds.py
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio

from lifecycle import Gate
from lifecycle.debug import snapshot, who_holds

gate = Gate(bytes=64 * 2**20, name="pictures")


async def engine(pixels: bytes) -> AsyncGenerator[str, None]:
    """Stand in for a model that needs the pixels for the first word only."""
    size = len(pixels)
    del pixels
    yield f"{size} bytes"
    await anyio.sleep_forever()


async def leaky(form: dict[str, bytes]) -> None:
    """Stream an answer while a local variable keeps the form with the picture."""
    with await gate.admit(bytes=len(form["picture"])):
        async for _word in engine(form["picture"]):
            pass


async def tidy(form: dict[str, bytes]) -> None:
    """Stream the same answer, after taking the picture out of the form."""
    with await gate.admit(bytes=len(form["picture"])):
        async for _word in engine(form.pop("picture")):
            pass


async def main() -> None:
    """Send a picture to each handler, and find what holds it while they stream."""
    for handler in (leaky, tidy):
        picture = bytes(2**20)
        async with anyio.create_task_group() as requests:
            requests.start_soon(handler, {"picture": picture}, name="POST /describe")
            await anyio.wait_all_tasks_blocked()
            print(snapshot(gate))
            holders = map(str, who_holds(picture))
            print("\n".join(holders) or "nothing holds the picture")
            requests.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)
