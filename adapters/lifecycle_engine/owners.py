"""Whose a request is, in the engine's words."""

from __future__ import annotations

import hashlib
import secrets


class Owners:
    """Names shares: by the client as the server knows it, and the user that it names.

    A client may call its users and conversations what it likes, and so may another.
    What an engine keeps for one must neither be found nor pushed out by a name that
    somebody else makes up, so the client, which nobody can make up, is in each name.
    The engine learns neither of the two.
    """

    __slots__ = ("_salt",)

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)

    def share(self, client: bytes, user: str) -> str:
        """Return the name of a share, the same for the same two while this lives."""
        digest = hashlib.blake2b(key=self._salt, digest_size=16)
        # Its length first: no two pairs are written alike.
        digest.update(len(client).to_bytes(4, "big") + client)
        digest.update(user.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
