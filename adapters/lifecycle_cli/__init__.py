"""The ``lifecycle`` command.

Modules::

    main    the command itself; each subcommand is imported when it runs
"""

from __future__ import annotations

from lifecycle_cli.main import main

__all__ = ("main",)
