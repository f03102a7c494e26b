"""From a chat to what the engine is asked for, and from its tokens to text."""
