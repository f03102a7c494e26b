"""Media in requests: their limits, their size, and their decoding."""

from lifecycle_engine._compat import require_packages

require_packages("PIL")
