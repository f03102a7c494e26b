"""What a request goes through between its parsing and its answer."""
