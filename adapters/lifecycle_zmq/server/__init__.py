"""The engine's end: its loop around a backend, and what it knows of its streams."""
