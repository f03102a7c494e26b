"""The HTTP APIs: the shape of each request and of every response."""

from lifecycle_engine._compat import require_packages

require_packages("pydantic")
