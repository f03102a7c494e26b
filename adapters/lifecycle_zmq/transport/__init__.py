"""Transports of the engine link."""
