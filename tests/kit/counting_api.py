"""A LitServe API that answers whole, and not before it is no longer wanted."""

from __future__ import annotations

from typing import Any

from litserve import LitAPI


class Count(LitAPI):
    """Counts."""

    def predict(self, request: Any) -> Any:
        """Count for as long as the request is wanted."""
        count = 0
        while request["entry"] in self.wanted:
            count += 1
        return count
