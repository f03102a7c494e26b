"""Memory that both processes see, the arena or passed, and tensors over it."""
