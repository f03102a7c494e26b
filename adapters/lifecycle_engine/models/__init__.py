"""Checkpoints under transformers: loading, KV cache, graphs, sampling, copies."""
