"""The `Processor` protocol: chats in, engine requests out, tokens back to text.

A processor is synchronous and runs in a worker thread. It holds no state per request;
everything it creates is in the returned `Prepared`.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lifecycle import CostTooLarge
from lifecycle_engine._compat import generation_file, generation_options
from lifecycle_engine.errors import BadChat, BadImage

if TYPE_CHECKING:
    import numpy as np

    from lifecycle_asgi import MediaProfile
    from lifecycle_zmq import ZmqEngine


_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any) -> tuple[dict[int, bytes], bool]:
    """Return the bytes of each token, from the tokenizer's own decoder.

    Returns:
        The bytes by token id, empty for control tokens; and whether the decoder
        removes a leading space.

    Raises:
        ValueError: The decoder is of an unknown kind.
    """
    added = tokenizer.added_tokens_decoder
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        letters = byte_alphabet()
        table = {
            id_: _letters(token, letters)
            for token, id_ in tokenizer.get_vocab().items()
            if id_ not in added
        }
    elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        table = {
            id_: _word(token)
            for token, id_ in tokenizer.get_vocab().items()
            if id_ not in added
        }
    else:
        names = ", ".join(map(str, kinds))
        raise ValueError(
            f"the tokenizer's decoder is {names}; expected ByteLevel, or words with a "
            "fall-back to bytes"
        )
    for id_, token in added.items():
        table[id_] = b"" if token.special else token.content.encode()
    return table, kinds[3:] == ["Strip"]


def _letters(token: str, letters: Mapping[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:  # the decoder keeps such a token as it is
        return token.encode()


def _word(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE, " ").encode()


class ByteDetokenizer:
    """Incremental detokenizer for tokens that are byte strings.

    Each token adds its bytes; the decoder keeps at most the three bytes of an
    incomplete character. Invalid UTF-8 becomes U+FFFD, one for each maximal invalid
    part, as in the tokenizers library.
    """

    __slots__ = ("_bytes_of", "_decoder", "_strip")

    def __init__(self, bytes_of: Mapping[int, bytes], *, strip: bool = False) -> None:
        """Start a stream.

        Args:
            bytes_of: The bytes of each token id. Missing ids (control tokens, padding
                of the vocabulary) have no text.
            strip: Remove a leading space of the text.
        """
        self._bytes_of = bytes_of
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add token ids and return the text that they complete."""
        data = b"".join([self._bytes_of.get(i, b"") for i in ids])
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def spell(self, token: int) -> bytes:
        """Return the bytes of one token, independent of the stream."""
        return self._bytes_of.get(token, b"")

    def flush(self) -> str:
        """Return the rest; U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """Map the characters of a byte-level BPE to bytes.

    Printable bytes map to themselves; the others are shifted to U+0100 and above in
    order, as introduced by GPT-2.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    hidden = [byte for byte in range(256) if byte not in set(plain)]
    return letters | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


# Allowed ranges in a generation config.
_LIMITS = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31 - 1)}
_LIMITS |= {"min_p": (0, 1)}
# Unsupported options that change the sampling, with their neutral values.
_UNKNOWN = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}


class SamplingOptions(Protocol):
    """Sampling options of a request; ``None`` if not set."""

    @property
    def temperature(self) -> float | None:
        """Temperature; 0 is greedy."""

    @property
    def top_p(self) -> float | None:
        """Nucleus sampling: probability mass to sample from."""

    @property
    def top_k(self) -> int | None:
        """Number of most likely tokens to sample from."""

    @property
    def min_p(self) -> float | None:
        """Minimum probability, relative to the most likely token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDefaults:
    """Values for options that a request does not set.

    Attributes:
        max_tokens: Maximum number of tokens to generate.
        temperature: 0 is greedy. OpenAI's own default is 1.
        top_p: Probability mass to sample from; 1 is all of it.
        top_k: Number of most likely tokens to sample from; 0 and -1 are all.
        min_p: Minimum probability, relative to the most likely token.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def sampling(self, request: SamplingOptions) -> dict[str, Any]:
        """Return the sampling options of a request, completed by these defaults."""
        names = ("temperature", "top_p", "top_k", "min_p")
        options = {name: getattr(self, name) for name in names}
        for name in names:
            if (value := getattr(request, name)) is not None:
                options[name] = value
        return options | {"top_k": max(options["top_k"], 0)}


def defaults_of(checkpoint: str | Path) -> ChatDefaults:
    """Return the sampling defaults of a checkpoint's generation config.

    ``do_sample: false`` means greedy. Options that it does not set are OpenAI's
    defaults, not those of transformers' ``generate`` (such as ``top_k`` of 50), which
    no other server uses.

    Raises:
        OSError: There is no checkpoint.
        ValueError: An option is out of range or unsupported.
    """
    name = generation_file(checkpoint)
    config = generation_options(checkpoint)
    for each, neutral in _UNKNOWN.items():
        if config.get(each, neutral) not in (None, neutral):
            raise ValueError(
                f"{name} has {each}, which is not supported; remove it, or use "
                f"--sampling-defaults openai"
            )
    found = {each: config[each] for each in _LIMITS if config.get(each) is not None}
    for each, value in found.items():
        _check(name, each, value)
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return ChatDefaults(**found)


def _check(name: str, option: str, value: Any) -> None:
    low, high = _LIMITS[option]
    kinds = (int,) if option == "top_k" else (int, float)
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError(
            f"{name} has {option} of {value!r}; expected {low} to {high}: correct it, "
            f"or use --sampling-defaults openai"
        )


# Seconds between attempts to allocate in a full arena.
_RETRY_SECONDS = 0.005
_DEFAULT_CAPACITY = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        content: Text (`str`) and encoded images (`bytes`) in order.
    """

    role: str
    content: Sequence[str | bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Chat:
    """A validated request, independent of its API format.

    Attributes:
        messages: The conversation; never empty.
        max_tokens: Maximum number of tokens to generate.
        temperature: 0 is greedy.
        seed: Makes sampling reproducible.
        ignore_eos: Generate ``max_tokens`` tokens, ignoring end-of-turn tokens.
        top_p: Probability mass to sample from; 1 is all of it.
        logprobs: Number of most likely tokens to report for each token; ``None``
            reports no log probabilities at all.
        client: Client of the request; the engine schedules clients fairly.
        tenant: Tenant of the request, which is a user of the client.
        session: The tenant's conversation; the engine may reuse the KV cache of its
            previous turn.
        top_k: Number of most likely tokens to sample from; 0 is all.
        min_p: Minimum probability, relative to the most likely token.
    """

    messages: Sequence[Message] = field(repr=False)
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    top_p: float = 1.0
    logprobs: int | None = None
    client: str = field(default="", repr=False)
    tenant: str = field(default="", repr=False)
    session: str | None = field(default=None, repr=False)
    top_k: int = 0
    min_p: float = 0.0

    def request(self, input_ids: list[int], stop_ids: Sequence[int]) -> dict[str, Any]:
        """Return the request map for the engine, given the prompt's tokens."""
        return {
            "input_ids": input_ids,
            "max_tokens": self.max_tokens,
            "stop_ids": list(stop_ids),
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": self.top_k,
            "min_p": float(self.min_p),
            "seed": self.seed,
            "logprobs": self.logprobs,
            "client": self.client,
            "tenant": self.tenant,
            "session": self.session,
        }


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the engine.

    Attributes:
        request: The request map; see `Chat.request`.
        tensors: Arrays by name; the payload of the hand-off.
        prompt_tokens: ``len(request["input_ids"])``.
    """

    request: dict[str, Any] = field(repr=False)
    tensors: dict[str, np.ndarray] = field(repr=False)
    prompt_tokens: int

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(int(tensor.nbytes) for tensor in self.tensors.values())


# Allocates an array of a shape and a dtype, as `numpy.empty` does.
Empty = Callable[[Any, Any], Any]


class Detokenizer(Protocol):
    """Turns the token ids of one stream into text, in whole characters."""

    def push(self, ids: Sequence[int]) -> str:
        """Add token ids and return the text that they complete."""

    def spell(self, token: int) -> bytes:
        """Return the bytes of one token, independent of the stream."""

    def flush(self) -> str:
        """Return the rest at the end; U+FFFD for an incomplete character."""


class Processor(Protocol):
    """Turns chats into engine requests for one model.

    Attributes:
        copies: Maximum number of temporary copies of the tensors while they are
            created; they are admitted, too.
        media: What images need by their pixels, tensors and all.
    """

    copies: int
    media: MediaProfile

    def prepare(self, chat: Chat) -> Prepared:
        """Build the prompt and the payload of a chat; runs in a worker thread.

        Raises:
            BadChat: The conversation cannot become a prompt.
            BadImage: An image cannot be decoded, or is too large or too thin.
        """

    def detokenizer(self) -> Detokenizer:
        """Return a fresh detokenizer for one stream."""


def payload_capacity(payload_bytes: int | None, arena_bytes: int) -> int:
    """Return the capacity of a gate over payloads: at most that of the arena.

    Args:
        payload_bytes: Requested capacity; ``None`` is as much as possible.
        arena_bytes: Size of the arena; 0 without an arena.
    """
    if not arena_bytes:
        return payload_bytes or _DEFAULT_CAPACITY
    from lifecycle_zmq import Arena  # not needed by a processor alone

    arena_bytes = Arena.cost(arena_bytes)
    return min(payload_bytes or arena_bytes, arena_bytes)


def in_arena(engine: ZmqEngine, *, timeout: float = 2.0) -> Empty:
    """Return a function that allocates arrays in the arena of an engine.

    Args:
        engine: An engine with an arena, which exists once the engine is entered.
        timeout: Seconds to wait, in the worker thread, for a large enough free block.
            After that the array is allocated in ordinary memory, and copied at
            hand-off.
    """
    from lifecycle_zmq import ArenaFull

    def empty(shape: Any, dtype: Any) -> Any:
        import numpy as np

        deadline = time.monotonic() + timeout
        while True:
            try:
                return engine.arena.empty(shape, dtype)
            except ArenaFull:
                # The gate bounds the sum; free memory may be fragmented.
                if time.monotonic() >= deadline:
                    return np.empty(shape, dtype)
            except CostTooLarge:
                return np.empty(shape, dtype)
            time.sleep(_RETRY_SECONDS)

    return empty


S = TypeVar("S")


def without_traceback(
    method: Callable[[S, Chat], Prepared],
) -> Callable[[S, Chat], Prepared]:
    """Remove the traceback from errors that a processor raises for bad input.

    Its frames hold the chat, and so every encoded image, for as long as the error is
    referenced.
    """

    @functools.wraps(method)
    def prepare(self: S, chat: Chat) -> Prepared:
        try:
            return method(self, chat)
        except (BadChat, BadImage) as error:
            refusal = error.with_traceback(None)
        del chat
        try:
            raise refusal
        finally:
            # Breaks the reference cycle between frame and error.
            del refusal

    return prepare
