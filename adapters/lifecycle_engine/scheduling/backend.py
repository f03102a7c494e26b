"""What the scheduler speaks with its link.

The one place where it meets the transport: another one, or none, needs no other
change than here.
"""

from __future__ import annotations

from lifecycle_zmq import Backend, Finish, Merge, Output, RequestRejected

__all__ = ("Backend", "Finish", "Merge", "Output", "RequestRejected")
