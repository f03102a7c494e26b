"""What client and server say to each other, as bytes: values, items and messages."""
