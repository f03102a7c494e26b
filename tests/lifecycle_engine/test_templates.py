"""Chat templates that do not work, and pictures that do not fit: refused when loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_kit import Kit
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoProcessor, AutoTokenizer
from typer.testing import CliRunner

from lifecycle_engine import BadChat, Chat, ChatProcessor, Message
from lifecycle_engine.cli import cli

CHAT = Chat([Message("user", ["See <this>, s'il te pla\u00eet"])], max_tokens=1)
EACH = "{% for message in messages %}\n"
END = "{{ message['content'] }}\n{% endfor %}"


@pytest.fixture
def copied(kits: Callable[[str], Kit], tmp_path: Path) -> Callable[..., Path]:
    """A function that copies a checkpoint, with another template if one is given."""

    def copy(family: str, template: str | None = None) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(kits(family).folder, folder)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return copy


BROKEN = {
    "syntax": (EACH + "{% if %}" + END, r"TemplateSyntaxError in .*jinja, line 2: Exp"),
    "not-closed": (EACH + "x", r"TemplateSyntaxError in .*jinja, line 2: Unexpected"),
    "filter": (EACH + "{{ message | shout }}" + END, "line 2: No filter named 'shout'"),
    "function": (EACH + "{{ shout(message) }}" + END, "UndefinedError in .*, line 2"),
    "attribute": (EACH + "{{ a.b.c }}" + END, "UndefinedError in .*, line 2"),
    "file": ("{% include 'other.jinja' %}", "TypeError in chat_template.jinja, line 1"),
    "number": (EACH + "{{ 1 + message }}" + END, "TypeError in .*jinja, line 2"),
    "endless": (
        "{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}",
        "RecursionError in chat_template.jinja, line 1",
    ),
    "break": ("{% break %}", "SyntaxError in chat_template.jinja"),
    "unsafe": (EACH + "{{ ''.__class__.mro() }}" + END, "SecurityError in .*, line 2"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_template_is_refused_at_once(
    copied: Callable[..., Path], how: str
) -> None:
    """The error has its file and line, and is raised before the first request."""
    template, told = BROKEN[how]
    with pytest.raises(ValueError, match=f"{told}.*; correct the template$"):
        ChatProcessor(copied("qwen3", template))


def test_template_that_joins_texts_is_refused_where_there_are_pictures(
    copied: Callable[..., Path],
) -> None:
    """Of a model for text alone, put beside one that reads pictures."""
    folder = copied("llava", EACH + "{{ 'User: ' + message['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match=r"TypeError in .*, line 2; correct"):
        ChatProcessor(folder)


def test_template_of_a_tokenizer_config_is_named(copied: Callable[..., Path]) -> None:
    """Where older checkpoints have it."""
    folder = copied("qwen3")
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": "{% if %}"}
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"in tokenizer_config.json, line 1: Exp"):
        ChatProcessor(folder)


@pytest.mark.parametrize(
    ("text", "told"),
    [("{}", "KeyError: 'chat_template'"), ("[1]", "TypeError"), ("{", "JSONDecodeErr")],
)
def test_reports_an_old_file_without_a_template_in_a_sentence(
    copied: Callable[..., Path], text: str, told: str
) -> None:
    """Its name is that of the template's file in older checkpoints."""
    folder = copied("qwen3")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(text)
    with pytest.raises(ValueError, match=f"cannot load the chat template: {told}"):
        ChatProcessor(folder)


def test_serve_says_where_the_template_is_broken(copied: Callable[..., Path]) -> None:
    """In a line, and starts nothing."""
    folder = copied("qwen3", "{% if %}")
    result = CliRunner().invoke(cli, ["serve", "--checkpoint", str(folder)])
    assert result.exit_code == 1
    assert "cannot be served: the model's chat template fails: Temp" in result.stderr
    assert "chat_template.jinja, line 1" in result.stderr


def test_template_that_wants_more_than_one_message_is_served(
    copied: Callable[..., Path],
) -> None:
    """A template that refuses the trial messages is loaded, and refuses such requests."""
    raising = (
        "{% if messages | length < 2 %}{{ raise_exception('say more') }}{% endif %}"
    )
    processor = ChatProcessor(copied("qwen3", raising + EACH + END))
    user = Message("user", ["hello"])
    assert processor.prepare(Chat([user, user], max_tokens=1)).prompt_tokens > 0
    with pytest.raises(BadChat, match="refuses the conversation: say more"):
        processor.prepare(Chat([user], max_tokens=1))


def test_template_that_fails_over_a_conversation_refuses_it(
    copied: Callable[..., Path],
) -> None:
    """A failure on untried input is no 500, and reveals nothing."""
    adding = (
        "{% if message['role'] == 'system' %}{{ 1 + message['content'] }}{% endif %}"
    )
    processor = ChatProcessor(copied("qwen3", EACH + adding + END))
    system = Message("system", ["zzzz"])
    with pytest.raises(BadChat, match="fails: TypeError in .*, line 2$") as caught:
        processor.prepare(Chat([system, Message("user", ["x"])], max_tokens=1))
    assert "zzzz" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_one_of_several_templates_is_taken(copied: Callable[..., Path]) -> None:
    """That for conversations without tools; where none is, they are named."""
    folder = copied("qwen3", "{% if %}")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(EACH + END)
    with pytest.raises(ValueError, match="TemplateSyntaxError in chat_template.jinja"):
        ChatProcessor(folder)
    (folder / "chat_template.jinja").write_text(EACH + END)
    user = Message("user", ["hello"])
    assert ChatProcessor(folder).prepare(Chat([user], max_tokens=1)).prompt_tokens


def begins_by_itself(path: Path) -> None:
    """Make a tokenizer prepend `<s>` unless special tokens are disabled."""
    tokenizer = Tokenizer.from_file(str(path))
    one = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=one)
    tokenizer.save(str(path))


@pytest.mark.parametrize("begin", ["", "{{ bos_token }}"], ids=["left", "written"])
@pytest.mark.parametrize("family", ["llama", "llava"])
def test_prompt_is_that_of_transformers(
    copied: Callable[..., Path], family: str, begin: str
) -> None:
    """With the token that a text begins with once, or not at all, as it has it."""
    folder = copied(family)
    path = folder / "chat_template.jinja"
    path.write_text(begin + path.read_text())
    begins_by_itself(folder / "tokenizer.json")
    prepared = ChatProcessor(folder).prepare(CHAT)
    oracle = AutoProcessor if family == "llava" else AutoTokenizer
    wanted = oracle.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "See <this>, s'il te pla\u00eet"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    if family == "llava":
        (wanted,) = wanted
    assert prepared.request["input_ids"] == wanted


FILES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "patch": (
        "qwen2_5_vl",
        "preprocessor_config",
        {"patch_size": 16},
        "patch_size of 16, the model 14",
    ),
    "merge": (
        "qwen3_vl",
        "preprocessor_config",
        {"merge_size": 4},
        "merge_size of 4, the model 2",
    ),
    "time": (
        "qwen2_5_vl",
        "preprocessor_config",
        {"temporal_patch_size": 1},
        "temporal_patch_size of 1, the model 2",
    ),
    "side": (
        "llava",
        "preprocessor_config",
        {"crop_size": {"height": 56, "width": 56}},
        "expected float32, .*3, 70, 70",
    ),
    "token": ("llava", "config", {"image_token_index": 7}, "0 image tokens"),
    "grid-token": ("qwen2_5_vl", "config", {"image_token_id": 7}, "image places of "),
}


@pytest.mark.parametrize("how", FILES)
def test_pictures_that_do_not_fit_the_model_are_refused_at_once(
    copied: Callable[..., Path], how: str
) -> None:
    """Else each request with one would be refused for what is not its fault."""
    family, name, settings, told = FILES[how]
    folder = copied(family)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ValueError, match=f"{told}.* files must be of one checkpoint$"):
        ChatProcessor(folder)


def test_reports_an_image_processor_that_fails_in_a_sentence(
    copied: Callable[..., Path],
) -> None:
    """Also where it raises what is neither an `OSError` nor a `ValueError`."""
    folder = copied("llava")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rescale_factor": "x"}))
    with pytest.raises(ValueError, match="load the tokenizer and image processor: U"):
        ChatProcessor(folder)


def test_smaller_limit_of_pixels_is_no_fault_of_the_checkpoint(
    copied: Callable[..., Path],
) -> None:
    """What it is tried with may be too large for it."""
    processor = ChatProcessor(copied("llava"), max_pixels=100)
    assert processor.prepare(CHAT).prompt_tokens


def test_image_processor_is_found_where_transformers_finds_it(
    copied: Callable[..., Path],
) -> None:
    """In a file of all processors, as later releases write it, or by an old name."""
    folder = copied("llava")
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.unlink()
    AutoProcessor.from_pretrained(copied_from(folder, settings)).save_pretrained(folder)
    assert not path.exists()
    assert ChatProcessor(folder).prepare(CHAT).prompt_tokens
    del settings["image_processor_type"]
    old = settings | {"feature_extractor_type": "CLIPFeatureExtractor"}
    (folder / "processor_config.json").unlink()
    path.write_text(json.dumps(old))
    assert ChatProcessor(folder).prepare(CHAT).prompt_tokens
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="image processor is without a name; known"):
        ChatProcessor(folder)


def copied_from(folder: Path, settings: dict[str, Any]) -> Path:
    """Another copy, with these settings of its image processor."""
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    return other
