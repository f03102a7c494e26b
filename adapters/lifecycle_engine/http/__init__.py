"""The socket side: uvicorn with limits on connections, and fetching over https."""

from lifecycle_engine._extra import need

need("starlette", "uvicorn", "h11", "httptools")
