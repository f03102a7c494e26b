"""Draw `docs/top.svg`: what `lifecycle top` shows of a server with faults.

    python scripts/draw_top.py

Starts the server of the tests, plants faults in it by real clients, and takes a picture
of the terminal.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from lifecycle_tools.top import Top, Viewer

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "top.svg"
SIZE = (124, 31)
sys.path.insert(0, str(ROOT / "tests" / "kit"))
# From the tests, which no type checker looks for.
live_kit: Any = import_module("live_kit")

CLIENTS = (
    ("/held", "127.0.0.7"),
    ("/held", "127.0.0.7"),
    ("/released", "127.0.0.4"),
    ("/released", "127.0.0.5"),
    ("/binding", "127.0.0.5"),
    ("/binding", "127.0.0.4"),
    ("/flood", "127.0.0.9"),
)


async def draw(port: int) -> str:
    """Return a picture of the faults in the server at *port*."""
    with ExitStack() as clients:
        with live_kit.asked(port, "/outlive", source="127.0.0.3"):
            await asyncio.sleep(1)
        for path, source in CLIENTS:
            clients.enter_context(live_kit.asked(port, path, source=source))
        app = Top(Viewer(f"127.0.0.1:{port}"))
        async with app.run_test(size=SIZE) as pilot:
            await asyncio.sleep(5)
            await pilot.pause()
            # Fonts come from the machine of the reader, as no picture loads others.
            return re.sub(
                r"@font-face \{.*?\}\s*", "", app.export_screenshot(), flags=re.DOTALL
            )


def main() -> None:
    """Draw."""
    with live_kit.live_server() as port:
        PICTURE.write_text(asyncio.run(draw(port)), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
