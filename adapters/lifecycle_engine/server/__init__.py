"""The HTTP server in front of the engine."""

from lifecycle_engine._compat import require_packages

require_packages("starlette", "uvicorn", "h11", "httptools")
