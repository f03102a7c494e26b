"""What docs/howto/servers.md tells users to write and to run."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "howto" / "servers.md"
# By this interpreter, which finds the server.
_COMMANDS: Final = {
    "python": (sys.executable,),
    "uvicorn": (sys.executable, "-m", "uvicorn"),
}


@dataclass(frozen=True, slots=True)
class HowTo:
    """The part of the page about one server.

    Attributes:
        code: Its first block of Python.
        environment: Variables before its last command.
        argv: That command.
    """

    code: str
    environment: dict[str, str]
    argv: tuple[str, ...]


def how_to(title: str) -> HowTo:
    """Return what the page says under a title."""
    part = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    code = re.findall(r"^```python.*?\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    shell = re.findall(r"^```sh\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    words = shlex.split(shell[-1])
    command = next(i for i, word in enumerate(words) if word in _COMMANDS)
    environment = dict(word.split("=", 1) for word in words[:command])
    argv = (*_COMMANDS[words[command]], *words[command + 1 :])
    return HowTo(code[0], environment, argv)
