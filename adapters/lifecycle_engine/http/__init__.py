"""The socket side: uvicorn with limits on connections, and fetching over https."""
