"""What an engine is told of its link, in the one word after ``--endpoint``.

The address, and behind a question mark the descriptors that were passed on:
``pair:?link=5&liveness=6``, ``ipc:///run/x/engine?listener=5&liveness=6``. So a program
that hands its endpoint to `EngineServer` as it came needs not know what the link
consists of.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qsl, urlencode

from lifecycle_zmq.transport import Connect


def join(address: str, descriptors: dict[str, int]) -> str:
    """Return the endpoint that tells of `address` and of inherited descriptors."""
    return f"{address}?{urlencode(descriptors)}" if descriptors else address


def split(endpoint: str) -> tuple[str, dict[str, int]]:
    """Undo `join`; an address without descriptors is an endpoint, too."""
    address, _, query = endpoint.partition("?")
    return address, {name: int(value) for name, value in parse_qsl(query)}


def connect_to(address: str) -> Connect:
    """Return what makes a link of ZeroMQ, which is imported for no other."""
    try:
        from lifecycle_zmq.transport.zmq_client import Link
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'an ipc:// link needs {error.name}; pip install "anyio-lifecycle[zmq]"',
            name=error.name,
        ) from None
    return partial(Link, address)
