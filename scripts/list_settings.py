"""Write docs/reference/server_config.md: every setting of the server, in tables.

With ``--check`` it writes nothing, and fails where the page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lifecycle_engine.config import SECTIONS, Setting, settings_of

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/server_config.md"
MARK = "<!-- The tables below are written by scripts/list_settings.py. -->\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or compare it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    before = PAGE.read_text(encoding="utf-8")
    after = before.partition(MARK)[0] + MARK + tables()
    if check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


def tables() -> str:
    """Return a heading and a table for each section."""
    lines: list[str] = []
    for name, section in SECTIONS.items():
        about = str(section.__doc__).partition("\n")[0]
        lines += ["", f"## `[{name}]`", "", about, ""]
        lines += [
            "| setting | default | what it sets |",
            "| --- | --- | --- |",
        ]
        lines += [row(setting) for setting in settings_of(section)]
    return "\n".join(lines) + "\n"


def row(setting: Setting) -> str:
    """Return one setting as a row: its key, option and variable below one another."""
    default = f"`{setting.shown_default}`" if setting.shown_default else ""
    names = f"`{setting.key}`<br>`{setting.option}`<br>`{setting.variable}`"
    # As code, an option keeps its hyphens, and a line is not broken behind them.
    about = re.sub(r"(?<![\w`-])--[a-z][a-z-]*", r"`\g<0>`", setting.help)
    return f"| {names} | {default} | {about} |"


if __name__ == "__main__":
    sys.exit(main())
