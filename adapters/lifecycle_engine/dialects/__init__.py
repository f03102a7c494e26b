"""The protocols that clients speak: what they ask, and the shape of every answer."""

from lifecycle_engine._extra import need

need("pydantic")
