"""The demo: a real server, a real engine, and 32 clients who cannot be relied on.

Nothing is imported here; `lifecycle_engine.demo.run` is where it starts.
"""
