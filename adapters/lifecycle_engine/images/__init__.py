"""Pictures: what their headers promise, what they cost, and how they are decoded."""

from lifecycle_engine._extra import need

need("PIL")
