"""One incarnation of an engine after another: how it is doing, when the next comes."""
