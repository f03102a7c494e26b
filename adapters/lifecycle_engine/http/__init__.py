"""The socket side: uvicorn with limits on connections, and fetching over https."""

from lifecycle_engine._extra import need_server

need_server()
