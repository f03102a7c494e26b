"""One gate for all worker processes of a host."""

# A map of the package; arrows point to what a module imports.
#
#   gate -> member                    the public class; this worker among the others
#     -> leader                       one epoch of the worker that serves all
#     -> wire, rows, loop, request    frames, files and locks, the thread, one request

from __future__ import annotations

from .gate import SharedGate

__all__ = ("SharedGate",)

SharedGate.__module__ = __name__
