"""Pictures: what their headers promise, what they cost, and how they are decoded."""
