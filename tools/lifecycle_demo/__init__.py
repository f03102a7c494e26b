"""The demo: a real server, a real engine, and 32 unreliable clients.

``make demo`` or ``python -m lifecycle_demo`` runs it in a checkout. It is not part of
the wheel.
"""
