"""The API process's end: what it knows of its streams, and what it says of them."""
