"""One gate for all worker processes of a host."""
