"""What `conformance.py` serves with LitServe, whose workers import it by its name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import conformance
import litserve
from pace import PAUSE, work


class Chat(litserve.LitAPI):
    """Generates as many tokens as a request asks for, and four by default."""

    def setup(self, device: str) -> None:
        """Need nothing."""

    def predict(self, request: Any) -> Iterator[str]:
        """Decode the pictures of a conversation, and generate."""
        messages = [message.model_dump() for message in request.messages]
        images = conformance.decode(messages)
        for _ in range(request.max_tokens or 4):
            time.sleep(PAUSE)
            work()
            yield "word "
        images.clear()


def serve(port: int, server_class: Any = litserve.LitServer) -> None:
    """Serve until interrupted."""
    server = server_class(Chat(spec=litserve.OpenAISpec()), accelerator="cpu")
    server.run(host="127.0.0.1", port=port, generate_client_file=False)
