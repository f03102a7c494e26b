"""The ``lifecycle`` command: tools for servers of any kind, and the bundled server.

Modules::

    command    the command itself; each subcommand is imported when it runs
    top        ``lifecycle top``: the live view of a server, in a terminal
    check      ``lifecycle check``: what a server does when clients leave or attack
    proxy      ``lifecycle proxy``: admission beside a server that is not Python

``lifecycle serve`` and ``lifecycle doctor`` are commands of `lifecycle_engine`.
"""

from __future__ import annotations

import sys

__all__ = ("main",)


def main() -> None:
    """Run the command; an extra that is missing, all of them too, is one line."""
    try:
        from lifecycle_tools.command import app

        app(prog_name="lifecycle")
    except ImportError as error:
        if error.name is not None and error.name.startswith("lifecycle"):
            raise
        words = str(error)
        if "install" not in words:
            words += '; pip install "anyio-lifecycle[tools]"'
        sys.stderr.write(f"{words}\n")
        sys.exit(2)
