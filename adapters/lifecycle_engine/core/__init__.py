"""The engine process: scheduler, queue, slots."""
