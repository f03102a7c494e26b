"""Request lifecycle management for streaming servers."""
