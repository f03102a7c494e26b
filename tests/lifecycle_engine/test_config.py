"""The server's configuration: its sources, their order, and what is refused."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lifecycle_asgi import Admission, AdmissionSettings, client_address
from lifecycle_asgi.memory_limit import MemoryLimit
from lifecycle_engine import (
    AdmissionConfig,
    ConfigError,
    EngineConfig,
    HttpConfig,
    ModelConfig,
    ServerConfig,
    cli as module,
    load_config,
    make_app,
)
from lifecycle_engine.cli import PANELS, cli
from lifecycle_engine.config import SECTIONS, SETTINGS, unknown_variables
from lifecycle_engine.config_values import Timeout
from lifecycle_engine.factory import observers, worker_argv

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str) -> Path:
    """Write a configuration file."""
    path = folder / "server.toml"
    path.write_text(text)
    return path


def problem(**sources: Any) -> str:
    """Return the message that sources are refused with."""
    with pytest.raises(ConfigError) as refused:
        load_config(**sources)
    return str(refused.value)


def test_is_the_defaults_without_a_source() -> None:
    """Nothing set is `ServerConfig()`."""
    assert load_config() == ServerConfig()
    assert load_config({"http_port": None}, environment={}) == ServerConfig()


def test_reads_a_file(tmp_path: Path) -> None:
    """Each table of the file is a section; values have their TOML types, or are text."""
    file = written(
        tmp_path,
        '[model]\ncheckpoint = "/models/a"\n'
        '[admission]\nmax_waiting = 7\nbytes = "2GiB"\nmax_wait = 2\n'
        '[http]\nremote_images = true\nproxies = ["10.0.0.0/8", "::1"]\nport = "80"\n'
        '[engine]\nexecutor = "ray"\ngpus = 0.5\n',
    )
    config = load_config(file=file)
    assert config.model.checkpoint == Path("/models/a")
    assert config.admission.max_waiting == 7
    assert config.admission.bytes == 2 * 2**30
    assert config.admission.max_wait == 2.0
    assert config.http.remote_images is True
    assert config.http.proxies == ("10.0.0.0/8", "::1")
    assert config.http.port == 80
    assert config.engine.gpus == 0.5


def test_reads_the_environment() -> None:
    """A variable has the section and the key in its name; lists have commas."""
    config = load_config(
        environment={
            "LIFECYCLE_MAX_WAITING": "3",
            "LIFECYCLE_HTTP_PROXY": "10.0.0.0/8, 192.168.0.1",
            "LIFECYCLE_HTTP_REMOTE_IMAGES": "yes",
            "LIFECYCLE_HTTP_HOST": "",  # as good as unset
            # What Kubernetes sets for a service `lifecycle-engine`.
            "LIFECYCLE_ENGINE_SERVICE_HOST": "10.0.0.1",
        }
    )
    assert config.admission.max_waiting == 3
    assert config.http.proxies == ("10.0.0.0/8", "192.168.0.1")
    assert config.http.remote_images is True
    assert config.http.host == HttpConfig().host


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_reads_every_setting_from_every_source(setting: Any, tmp_path: Path) -> None:
    """An option wins over the environment, the environment over the file."""
    texts = {"[torch|sim]": ["sim", "torch"], "[cpu|cuda]": ["cuda", "cpu"]}
    texts |= {
        "[model|openai]": ["openai", "model"],
        "[process|ray]": ["ray", "process"],
    }
    texts |= {"[open|admin]": ["admin", "open"], "[on|off|fake]": ["fake", "off"]}
    texts |= {"[fair|fifo|adaptive]": ["fifo", "adaptive"]}
    texts |= {"[failures|json|console]": ["json", "console"]}
    texts |= {"[auto|float32|bfloat16|float16]": ["auto", "float32"]}
    texts |= {"ngram|draft=FOLDER": ["ngram", "draft=small"]}
    texts |= {"ADDRESS": ["10.0.0.1", "10.0.0.2"], "": ["true", "false"]}
    texts |= {"MODULE:NAME": ["a:b", "a.b:c"], "HOST:PORT": ["[::1]:80", "unix:/a"]}
    default = ["9", "10", "11"]
    values = texts.get(setting.form.metavar, default)
    first, second, third = values[0], values[1], values[-1 if values is default else 0]

    ray = setting.key in ("ray_address", "replicas", "gpus")

    def found(*, options: dict[str, Any] | None = None, **sources: Any) -> Any:
        needed = {"engine_executor": "ray"} if ray else {}
        config = load_config(needed | (options or {}), **sources)
        return getattr(getattr(config, setting.section), setting.key)

    def parsed(text: str) -> Any:
        return setting.parse("a source", text)

    file = written(tmp_path, f'[{setting.section}]\n{setting.key} = "{third}"\n')
    sources: dict[str, Any] = {"file": file}
    assert found(**sources) == parsed(third)
    sources["environment"] = {setting.variable: second}
    assert found(**sources) == parsed(second)
    sources["options"] = {setting.name: first}
    assert found(**sources) == parsed(first)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("2147483648", 2**31),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5MiB", 3 * 2**19),
        ("64KiB", 65536),
        ("3TiB", 3 * 2**40),
        ("2GB", 2 * 10**9),
        ("12B", 12),
    ],
)
def test_reads_sizes_with_units(text: str, size: int) -> None:
    """A size is bytes, or has a unit of 1024 or of 1000."""
    assert load_config({"engine_arena_bytes": text}).engine.arena_bytes == size


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"http_port": "x"}, "--port: 'x' is refused: input should be a valid integer"),
        (
            {"http_port": "1.5"},
            "--port: '1.5' is refused: input should be a valid integer",
        ),
        (
            {"http_port": "99999"},
            "--port: '99999' is refused: input should be less than or equal to 65535",
        ),
        (
            {"http_drain": "-1"},
            "--drain: '-1' is refused: input should be greater than or equal to 0",
        ),
        ({"http_drain": "nan"}, "--drain: 'nan' is refused: input should be greater"),
        (
            {"http_drain": "soon"},
            "--drain: 'soon' is refused: input should be a valid number",
        ),
        (
            {"engine_arena_bytes": "2 gallons"},
            "is refused: give a size in bytes, KiB, MiB",
        ),
        ({"engine_arena_bytes": "-5"}, "--arena-bytes: '-5' is refused: give a size"),
        (
            {"admission_bytes": "0"},
            "--bytes: '0' is refused: input should be greater than or equal to 1",
        ),
        (
            {"model_runner": "jax"},
            "--runner: 'jax' is refused: input should be 'torch' or 'sim'",
        ),
        (
            {"http_proxies": ["10.0.0.5/8"]},
            "--proxy: '10.0.0.5/8' is refused: give an address",
        ),
        ({"http_proxies": ["proxy.example"]}, "or a network as 10.0.0.0/8"),
        (
            {"http_remote_images": "maybe"},
            "'maybe' is refused: input should be a valid boolean, unable to interpret input; give true or false",
        ),
        (
            {"engine_speculative": "-x"},
            "--speculative: '-x' is refused: use ngram, or draft=FOLDER with the ",
        ),
        ({"engine_speculative": "draft="}, "checkpoint of a smaller model"),
        ({"engine_kv_slots": "7"}, "--kv-slots: 7 cannot hold a batch of 8; give 8"),
        (
            {"engine_buckets": "0"},
            "--bucket: '0' is refused: input should be greater than or equal to 1",
        ),
        (
            {"admission_media_slots": "0"},
            "--media-slots: '0' is refused: input should be greater than or equal to 1",
        ),
        (
            {"engine_total_timeout": "0"},
            "--total-timeout: '0' is refused: input should be greater than 0",
        ),
        (
            {"http_send_timeout": "-0.5"},
            "input should be greater than 0; inf is no limit",
        ),
        (
            {"http_observers": ["json"]},
            "--observer: 'json' is refused: give a function, as",
        ),
        ({"http_observers": [":tell"]}, "':tell' is refused: give a function"),
        ({"http_observers": ["a..b:tell"]}, "'a..b:tell' is refused: give a function"),
        ({"http_observers": ["a:b c"]}, "'a:b c' is refused: give a function"),
        (
            {"model_dtype": "int8"},
            "--dtype: 'int8' is refused: input should be 'auto', 'float32'",
        ),
    ],
)
def test_refuses_wrong_values(options: dict[str, Any], words: str) -> None:
    """A wrong value is named with its source, its limit and the remedy."""
    assert words in problem(options=options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"http_port": "9" * 5000}, "--port: '999"),
        (
            {"http_port": 10**5000},
            "--port: a huge int is refused: input should be less",
        ),
        ({"http_drain": 10**5000}, "--drain: a huge int is refused: input should be"),
        ({"http_log": "x" * 5000}, "input should be 'failures', 'json' or 'console'"),
        ({"engine_buckets": ["x" * 5000]}, "--bucket: 'xxx"),
        ({"http_admin_listen": "a:" + "9" * 5000}, "give a port of 0 to 65535"),
        ({"engine_ray_address": "x" * 5000}, "has no effect on an engine in a child"),
    ],
)
def test_shows_the_ends_of_a_huge_value(options: dict[str, Any], words: str) -> None:
    """A value that fills the screen would hide its source, its limit and the remedy."""
    error = problem(options=options)
    assert words in error
    assert len(error) < 300


def test_shows_the_ends_of_a_huge_batch() -> None:
    """A value that another does not go with is not shown in full either."""
    for huge in ("9" * 4000, 10**5000):
        error = problem(options={"engine_max_batch": huge, "engine_kv_slots": "7"})
        assert error.startswith("--kv-slots: 7 cannot hold a batch of ")
        assert len(error) < 400


def test_shows_the_ends_of_a_huge_key(tmp_path: Path) -> None:
    """An unknown key of a file is not shown in full either."""
    file = written(tmp_path, f"[model]\n{'x' * 5000} = 1\n")
    assert len(problem(file=file).removeprefix(str(file))) < 300


def test_takes_any_sequence_from_python() -> None:
    """A list of sizes may be a range; bytes are a mistake."""
    assert load_config({"engine_buckets": range(1, 4)}).engine.buckets == (1, 2, 3)
    for wrong in (b"1", bytearray(b"1"), memoryview(b"1"), {1: 2}):
        words = f"--bucket: {type(wrong).__name__} is not a list"
        assert words in problem(options={"engine_buckets": wrong})
    assert load_config({"http_admin_listen": f"a:{'0' * 5000}80"}).http.admin_listen


def test_names_the_source_of_a_wrong_value(tmp_path: Path) -> None:
    """A wrong value is found where it stands, also where another source overrides it."""
    variable = "LIFECYCLE_HTTP_PORT"
    assert problem(environment={variable: "tcp://1"}).startswith(
        f"{variable}: 'tcp://1'"
    )
    file = written(tmp_path, "[http]\nport = -1\n")
    words = (
        f"{file}: http.port: -1 is refused: input should be greater than or equal to 0"
    )
    assert problem(file=file).startswith(words)
    assert problem(file=file, options={"http_port": "1"}).startswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[http]\nprot = 1\n", "[http]: prot is not a key; did you mean port"),
        (
            "[http]\nbody_timeout = 1\n",
            "[http]: body_timeout is not a key; it belongs in [admission]",
        ),
        ("[modle]\n", "modle is not a section; did you mean model"),
        ("port = 8000\n", "port is not a section; it belongs in [http]"),
        (
            "pool = 8000\n",
            "pool is not a section; known: model, admission, access, http",
        ),
        ("http = 3\n", "http: int is not a table; write [http]"),
        ("[http\n", "correct the TOML"),
        (
            "[http]\nport = true\n",
            "http.port: True is refused: input should be a valid integer",
        ),
        ("[http]\nproxies = 3\n", "http.proxies: int is not a list; give one"),
        (
            "[http]\nhost = 3\n",
            "http.host: 3 is refused: input should be a valid string",
        ),
        (
            "[model]\ncheckpoint = 3\n",
            "model.checkpoint: 3 is refused: input should be an instance of Path; give a text",
        ),
    ],
)
def test_refuses_wrong_files(text: str, words: str, tmp_path: Path) -> None:
    """An unknown key, or what is not TOML, is refused with the file's name."""
    file = written(tmp_path, text)
    message = problem(file=file)
    assert message.startswith(str(file))
    assert words in message


@pytest.mark.parametrize(
    "setting",
    [each for each in SETTINGS if each.kind == Timeout],
    ids=lambda setting: setting.path,
)
def test_refuses_timeout_of_zero(setting: Any) -> None:
    """A time limit that no request could keep is a mistake; inf is no limit."""
    assert setting.key.endswith("_timeout")
    for value in ("0", "-1", "-inf"):
        words = f"{setting.option}: '{value}' is refused: input should be greater than 0; inf"
        assert words in problem(options={setting.name: value})
    config = load_config({setting.name: "inf"})
    assert getattr(getattr(config, setting.section), setting.key) == float("inf")


def test_takes_zero_where_it_means_at_once() -> None:
    """A queue may be without wait, and a shutdown without drain."""
    config = load_config({"admission_max_wait": "0", "http_drain": "0"})
    assert (config.admission.max_wait, config.http.drain) == (0, 0)


def test_names_variables_of_renamed_keys() -> None:
    """Options whose key in the file has another name are variables by the option."""
    found = load_config(
        environment={
            "LIFECYCLE_MODEL": "m",
            "LIFECYCLE_ENGINE": "ray",
            "LIFECYCLE_HTTP_PROXY": "::1",
            "LIFECYCLE_HTTP_OBSERVER": "a:b,c:d",
        }
    )
    assert (found.model.name, found.engine.executor) == ("m", "ray")
    assert (found.http.proxies, found.http.observers) == (("::1",), ("a:b", "c:d"))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("LIFECYCLE_ADMISSION_MAX_WAITING", "LIFECYCLE_MAX_WAITING"),
        ("LIFECYCLE_MODEL_NAME", "LIFECYCLE_MODEL"),
        ("LIFECYCLE_HTTP_PROXIES", "LIFECYCLE_HTTP_PROXY"),
        ("LIFECYCLE_ACCESS_API_KEY", "LIFECYCLE_API_KEYS"),
        ("LIFECYCLE_CONFIG_FILE", "LIFECYCLE_CONFIG"),
    ],
)
def test_finds_unknown_variables(name: str, nearest: str) -> None:
    """A variable that is no setting is named with the nearest one that is."""
    (sentence,) = unknown_variables({name: "1", "LIFECYCLE_CONFIG": "a.toml"})
    assert sentence.startswith(f"{name} is no setting of the server")
    assert sentence.endswith(f" {nearest}")


@pytest.mark.parametrize(
    "name",
    [
        *("ACCESS_API_KEY", "API_KEY", "APIKEYS", "ADMIN_KEY", "ACESS_ADMIN_KEY"),
        *("ACCESS_ALLOWED_ORIGINS", "OPERATORS_KEY"),
    ],
)
def test_refuses_what_may_be_a_misspelt_key(name: str) -> None:
    """A warning is too little where the server would be open."""
    name = f"LIFECYCLE_{name}"
    with pytest.raises(ConfigError, match="is no setting of the server") as error:
        load_config(environment={name: "secret"})
    assert error.value.source == name
    assert "secret" not in str(error.value)
    load_config(environment={name: ""})


@pytest.mark.parametrize("text", [",", " ", " , ,"])
def test_refuses_a_list_of_no_keys(text: str) -> None:
    """As of variables that are not set: ``"$A,$B"``."""
    environment = {"LIFECYCLE_API_KEYS": text}
    with pytest.raises(ConfigError, match="LIFECYCLE_API_KEYS: it lists nothing"):
        load_config(environment=environment)
    with pytest.raises(ValueError, match="LIFECYCLE_API_KEYS must be a list"):
        AdmissionSettings.from_environment(environment)


def test_takes_keys_of_clients_from_the_variable_of_admission() -> None:
    """One variable has the keys for any server and for ours, separated by commas."""
    environment = {"LIFECYCLE_API_KEYS": "a, b"}
    found = load_config(environment=environment).access.api_keys
    assert found == AdmissionSettings.from_environment(environment).api_keys
    assert found == ("a", "b")


def test_names_no_variable_that_is_not_near() -> None:
    """One of `Admission` alone is not taken for that of a certificate."""
    (sentence,) = unknown_variables({"LIFECYCLE_PROFILE": "vllm"})
    assert sentence == "LIFECYCLE_PROFILE is no setting of the server; --help lists all"


def test_means_by_bytes_what_admission_means() -> None:
    """One variable, with one unit, is one budget in front of any server and in ours."""
    environment = {"LIFECYCLE_BYTES": "1.5GB", "LIFECYCLE_MAX_BODY": "8M"}
    config = load_config({"model_runner": "sim"}, environment=environment)
    ours = make_app(config).state.service.admission.statistics()
    other = Admission(make_app, environment=environment).statistics()
    assert all(ours[name].bytes == other[name].bytes for name in other)
    assert config.admission.max_body == 8 * 2**20


@pytest.mark.parametrize("options", [{}, {"engine_arena_bytes": "0"}])
def test_fits_images_into_the_memory_there_is(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an arena or without one, a small container has a small budget for them."""
    limit = MemoryLimit(2**30, "this cgroup")
    monkeypatch.setattr("lifecycle_asgi.memory_limit.memory_limit", lambda: limit)
    app = make_app(load_config({"model_runner": "sim", **options}))
    assert app.state.service.payloads.statistics().bytes == 2**30 // 2 * 12 // 16


def test_takes_known_variables_and_those_of_kubernetes() -> None:
    """Only what a person may have mistyped is unknown."""
    services = {
        "LIFECYCLE_ENGINE_SERVICE_HOST": "10.0.0.1",
        "LIFECYCLE_ENGINE_SERVICE_PORT_WEB": "80",
        "LIFECYCLE_ENGINE_PORT": "tcp://10.0.0.1:80",
        "LIFECYCLE_ENGINE_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    settings = {setting.variable: "1" for setting in SETTINGS}
    others = {"LIFECYCLES": "1", "HTTP_PORT": "1", "LIFECYCLE_HTTP_PROT": ""}
    assert list(unknown_variables(services | settings | others)) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("replicas", "2"), ("ray_address", "auto"), ("gpus", "0")],
)
def test_refuses_ray_settings_without_ray(
    option: str, value: str, tmp_path: Path
) -> None:
    """A setting of Ray without `--engine ray` is refused where it stands."""
    name, flag = f"engine_{option}", f"--{option.replace('_', '-')}"
    words = "no effect on an engine in a child process; give --engine ray"
    assert f"{flag}: " in (message := problem(options={name: value}))
    assert words in message
    file = written(tmp_path, f'[engine]\n{option} = "{value}"\n')
    assert problem(file=file).startswith(f"{file}: engine.{option}: ")
    config = load_config({"engine_executor": "ray"}, file=file)
    assert config.engine.executor == "ray"


def test_remembers_the_source_of_every_value(tmp_path: Path) -> None:
    """What is wrong at the start is traced to an option, a variable or a key."""
    file = written(tmp_path, "[http]\nport = 1\ndrain = 1\nthreads = 1\n")
    config = load_config(
        {"http_port": "3"},
        environment={"LIFECYCLE_HTTP_PORT": "2", "LIFECYCLE_HTTP_DRAIN": "2"},
        file=file,
    )
    sources = {
        "http.port": "--port",
        "http.drain": "LIFECYCLE_HTTP_DRAIN",
        "http.threads": f"{file}: http.threads",
        "http.host": "--host",  # where to set it
    }
    assert {path: config.source_of(path) for path in sources} == sources
    assert ServerConfig().source_of("http.port") == "http.port"


def test_prints_what_it_reads_back(tmp_path: Path) -> None:
    """The settings as TOML are the same settings, whatever their source."""
    config = ServerConfig(
        model=ModelConfig(checkpoint=Path('/a "b"'), runner="sim", max_length=99),
        admission=AdmissionConfig(bytes=3 * 2**20, max_wait=0.25),
        http=HttpConfig(proxies=("10.0.0.0/8",), observers=("a:b", "c:d")),
        engine=EngineConfig(
            executor="ray", gpus=0.5, arena_bytes=1001, total_timeout=1 / 3
        ),
    )
    text = config.to_toml()
    assert load_config(file=written(tmp_path, text)) == config
    assert '\nbytes = "3MiB"' in text
    assert ServerConfig() == load_config(
        file=written(tmp_path, ServerConfig().to_toml())
    )


def test_checks_values_from_python() -> None:
    """A section made in Python is checked like any other source, and takes its texts."""
    assert EngineConfig(arena_bytes="2GiB").arena_bytes == 2**31  # type: ignore[arg-type]
    words = r"admission\.max_waiting: -1 is refused: .* greater than or equal to 0"
    with pytest.raises(ConfigError, match=words):
        AdmissionConfig(max_waiting=-1)
    words = r"http\.port: None is refused: .* a valid integer"
    with pytest.raises(ConfigError, match=words):
        HttpConfig(port=None)  # type: ignore[arg-type]


def test_gives_every_setting_a_name_of_its_own() -> None:
    """No two settings share an option or a variable, and each help is a sentence."""
    flags = [setting.option for setting in SETTINGS]
    assert len(flags) == len(set(flags))
    assert len({setting.variable for setting in SETTINGS}) == len(SETTINGS)
    assert [
        setting.path for setting in SETTINGS if not setting.help.endswith(".")
    ] == []
    assert {setting.section for setting in SETTINGS} == set(SECTIONS)


def test_reads_the_file_that_the_documentation_shows(tmp_path: Path) -> None:
    """The example of the reference is a file that the server takes."""
    page = (ROOT / "docs" / "reference" / "server_config.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    config = load_config(file=written(tmp_path, text))
    assert config.model.device == "cuda"
    assert config.admission.bytes == 2 * 2**30


def test_lists_every_setting_in_the_documentation() -> None:
    """The page of the reference has each setting as it is."""
    script = ROOT / "scripts" / "list_settings.py"
    done = subprocess.run([sys.executable, script, "--check"], timeout=60, check=False)
    assert done.returncode == 0, "run python scripts/list_settings.py"


# Wide enough for every option and word of the help to stand on one line.
WIDE = {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}


def serve(*options: str, **environment: str) -> tuple[int, str]:
    """Return exit status and output of the command."""
    result = CliRunner().invoke(cli, ["serve", *options], env=WIDE | environment)
    return result.exit_code, result.output


def printed(*options: str, **environment: str) -> dict[str, dict[str, object]]:
    """Return the settings that the command prints."""
    status, output = serve("--print-config", *options, **environment)
    assert status == 0, output
    return tomllib.loads(output)


def test_takes_the_checkpoint_as_an_argument(tmp_path: Path) -> None:
    """`serve ./model` is `serve --checkpoint ./model`; two are one too many."""
    assert printed(str(tmp_path)) == printed("--checkpoint", str(tmp_path))
    assert printed(str(tmp_path))["model"]["checkpoint"] == str(tmp_path)
    status, output = serve(str(tmp_path), "--checkpoint", str(tmp_path))
    assert status == 2
    assert "CHECKPOINT: --checkpoint names one, too; name one" in output


def test_shows_every_option_in_one_panel() -> None:
    """The panels of the help are the sections; each option is in one of them, once."""
    _, text = serve("--help")
    panels: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if found := re.match(r"╭─ (.+?) ─", line):
            name = found[1]
        if found := re.match(r"│ +(--[a-z-]+)", line):
            panels.setdefault(name, []).append(found[1])
    assert sorted(panels.pop("Options")) == [
        "--config",
        "--help",
        "--hints",
        "--print-config",
    ]
    assert panels == {
        heading: [each.option for each in SETTINGS if each.section == section]
        for section, heading in PANELS.items()
    }


def test_shows_help_and_default_of_every_option() -> None:
    """Each help text is there as a whole, with the default where there is one."""
    _, text = serve("--help")
    shown = " ".join(text.replace("│", " ").split())
    for setting in SETTINGS:
        assert setting.help in shown
        if setting.shown_default:
            assert f"{setting.help} Default: {setting.shown_default}." in shown


def test_option_overrides_environment_and_file(tmp_path: Path) -> None:
    """An option wins over a variable, a variable over the file."""
    file = tmp_path / "server.toml"
    file.write_text("[http]\nport = 1\ndrain = 1\nthreads = 5\n")
    found = printed(
        *("--config", str(file), "--port", "3"),
        LIFECYCLE_HTTP_PORT="2",
        LIFECYCLE_HTTP_DRAIN="2",
    )["http"]
    assert (found["port"], found["drain"], found["threads"]) == (3, 2, 5)
    named = printed(LIFECYCLE_CONFIG=str(file))["http"]
    assert named["threads"] == 5


def test_repeated_option_overrides_the_list_of_the_file(tmp_path: Path) -> None:
    """A list is replaced as a whole; without the option, the file's list stays."""
    file = tmp_path / "server.toml"
    file.write_text('[http]\nproxies = ["10.0.0.0/8"]\nremote_images = true\n')
    options = ("--config", str(file))
    found = printed(*options)["http"]
    assert (found["proxies"], found["remote_images"]) == (["10.0.0.0/8"], True)
    found = printed(*options, "--proxy", "::1", "--proxy", "10.1.0.0/16")["http"]
    assert found["proxies"] == ["::1", "10.1.0.0/16"]


def test_shows_both_options_of_a_boolean() -> None:
    """The help has the option that turns a boolean off, and no value for it."""
    _, text = serve("--help")
    (line,) = [line for line in text.splitlines() if "--remote-images" in line]
    assert "--no-remote-images" in line
    assert "<bool>" not in text
    for command in ([], ["doctor"]):
        result = CliRunner().invoke(cli, [*command, "--help"], env=WIDE)
        assert "<bool>" not in result.output
    assert printed("--remote-images")["http"]["remote_images"] is True
    off = printed("--no-remote-images", LIFECYCLE_HTTP_REMOTE_IMAGES="yes")["http"]
    assert off["remote_images"] is False


def test_warns_of_unknown_variables() -> None:
    """A mistyped variable is one line on standard error; the settings stay valid."""
    result = CliRunner().invoke(
        cli,
        ["serve", "--print-config"],
        env=WIDE | {"LIFECYCLE_HTTP_PROT": "1", "LIFECYCLE_HTTP_DRAIN": "3"},
    )
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["http"]["drain"] == 3
    assert result.stderr == (
        "warning: LIFECYCLE_HTTP_PROT is no setting of the server; the nearest name "
        "is LIFECYCLE_HTTP_PORT\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[http]\nport = 99999\n",
            "http.port: 99999 is refused: input should be less than or equal to 65535",
        ),
        ("[http]\nprot = 1\n", "[http]: prot is not a key; did you mean port"),
        (None, "cannot be read: No such file or directory; name a TOML file"),
    ],
)
def test_refuses_wrong_file(text: str | None, words: str, tmp_path: Path) -> None:
    """A wrong file ends the command with status 2 and a sentence."""
    file = tmp_path / "server.toml"
    if text is not None:
        file.write_text(text)
    status, output = serve("--runner", "sim", "--config", str(file))
    assert status == 2
    assert words in output


def test_refuses_wrong_variable() -> None:
    """A wrong variable is named."""
    status, output = serve("--runner", "sim", LIFECYCLE_ENGINE_CHUNK="many")
    assert status == 2
    assert (
        "LIFECYCLE_ENGINE_CHUNK: 'many' is refused: input should be a valid integer"
        in output
    )


def test_refuses_file_of_keys_that_is_not_there(tmp_path: Path) -> None:
    """Keys that cannot be read end the command before anything starts."""
    keys = ("--client-keys", str(tmp_path / "keys"))
    status, output = serve("--runner", "sim", *keys)
    assert status == 2
    assert "cannot be read: No such file or directory; name a text file" in output


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model.checkpoint", "/nowhere", "/nowhere holds no config.json; name the"),
        ("admission.client_keys", "/nowhere", "/nowhere cannot be read: No such file"),
        ("http.observers", "json:nothing", "json:nothing: module 'json' has no"),
        ("engine.replicas", "2", "2 has no effect on an engine in a child process"),
    ],
)
def test_names_source_of_what_is_wrong_at_the_start(
    path: str, value: str, words: str, tmp_path: Path
) -> None:
    """The message begins with the option, the variable, or the key and its file."""
    (setting,) = (each for each in SETTINGS if each.path == path)
    runner = ("--runner", "torch" if path == "model.checkpoint" else "sim")
    file = tmp_path / "server.toml"
    file.write_text(f'[{setting.section}]\n{setting.key} = "{value}"\n')
    if path == "http.observers":
        file.write_text(f'[http]\nobservers = ["{value}"]\n')
    for source, (status, output) in {
        setting.option: serve(*runner, setting.option, value),
        setting.variable: serve(*runner, **{setting.variable: value}),
        f"{file}: {path}": serve(*runner, "--config", str(file)),
        f"{file}: {path} ": serve(*runner, LIFECYCLE_CONFIG=str(file)),
    }.items():
        assert status == 2
        assert f"Invalid value for {source.strip()}: {words}" in output


def test_names_variable_of_file_that_is_not_there() -> None:
    """The file of LIFECYCLE_CONFIG is not said to be that of an option."""
    status, output = serve("--print-config", LIFECYCLE_CONFIG="/nowhere.toml")
    assert status == 2
    assert "LIFECYCLE_CONFIG: /nowhere.toml cannot be read" in output


def test_reads_keys_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--client-keys -` reads the keys, and only when the server is made."""
    config = load_config({"model_runner": "sim", "admission_client_keys": "-"})
    source = io.StringIO("sk-one\nsk-two\n")
    monkeypatch.setattr(sys, "stdin", source)
    assert 'client_keys = "-"' in config.to_toml()
    assert source.tell() == 0
    client = make_app(config).state.service.client
    scope = {"headers": [(b"authorization", b"Bearer sk-one")], "client": ("::1", 1)}
    other = {"headers": [(b"authorization", b"Bearer sk-six")], "client": ("::1", 1)}
    assert client(scope) != client(other) == client_address(other)


def test_refuses_keys_from_closed_standard_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that was started without standard input cannot read keys there."""
    monkeypatch.setattr(sys, "stdin", None)
    config = load_config({"model_runner": "sim", "admission_client_keys": "-"})
    with pytest.raises(ConfigError, match="--client-keys: - cannot be read: Bad file"):
        make_app(config)


def test_prints_no_keys(tmp_path: Path) -> None:
    """The settings name the file of API keys, and contain none of them."""
    keys = tmp_path / "keys"
    keys.write_text("sk-secret-7f3a\n")
    _, output = serve("--print-config", "--client-keys", str(keys))
    assert str(keys) in output
    assert "sk-secret" not in output


def test_has_short_functions() -> None:
    """No function of the command line is longer than a screen."""
    tree = ast.parse(Path(module.__file__).read_text())
    long = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 60
    ]
    assert long == []


# What returns something to await, which nobody does.
ASYNC = """
import functools

async def tell(event, more=None):
    pass

async def streamed(event):
    yield event

class Teller:
    async def __call__(self, event):
        pass

    async def tell(self, event):
        pass

Told = Teller()
told = Told.tell
partly = functools.partial(tell, more=1)
"""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere_at_all:tell", "No module named"),
        ("json:tell", "has no attribute"),
        ("json", "give MODULE:NAME"),
        (":tell", "give MODULE:NAME"),
        ("json:__name__", "is a str, not a function"),
        ("anyio:sleep", "is async, not a function of an event that returns at once"),
        ("watch_async:told", "is async"),
        ("watch_async:Told", "is async"),
        ("watch_async:partly", "is async"),
        ("watch_async:streamed", "is async"),
    ],
)
async def test_refuses_an_observer_that_is_none(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is started, with what to give in its place."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watch_async", raising=False)
    (tmp_path / "watch_async.py").write_text(ASYNC)
    with pytest.raises(ConfigError, match=why):
        observers([name])


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("sim", {"speculative": "ngram"}, "ngram has no effect with --runner sim"),
        ("torch", {"draft_tokens": 5}, "5 has no effect without drafts"),
    ],
)
def test_settings_without_effect_are_refused(
    tmp_path: Path, model: Any, options: Any, words: str
) -> None:
    """At the start of the server, each where it stands."""
    (tmp_path / "config.json").write_text("{}")
    folder = {"checkpoint": tmp_path} if model == "torch" else {}
    config = ServerConfig(
        model=ModelConfig(runner=model, **folder), engine=EngineConfig(**options)
    )
    with pytest.raises(ConfigError, match=words):
        make_app(config)


def test_helps_without_docstrings() -> None:
    """`-OO` takes them away, and the text of each setting stays what it is."""
    code = "from lifecycle_engine.config import SETTINGS\n"
    code += "for each in SETTINGS: print(each.help)"
    argv = [sys.executable, "-OO", "-c", code]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [setting.help for setting in SETTINGS]


def test_server_hands_its_settings_on(tmp_path: Path) -> None:
    """They reach the command line of the engine process."""
    engine = EngineConfig(speculative="draft=small", draft_tokens=6)
    argv = worker_argv(ServerConfig(engine=engine), tmp_path)
    assert argv[argv.index("--speculative") + 1] == "draft=small"
    assert argv[argv.index("--draft-tokens") + 1] == "6"
