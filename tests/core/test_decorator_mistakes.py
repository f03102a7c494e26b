"""Common mistakes with `managed` and `scrub` are answered with the remedy."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lifecycle import Gate, SessionRegistry, managed, scrub

pytestmark = pytest.mark.anyio

SECRET = "the-secret-picture"


async def words() -> Any:
    yield "word"


def test_names_no_payload_when_scrub_lacks_its_parentheses() -> None:
    """``@scrub`` without names is refused where it is written, not at the call."""
    with pytest.raises(TypeError, match=r'write @scrub\("picture"\)'):

        @scrub  # type: ignore[arg-type]
        async def describe(picture: Any) -> Any:
            yield picture

    with pytest.raises(TypeError, match=r'write @scrub\("picture"\)'):
        scrub("picture", SECRET.encode())  # type: ignore[arg-type]
    with pytest.raises(TypeError) as mistake:
        scrub("picture")(SECRET)  # type: ignore[arg-type]
    assert SECRET not in str(mistake.value)


async def test_names_function_that_does_not_stream() -> None:
    """The error names the function as it is written, without its address."""

    def plain() -> None: ...

    async def coroutine(picture: Any) -> None: ...

    with pytest.raises(TypeError, match=r"\.plain is neither .* make it `async def`"):
        managed(gate=Gate(slots=1))(plain)  # type: ignore[type-var, arg-type]
    with pytest.raises(TypeError, match=r"\.coroutine is not a generator .*@man"):
        scrub("picture")(coroutine)  # type: ignore[arg-type]


async def test_names_function_that_returns_no_stream() -> None:
    """A ``return`` that was forgotten raises with the name of the function."""

    @managed(gate=Gate(slots=1))
    async def forgetful() -> Any: ...

    with pytest.raises(TypeError, match=r"\.forgetful returned NoneType; return the"):
        await anext(forgetful())


@pytest.mark.parametrize(
    "use",
    [
        len,
        list,
        bytes,
        pickle.dumps,
        copy.copy,
        lambda picture: picture[0],
        lambda picture: picture.shape,
        lambda picture: picture.__array__(),
        lambda picture: b"JPEG" in picture,
    ],
)
async def test_says_how_a_scrubbed_argument_is_used(use: Callable[[Any], Any]) -> None:
    """The function has the box; what is done to it instead names ``take()``."""

    @scrub("picture")
    async def describe(picture: Any) -> Any:
        assert picture  # as one asks whether there is any, and None is not boxed
        yield use(picture)

    with pytest.raises(
        (TypeError, AttributeError), match=r"Payload .* what take\(\) returns$"
    ) as mistake:
        await anext(describe(SECRET))
    assert SECRET not in str(mistake.value)


def bytes_of_call(_: object) -> int:
    return 1


async def slow_bytes(_: object) -> int:
    return 1


@pytest.mark.parametrize(
    ("odd", "remedy"),
    [
        ({"gate": 5}, "managed takes a Gate, not int"),
        ({"sessions": 5, "key": bytes_of_call}, "takes a SessionRegistry, not int"),
        ({"sessions": SessionRegistry(), "key": "id"}, "key must be a function .*str"),
        ({"gate": Gate(slots=None), "cost": slow_bytes}, "cost is called, not awaited"),
        ({"sessions": SessionRegistry(), "key": slow_bytes}, "key is called, not aw"),
        ({"cost": bytes_of_call}, "asked of a gate; name one by gate="),
        ({"cost": 5}, "asked of a gate; name one by gate="),
        ({"slots": 2}, "asked of a gate; name one by gate="),
        ({}, "nothing to do; name gate=, sessions= or scrub="),
        ({"scrub": ()}, "nothing to do; name gate=, sessions= or scrub="),
        ({"scrub": 5}, "scrub takes names of parameters, not int"),
    ],
)
def test_refuses_what_managed_cannot_use_where_it_is_written(
    odd: dict[str, Any], remedy: str
) -> None:
    """Not by the first request, or by no request ever."""
    with pytest.raises(TypeError, match=remedy):
        managed(**odd)


def test_refuses_cost_that_is_no_amount_where_it_is_written() -> None:
    """A cost that is text, negative or zero is refused by its name."""
    with pytest.raises(ValueError, match="at least one slot or one byte"):
        managed(gate=Gate(slots=None), slots=0)
    managed(gate=Gate(slots=None), cost=bytes_of_call, slots=0)
    for odd, name in (({"cost": "5"}, "cost"), ({"slots": -1}, "slots")):
        with pytest.raises(ValueError, match=f"^{name} must be "):
            managed(gate=Gate(slots=None), **odd)  # type: ignore[arg-type]


class Service:
    """What decorators decorate mostly: methods."""

    async def chat(self, prompt: str, most: int = 5, *, tenant: str = "") -> Any:
        yield prompt, most, tenant

    async def any(self, *prompts: str) -> Any:
        yield prompts

    async def leased(self, lease: object, session: object) -> Any:
        yield lease, session


def both(asked: Any) -> list[Any]:
    """Options that ask *asked* for a cost, and for a key."""
    gate, sessions = Gate(slots=None), SessionRegistry()
    return [{"gate": gate, "cost": asked}, {"sessions": sessions, "key": asked}]


@pytest.mark.parametrize(
    "asked",
    [
        len,
        lambda prompt: prompt,
        lambda: 5,
        lambda self, prompt, most, tenant, more: 5,
        lambda *, prompt: prompt,
    ],
)
def test_refuses_cost_and_key_that_lack_a_parameter(asked: Any) -> None:
    """One that forgot ``self`` would fail with each call."""
    for options in both(asked):
        option = "cost" if "cost" in options else "key"
        what = f"^{option} .* cannot take the arguments of Service.chat; write {option}"
        with pytest.raises(TypeError, match=f"{what}=lambda self, prompt, most, tena"):
            managed(**options)(Service.chat)


@pytest.mark.parametrize(
    "asked",
    [
        lambda self, prompt: 5,
        lambda _, prompt, most: 5,
        lambda _, *, prompt, tenant="": 5,
        lambda *_, **__: 5,
        max,  # a function of C without a signature
    ],
)
def test_takes_cost_and_key_of_some_calls(asked: Any) -> None:
    """Where some call may fit, the call tells."""
    wraps = functools.wraps(lambda _injected, *, more, another, one: 5)

    def injects(*given: object) -> int:
        return int(asked(*given))

    for options in both(wraps(injects)):
        managed(**options)(Service.chat)
    for options in both(asked):
        managed(**options)(Service.chat)
        managed(**options)(Service.any)
    for options in both(len):
        managed(**options)(Service.any)


def test_refuses_what_key_and_cost_return_at_the_call() -> None:
    """The error names whose they are, and not the gate or the registry."""
    wrong = managed(gate=Gate(slots=None), cost=lambda *_: "5")(Service.chat)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"what cost returns for Service.chat must be"):
        wrong(Service(), "prompt")
    wrong = managed(sessions=SessionRegistry(), key=lambda *_: None)(Service.chat)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="key returns for Service.chat .*, not NoneTyp"):
        wrong(Service(), "prompt")


def test_names_function_that_lacks_an_argument() -> None:
    """A parameter that is given with another option names the option."""
    leased: Any = managed(gate=Gate(slots=None))(Service.leased)
    words = "Service.leased: missing a required argument: "
    with pytest.raises(TypeError, match=f"^{words}'session'; .* with sessions=$"):
        leased(Service())
    with pytest.raises(TypeError, match=f"^{words}'self'$"):
        leased()


def test_says_when_managed_lacks_its_options() -> None:
    """The function is not taken for an argument too many."""
    with pytest.raises(TypeError, match=r"options, as in @managed\(gate=gate\)"):
        managed(words)  # type: ignore[arg-type]
