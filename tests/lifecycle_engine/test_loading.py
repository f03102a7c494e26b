"""Checkpoints that are not whole, or not what they say: a sentence, no wrong token."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_kit import Kit, family_of, load_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lifecycle_engine import (  # noqa: E402
    BadChat,
    Chat,
    ChatProcessor,
    Message,
    TransformersRunner,
)
from lifecycle_engine.cli import cli  # noqa: E402


@pytest.fixture
def copied(kits: Callable[[str], Kit], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a checkpoint with changes to its config."""

    def copy(family: str, **values: Any) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(kits(family).folder, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return copy


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "lm_head"),
        ("qwen3", "layers.1.self_attn.k_proj"),
        ("llava", "multi_modal_projector.linear_1"),
        ("qwen2_5_vl", "visual.merger"),
    ],
)
def test_checkpoint_that_lacks_weights_is_refused(
    copied: Callable[..., Path], family: str, name: str
) -> None:
    """Otherwise they would be random, and differ from start to start."""
    path = copied(family) / "model.safetensors"
    weights = load_file(path)
    fewer = {key: value for key, value in weights.items() if name not in key}
    assert len(fewer) < len(weights)
    save_file(fewer, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks \d+ of the .*{name}.*use a complete"):
        load_model(path.parent, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 1000},
        {"pad_token_id": 5000},
        {"num_hidden_layers": 3},
        {"output_attentions": True},
        {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
        {"model_type": "qwen9"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_errors_of_transformers_become_value_errors(
    copied: Callable[..., Path], values: dict[str, Any]
) -> None:
    """Its errors have many types; any other would end in a traceback."""
    with pytest.raises(ValueError, match=r"transformers"):
        load_model(copied("qwen3", **values), device="cpu", dtype="float32")


@pytest.mark.parametrize("part", ["config", "text_config"])
@pytest.mark.parametrize("method", ["gptq", "fp8", "mxfp4", "unheard-of"])
def test_quantized_checkpoint_is_refused(
    copied: Callable[..., Path], method: str, part: str
) -> None:
    """The error names the method; some would otherwise be ignored."""
    path = copied("llava") / "config.json"
    values = json.loads(path.read_text())
    of = values if part == "config" else values[part]
    of["quantization_config"] = {"quant_method": method, "bits": 4}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"is quantized \({method}\); supported are"):
        load_model(path.parent, device="cpu", dtype="float32")


def test_model_that_does_not_run_is_refused(copied: Callable[..., Path]) -> None:
    """At start, not at each request."""
    path = copied("qwen3") / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="does not run: FloatingPointError: the logit"):
        TransformersRunner.load(path.parent)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_that_is_no_json_is_named(
    copied: Callable[..., Path], name: str
) -> None:
    """The parser's message says where in a file, but not in which file."""
    folder = copied("qwen3")
    (folder / name).write_text("{nope")
    with pytest.raises(ValueError, match="load the tokenizer: JSONDecodeError: Expect"):
        ChatProcessor(folder)


def test_checkpoint_without_a_tokenizer_is_refused(
    copied: Callable[..., Path],
) -> None:
    """transformers would create an empty tokenizer, which encodes every chat as nothing."""
    folder = copied("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(
        ValueError, match="becomes 0 tokens up to 0, the model has 1024"
    ):
        ChatProcessor(folder)


def test_model_of_an_unknown_family_is_left_to_the_engine(
    copied: Callable[..., Path],
) -> None:
    """Which names those that it knows; some configs have no maximum of positions."""
    folder = copied("qwen3")
    config = '{"model_type": "bloom", "vocab_size": 1024}'
    (folder / "config.json").write_text(config)
    ChatProcessor(folder)


def test_tokenizer_that_outgrew_the_model_is_refused(
    copied: Callable[..., Path],
) -> None:
    """Its added tokens are outside the model's vocabulary."""
    folder = copied("qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<there>"])
    tokenizer.save_pretrained(folder)
    ChatProcessor(folder)
    path = folder / "chat_template.jinja"
    path.write_text("<there>" + path.read_text())
    with pytest.raises(ValueError, match="tokens up to 1024, the model has 1024"):
        ChatProcessor(folder)


def test_config_that_names_another_attention_is_served_all_the_same(
    kits: Callable[[str], Kit], tmp_path: Path
) -> None:
    """The named implementation would treat our masks as additive."""
    eager = {"_attn_implementation": "eager"}
    kit = kits("qwen3").copied(tmp_path, config=eager)
    prepared = [kit.prepare("see"), kit.prepare("and what of a longer one?")]
    wanted = [kits("qwen3").generate(each) for each in prepared]
    assert kit.serve(prepared, chunk=7) == wanted


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Mistral", {"sliding_window": 1}, "sliding_window of 1; the minimum is 2"),
        ("Mistral", {"sliding_window": 0}, "sliding_window of 0; the minimum is 2"),
        ("Qwen3", {"is_causal": False}, "bidirectional attention"),
        ("Gemma", {"use_bidirectional_attention": True}, "bidirectional attention"),
    ],
)
def test_model_with_other_attention_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    """It would run, but generate other tokens than `generate`."""
    config = getattr(transformers, f"{name}Config")(**options)
    with pytest.raises(ValueError, match=message):
        family_of(config)


def test_layers_with_windows_of_no_size_are_refused() -> None:
    """Otherwise the first request would fail."""
    config = transformers.Qwen3Config(num_hidden_layers=1)
    config.layer_types = ["sliding_attention"]
    with pytest.raises(ValueError, match="sliding_window of None"):
        family_of(config)


def test_checkpoint_without_a_chat_template_is_refused(
    copied: Callable[..., Path],
) -> None:
    """At start: without a template no chat can be served."""
    folder = copied("qwen3")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template; put that of the model as"):
        ChatProcessor(folder)


def test_serve_reports_an_unusable_checkpoint_in_one_line(
    copied: Callable[..., Path],
) -> None:
    """The command starts no process."""
    folder = copied("qwen3")
    (folder / "chat_template.jinja").unlink()
    result = CliRunner().invoke(cli, ["serve", "--checkpoint", str(folder)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"{folder} cannot be served: the checkpoint has no chat" in result.stderr


def test_serve_reports_a_failing_import_in_one_line(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that cannot be loaded is an `OSError` of the import."""

    class Damaged:
        """Finds a module whose library is not there."""

        def find_spec(self, name: str, *_: object) -> None:
            """Fail as the loader of libraries does."""
            if name == module:
                raise OSError("libtokens.so: cannot open shared object file")

    module, folder = "lifecycle_engine.processing.chat_processor", copied("qwen3")
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Damaged(), *sys.meta_path])
    result = CliRunner().invoke(cli, ["serve", "--checkpoint", str(folder)])
    assert result.exit_code == 1
    assert f"{folder} cannot be served: libtokens.so: cannot open" in result.stderr


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("'no system here'", "refuses the conversation: no system here$"),
        ("message['content']", "refuses the conversation$"),
    ],
)
def test_refusal_of_a_template_is_reported(
    copied: Callable[..., Path], said: str, message: str
) -> None:
    """With its own message, without text from the conversation."""
    folder = copied("qwen3")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception(" + said + ") }}{% endif %}{{ message['content'] }}"
        "{% endfor %}"
    )
    processor = ChatProcessor(folder)
    user = Message("user", ["hello"])
    assert processor.prepare(Chat([user], max_tokens=1)).prompt_tokens > 0
    with pytest.raises(BadChat, match=message):
        processor.prepare(Chat([Message("system", ["zzzz"]), user], max_tokens=1))


PREPARE = """
import hashlib, sys
from pathlib import Path
from lifecycle_engine import Chat, ChatProcessor, Message, factory, load_config
if sys.argv[1] == "without":
    factory.leave_torch_to_the_engine(load_config({}))
said = []
for folder in sys.argv[3:]:
    words = [Path(sys.argv[2]).read_bytes(), "What is this?"]
    made = ChatProcessor(folder).prepare(Chat([Message("user", words)], 8))
    said.append(made.request)
    for name, tensor in sorted(made.tensors.items()):
        said += [name, tensor.shape, hashlib.sha256(tensor.tobytes()).hexdigest()]
assert bool(sys.modules.get("torch")) == (sys.argv[1] == "with")
print(said)
"""


def test_prompts_are_the_same_without_torch(
    kits: Callable[[str], Kit], picture: Callable[..., bytes], tmp_path: Path
) -> None:
    """The server's process leaves it out; nothing is said on standard error either."""
    path = tmp_path / "picture"
    path.write_bytes(picture(211, 61, seed=2))
    names = ("qwen2_5_vl", "qwen3_vl", "llava")
    folders = [str(kits(name).folder) for name in names]
    found = []
    for how in ("with", "without"):
        command = [sys.executable, "-c", PREPARE, how, str(path), *folders]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stderr) == (0, "")
        found.append(done.stdout)
    assert found[0] == found[1]
    assert found[0].count("pixel_values") == len(names)
