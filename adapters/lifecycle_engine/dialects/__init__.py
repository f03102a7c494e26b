"""The protocols that clients speak: what they ask, and the shape of every answer."""
