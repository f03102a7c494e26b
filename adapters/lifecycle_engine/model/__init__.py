"""Checkpoints under transformers."""
