"""A checkpoint's own way to draw, for requests that do not say: through the real SDKs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import anthropic
import pytest
from serve_kit import served

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_checkpoint import build  # noqa: E402

pytestmark = pytest.mark.asyncio
ASKED: dict[str, Any] = {"max_tokens": 12, "extra_body": {"ignore_eos": True}}
USER = [{"role": "user", "content": "Say something"}]
# As wide as can be, but for the one option that leaves nothing to chance.
WIDE = {"do_sample": True, "temperature": 1.9, "top_k": 1}


def checkpoint(folder: Path, **options: Any) -> Path:
    """A tiny one of text, whose generation config has these options as well."""
    build(folder, "qwen3")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    return folder


def greedy(folder: Path) -> str:
    """What `generate` makes of the conversation, without chance."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    output = model.generate(
        torch.tensor([ids]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


async def texts(client: Any, model: str, **options: Any) -> set[str]:
    """What four seeds say."""
    asked = ASKED | options
    said = set()
    for seed in range(4):
        answer = await client.chat.completions.create(
            model=model, messages=USER, seed=seed, **asked
        )
        said.add(answer.choices[0].message.content)
    return said


async def test_silent_request_is_drawn_as_the_checkpoint_says(tmp_path: Path) -> None:
    """And one that speaks as it asks, each option for itself, in every API."""
    folder = checkpoint(tmp_path / "wide", **WIDE)
    wanted = {greedy(folder)}
    options = ("--checkpoint", str(folder), "--model", "wide")
    async with served(*options, runner="torch") as server:
        async with server.client() as client:
            assert await texts(client, "wide") == wanted
            # The file's temperature stays where another option is asked for.
            body = {"ignore_eos": True, "top_k": 0}
            assert len(await texts(client, "wide", extra_body=body)) > 1
            assert await texts(client, "wide", extra_body=body, temperature=0) == wanted
            body = {"ignore_eos": True, "top_k": -1, "min_p": 1.0}
            assert await texts(client, "wide", extra_body=body) == wanted
            response = await client.responses.create(
                model="wide",
                input="Say something",
                max_output_tokens=12,
                extra_body={"ignore_eos": True},
            )
            assert {response.output_text} == wanted
        async with anthropic.AsyncAnthropic(
            base_url=server.address, api_key="x", max_retries=0
        ) as other:
            message = await other.messages.create(
                model="wide", messages=USER, max_tokens=12
            )
            # Where the text ends by itself it may be shorter.
            assert wanted.pop().startswith(message.content[0].text)
        assert await server.exit(signal.SIGTERM) == 0


async def test_openais_defaults_can_be_asked_for(tmp_path: Path) -> None:
    """Then a silent request is drawn at a temperature of 1, whatever the file says."""
    folder = checkpoint(tmp_path / "wide", **WIDE)
    options = ("--checkpoint", str(folder), "--sampling-defaults", "openai")
    async with served(*options, runner="torch") as server, server.client() as client:
        assert len(await texts(client, "wide")) > 1
        assert await server.exit(signal.SIGTERM) == 0


async def test_checkpoint_that_is_said_to_be_greedy_is(tmp_path: Path) -> None:
    """`do_sample: false` is what its authors say, as `generate` has it."""
    folder = checkpoint(tmp_path / "sure", do_sample=False, temperature=0.7)
    options = ("--checkpoint", str(folder))
    async with served(*options, runner="torch") as server, server.client() as client:
        assert await texts(client, "sure") == {greedy(folder)}
        assert len(await texts(client, "sure", temperature=1.0)) > 1
        assert await server.exit(signal.SIGTERM) == 0
