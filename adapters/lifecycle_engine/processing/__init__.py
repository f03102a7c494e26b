"""From a chat to an engine request, and from tokens to text."""
