"""Memory that the client and the engine process share."""
