"""How many times the usual number of examples property tests run."""

from __future__ import annotations

import os

# EXAMPLES=20 for a night; what it finds becomes a test of its own.
TIMES = int(os.environ.get("EXAMPLES", "1"))
