"""A request in the engine: its parsing, its scheduling state and the waiting queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lifecycle_engine.core.model_runner import Prompt, Runner, Sampling
from lifecycle_zmq import Backend, Finish, Merge, Output, RequestRejected

# The only contact with the transport: another transport changes this line alone.
__all__ = ("Backend", "Finish", "Merge", "Output", "RequestRejected")

T = TypeVar("T")
N = TypeVar("N", int, float)
# A conversation: its tenant and the tenant's own name for it.
ConversationKey = tuple[str, str, str]

_FIELDS = frozenset(
    {
        "client",
        "input_ids",
        "last_turn",
        "logprobs",
        "max_tokens",
        "min_p",
        "seed",
        "session",
        "stop_ids",
        "temperature",
        "tenant",
        "timeout",
        "top_k",
        "top_p",
    }
)
_MAX_STOP_IDS = 256
_MAX_TEMPERATURE = 100.0
_MAX_LOGPROBS = 20
_MAX_TOP_K = 2**31 - 1
_MAX_SEED = 2**63 - 1
_MAX_NAME = 256
_MAX_TIMEOUT = 86400.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A validated request that the runner can run.

    Attributes:
        prompt: The runner's view of the request.
        max_tokens: At least 1; fits into a slot together with the prompt.
        stop_ids: Tokens that end the stream and are not part of it.
        nbytes: Size of the tensors.
        tenant: Owner of the request, within its client; tenants take turns.
        client: Its sender; clients get free slots round-robin.
        timeout: Seconds from the start until the deadline; ``None`` is no deadline.
        tensors: Names of the tensors that the request arrived with.
        session: The tenant's name for the conversation that this is a turn of. The
            next turn may resume from this turn's slot.
        last_turn: No further turn follows, so the slot is not cached.
    """

    prompt: Prompt
    max_tokens: int
    stop_ids: frozenset[int]
    nbytes: int
    tenant: str = field(default="", repr=False)
    client: str = field(default="", repr=False)
    timeout: float | None = None
    tensors: tuple[str, ...] = ()
    session: str | None = field(default=None, repr=False)
    last_turn: bool = False

    @property
    def owner(self) -> tuple[str, str]:
        """The client and the tenant."""
        return self.client, self.tenant


def parse_request(
    request: Mapping[str, Any],
    tensors: Mapping[str, memoryview],
    runner: Runner,
    *,
    max_tokens: int | None = None,
) -> EngineRequest:
    """Validate a request map against a runner's limits.

    Types are exact: over a wire, ``True`` for 1 or a float for a count is a client's
    mistake, so it is rejected rather than converted.

    Args:
        request: ``input_ids`` and ``max_tokens``; optionally ``stop_ids``, the fields
            of `Sampling`, ``client`` (the tenant by default), ``tenant``, ``timeout``,
            ``session`` and ``last_turn``.
        tensors: Buffers by name. The mapping is copied, the buffers are not.
        runner: The runner whose limits apply.
        max_tokens: Upper limit of a request's ``max_tokens``; ``None`` is the length
            of a slot.

    Raises:
        RequestRejected: ``invalid_request``, ``context_length_exceeded`` or
            ``invalid_tensors``.
    """
    if unknown := set(request) - _FIELDS:
        known = ", ".join(sorted(_FIELDS))
        raise _invalid(f"{len(unknown)} unknown fields; known are {known}")
    ids = _prompt_ids(request, runner)
    stop_ids = _stop_ids(request, runner)
    count = _max_tokens(request, max_tokens)
    _check_length(len(ids), count, runner.max_length)
    tenant, timeout = _name(request, "tenant"), _timeout(request)
    session = None
    if request.get("session") is not None:
        session = _name(request, "session")
    last = _typed(request, "last_turn", bool, default=False)
    resumable = session is not None and not last
    prompt = Prompt(ids, dict(tensors), _sampling(request), session=resumable)
    try:
        runner.check(prompt)
    except ValueError as error:
        prompt.tensors.clear()
        raise RequestRejected("invalid_tensors", str(error)) from None
    nbytes = sum(memoryview(tensor).nbytes for tensor in tensors.values())
    return EngineRequest(
        prompt,
        count,
        stop_ids,
        nbytes,
        tenant=tenant,
        client=_name(request, "client") or tenant,
        timeout=timeout,
        tensors=tuple(tensors),
        session=session,
        last_turn=last,
    )


def _prompt_ids(request: Mapping[str, Any], runner: Runner) -> list[int]:
    ids = _token_ids(request, "input_ids", runner.vocab_size)
    if not ids:
        raise _invalid("input_ids is empty; at least one token is needed")
    return ids


def _stop_ids(request: Mapping[str, Any], runner: Runner) -> frozenset[int]:
    ids = _token_ids(request, "stop_ids", runner.vocab_size)
    if len(ids) > _MAX_STOP_IDS:
        raise _invalid(f"{len(ids)} stop_ids; at most {_MAX_STOP_IDS}")
    return frozenset(ids)


def _check_length(prompt: int, count: int, limit: int) -> None:
    if prompt + count > limit:
        raise RequestRejected(
            "context_length_exceeded",
            f"{prompt} prompt tokens and {count} max_tokens are {prompt + count}; "
            f"the limit is {limit}: shorten the prompt or max_tokens",
        )


def _invalid(message: str) -> RequestRejected:
    return RequestRejected("invalid_request", message)


def _token_ids(request: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    ids = _typed(request, name, list, [])
    if any(type(token) is not int for token in ids):
        raise _invalid(f"{name} has elements that are not int")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise _invalid(f"{name} has ids outside of 0 to {vocab_size - 1}")
    return ids


def _max_tokens(request: Mapping[str, Any], limit: int | None) -> int:
    count = _typed(request, "max_tokens", int, None)
    if count < 1 or (limit is not None and count > limit):
        bound = "1 or more" if limit is None else f"1 to {limit}"
        raise _invalid(f"max_tokens is {count}; expected {bound}")
    return count


def _sampling(request: Mapping[str, Any]) -> Sampling:
    temperature = _number(request, "temperature", 0.0, high=_MAX_TEMPERATURE)
    top_p = _number(request, "top_p", 1.0, high=1.0)
    min_p = _number(request, "min_p", 0.0, high=1.0)
    seed = _count(request, "seed", high=_MAX_SEED)
    logprobs = _count(request, "logprobs", high=_MAX_LOGPROBS)
    top_k = _count(request, "top_k", high=_MAX_TOP_K) or 0
    return Sampling(temperature, top_p, seed, logprobs, top_k, min_p)


def _timeout(request: Mapping[str, Any]) -> float | None:
    if request.get("timeout") is None:
        return None
    seconds = _number(request, "timeout", 0.0, high=_MAX_TIMEOUT)
    if not seconds:
        raise _invalid("timeout is 0.0; expected a positive number, or none")
    return seconds


def _name(request: Mapping[str, Any], name: str) -> str:
    value = _typed(request, name, str, "")
    if len(value) > _MAX_NAME:
        raise _invalid(f"{name} has {len(value)} characters; at most {_MAX_NAME}")
    return value


def _count(request: Mapping[str, Any], name: str, *, high: int) -> int | None:
    return None if request.get(name) is None else _number(request, name, 0, high=high)


def _number(request: Mapping[str, Any], name: str, default: N, *, high: N) -> N:
    value = _typed(request, name, type(default), default)
    if not 0 <= value <= high:  # true for NaN, too
        raise _invalid(f"{name} is {value}; expected 0 to {high}")
    return value


def _typed(request: Mapping[str, Any], name: str, kind: type[T], default: Any) -> T:
    value = request.get(name, default)
    if type(value) is not kind:
        got = type(value).__name__
        raise _invalid(f"{name} is a {got}; expected {kind.__name__}")
    return value


@dataclass(slots=True, eq=False)
class Task:
    """The scheduling state of one request.

    Attributes:
        key: The stream's key on the link.
        request: The validated request.
        payload: Bytes of tensors that it still holds.
        deadline: Deadline on the scheduler's clock.
        slot: Its slot while it is in prefill or decodes.
        prefilled: Prompt tokens that are in the slot.
        resumed: Those of them that came from the cached slot of the turn before.
        stripped: No further chunk needs the tensors, and they are gone.
        emitted: Number of items emitted.
    """

    key: str
    request: EngineRequest
    payload: int
    deadline: float | None
    slot: int | None = None
    prefilled: int = 0
    resumed: int = 0
    stripped: bool = False
    emitted: int = 0

    @property
    def positions(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt.input_ids)

    @property
    def remaining(self) -> int:
        """Prompt tokens that are not in the slot yet."""
        return self.positions - self.prefilled

    @property
    def conversation(self) -> ConversationKey | None:
        """The conversation that this request is a turn of."""
        if self.request.session is None:
            return None
        return *self.request.owner, self.request.session

    def restart_prefill(self) -> None:
        """Make the prompt be prefilled from the start, in another slot."""
        self.prefilled, self.resumed, self.stripped = 0, 0, False

    def first_items(self) -> list[Any]:
        """Return the items that are streamed once, before the first output."""
        if self.emitted or not self.resumed:
            return []
        return [{"cached_tokens": self.resumed}]

    @property
    def replayable(self) -> bool:
        """Whether the prompt can still be prefilled from its start."""
        return not (self.stripped and self.request.tensors)


class RequestQueue(Generic[T]):
    """A fair queue: clients take turns, then the tenants of a client, each FIFO.

    A client with one request waits behind at most one request of every other client,
    however many of them are queued, and however many tenants those name.
    """

    __slots__ = ("_clients", "_owners")

    def __init__(self) -> None:
        # Dicts keep the order and remove from the middle in constant time.
        self._clients: dict[str, dict[str, dict[str, T]]] = {}
        self._owners: dict[str, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, key: str) -> bool:
        return key in self._owners

    def __iter__(self) -> Iterator[T]:
        for tenants in self._clients.values():
            for queue in tenants.values():
                yield from queue.values()

    def push(self, key: str, owner: tuple[str, str], item: T) -> None:
        """Append an item to the queue of its *owner*, a client and a tenant of it.

        Raises:
            ValueError: The key is already in the queue.
        """
        if key in self._owners:
            raise ValueError("the key is already in the queue; remove it first")
        client, tenant = self._owners[key] = owner
        self._clients.setdefault(client, {}).setdefault(tenant, {})[key] = item

    def push_front(self, key: str, owner: tuple[str, str], item: T) -> None:
        """Insert an item at the head of its owner's queue, as after a preemption.

        Raises:
            ValueError: The key is already in the queue.
        """
        self.push(key, owner, item)
        client, tenant = owner
        queue = self._clients[client][tenant]
        self._clients[client][tenant] = {key: queue.pop(key), **queue}

    def remove(self, key: str) -> T | None:
        """Remove and return an item; ``None`` if the key is not in the queue."""
        if key not in self._owners:
            return None
        client, tenant = self._owners.pop(key)
        tenants = self._clients[client]
        item = tenants[tenant].pop(key)
        if not tenants[tenant]:
            del tenants[tenant]
        if not tenants:
            del self._clients[client]
        return item

    @property
    def clients(self) -> list[str]:
        """Clients with queued items, the next one to be served first."""
        return list(self._clients)

    def pop(self, client: str | None = None) -> T:
        """Take a client's next item; the client then goes to the end of the round.

        Args:
            client: A client with queued items; ``None`` is the next one in the round.

        Raises:
            LookupError: The queue is empty, or has no item of that client.
        """
        if not self._clients:
            raise LookupError("the queue is empty")
        client = next(iter(self._clients)) if client is None else client
        tenants = self._clients.pop(client)
        tenant = next(iter(tenants))
        queue = tenants.pop(tenant)
        key = next(iter(queue))
        item = queue.pop(key)
        del self._owners[key]
        if queue:
            tenants[tenant] = queue
        if tenants:
            self._clients[client] = tenants
        return item
