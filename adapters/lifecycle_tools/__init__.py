"""The ``lifecycle`` command: tools for servers of any kind, and the bundled server.

Modules::

    command    the command itself; each subcommand is imported when it runs
    top        ``lifecycle top``: the live view of a server, in a terminal
    check      ``lifecycle check``: what a server does when clients leave or attack
    proxy      ``lifecycle proxy``: admission beside a server that is not Python

``lifecycle serve`` and ``lifecycle doctor`` are commands of `lifecycle_engine`.
"""

from __future__ import annotations

from lifecycle_tools.command import main

__all__ = ("main",)
