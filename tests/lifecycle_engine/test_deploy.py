"""The files of `examples/deploy`: what they name exists, and they fit each other."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from serve_kit import CLI, served

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
KEY, OPERATOR = "key-of-a-client", "key-of-the-operator"
# That a service's streams get to end, and the engine after them.
SPARE = 5


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, a name and the rest of the line."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line]  # type: ignore[misc]


def given(name: str) -> list[str]:
    """What all instructions of a name say, those of the last stage last."""
    return [rest for each, rest in instructions() if each == name]


def image_environment() -> dict[str, str]:
    """The variables of the image."""
    pairs = [pair for line in given("ENV") for pair in shlex.split(line)]
    return dict(pair.split("=", 1) for pair in pairs)


def manifests() -> dict[str, Any]:
    """The Kubernetes objects by their kind."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {each["kind"]: each for each in documents}


def pod() -> dict[str, Any]:
    """The pod of the Deployment."""
    found: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return found


def pod_environment() -> dict[str, str]:
    """The variables of its container; those of a secret have the secret's name."""
    (container,) = pod()["containers"]
    return {each["name"]: each.get("value", OPERATOR) for each in container["env"]}


def compose() -> dict[str, Any]:
    """The services of Compose."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found["services"]


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "lifecycle.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def status(url: str, key: str | None = None) -> int:
    """The status of an answer."""
    request = urllib.request.Request(url)
    if key is not None:
        request.add_header("authorization", f"Bearer {key}")
    # Whatever proxy this machine goes through.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.asyncio
async def test_server_runs_with_the_variables_of_the_pod(tmp_path: Path) -> None:
    """It says nothing on standard error; probes, health check and scrape succeed."""
    keys = tmp_path / "api_keys"
    keys.write_text(KEY)
    variables = {**image_environment(), **pod_environment()}
    for name in ("PATH", "HOME", "LIFECYCLE_MODEL_CHECKPOINT"):
        del variables[name]
    variables["LIFECYCLE_ACCESS_API_KEY_FILE"] = str(keys)
    listen = variables["LIFECYCLE_HTTP_ADMIN_LISTEN"].rpartition(":")[0]
    variables["LIFECYCLE_HTTP_ADMIN_LISTEN"] = f"{listen}:0"
    (container,) = pod()["containers"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    async with served(env=variables) as server:
        public = f"http://127.0.0.1:{server.port}"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert status(public + container[probe]["httpGet"]["path"]) == 200
        assert status(f"{public}/v1/models") == 401
        assert status(f"{public}/v1/models", KEY) == 200
        metrics = f"http://127.0.0.1:{server.admin.rpartition(':')[2]}"
        metrics += job["metrics_path"]
        assert status(metrics) == 401
        assert status(metrics, OPERATOR) == 200
        assert health_check(server.port) == 0
        assert await server.exit(signal.SIGTERM) == 0
        assert health_check(server.port) != 0


def health_check(port: int) -> int:
    """Run the check of the image on another port; return its status."""
    (line,) = given("HEALTHCHECK")
    command = yaml.safe_load(line.partition("CMD ")[2].replace(":8000'", f":{port}'"))
    done = subprocess.run(
        [sys.executable, *command[1:]], check=False, capture_output=True, timeout=60
    )
    return done.returncode


def test_image_is_built_of_what_it_copies(tmp_path: Path) -> None:
    """A wheel can be made of the files that the Dockerfile names, and no others."""
    pytest.importorskip("pip")
    pytest.importorskip("hatchling")
    for line in given("COPY"):
        if line.startswith("--from"):
            continue
        *sources, target = line.split()
        for source in sources:
            at, to = ROOT / source, tmp_path / "build" / target
            if at.is_dir():
                shutil.copytree(at, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(at, to)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "--no-index"]
    command += ["--disable-pip-version-check"]
    command += ["--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "build")]
    subprocess.run(command, check=True, timeout=300)
    assert len(list(tmp_path.glob("anyio_lifecycle-*.whl"))) == 1
    assert "tested.txt" in given("RUN")[-1]
    assert given("ENTRYPOINT") == ['["lifecycle", "serve"]']


def test_nothing_runs_as_root_or_without_a_limit_of_memory() -> None:
    """Of a container's limit, the server makes its budget."""
    user = given("USER")[-1].split(":")[0]
    assert int(user) == pod()["securityContext"]["runAsUser"] > 0
    (container,) = pod()["containers"]
    assert container["resources"]["limits"]["memory"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    server = compose()["server"]
    assert server["mem_limit"]
    assert server["read_only"]
    assert unit()["DynamicUser"] == ["yes"]
    assert unit()["MemoryMax"]


def test_whoever_stops_it_waits_for_the_drain() -> None:
    """Streams end by themselves before the process is killed."""
    name, (container,) = "LIFECYCLE_HTTP_DRAIN", pod()["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(pod_environment()[name])
    assert pod()["terminationGracePeriodSeconds"] >= pause + drain + SPARE
    server = compose()["server"]
    grace = float(server["stop_grace_period"].removesuffix("s"))
    assert grace >= float(server["environment"][name]) + SPARE
    variables = dict(each.split("=", 1) for each in unit()["Environment"])
    assert float(unit()["TimeoutStopSec"][0]) >= float(variables[name]) + SPARE


@pytest.mark.parametrize("where", ["pod", "compose", "unit"])
def test_all_variables_are_settings(where: str) -> None:
    """Also beside those that Kubernetes adds, for a Service of this name."""
    variables = {
        "pod": {**image_environment(), **pod_environment()},
        "compose": compose()["server"]["environment"],
        "unit": dict(each.split("=", 1) for each in unit()["Environment"]),
    }[where]
    name = manifests()["Service"]["metadata"]["name"].upper()
    added = (f"{name}_PORT", f"{name}_SERVICE_HOST", f"{name}_PORT_80_TCP")
    mine = {key: it for key, it in os.environ.items() if "LIFECYCLE" not in key}
    environment = dict.fromkeys(added, "tcp://10.0.0.1:80") | mine
    environment |= {key: it for key, it in variables.items() if key != "PATH"}
    done = subprocess.run(
        [*CLI, "serve", "--print-config"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    drain = variables.get("LIFECYCLE_HTTP_DRAIN")
    assert f"drain = {drain}" in done.stdout


def test_prometheus_reads_the_files_that_compose_mounts() -> None:
    """Its rules, and the key that the server asks for."""
    service = compose()["prometheus"]
    mounted = dict(each.split(":")[:2] for each in service["volumes"])
    for source in mounted:
        assert (DEPLOY / source).exists()
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert set(settings["rule_files"]) <= set(mounted.values())
    (job,) = settings["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert compose()[host]["environment"]["LIFECYCLE_HTTP_ADMIN_LISTEN"].endswith(port)
    key = Path(job["authorization"]["credentials_file"]).name
    assert key in service["secrets"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that exists; it names what it does not know."""
    path = tmp_path / "lifecycle.service"
    text = (DEPLOY / "lifecycle.service").read_text()
    text = text.replace("/opt/lifecycle/bin/lifecycle", str(shutil.which("true")))
    # It may have something to say of other units of this machine.
    for more, said in (("", False), ("\n[Service]\nMemoryMaximum=8G\n", True)):
        path.write_text(text + more)
        done = subprocess.run(
            ["systemd-analyze", "verify", path],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (path.name in done.stderr) == said, done.stderr


@pytest.mark.slow
def test_image_runs(tmp_path: Path) -> None:
    """Where there is a Docker engine, the image is built, and serves."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], check=False).returncode:
        pytest.skip("no Docker engine here")
    build = [docker, "build", "-q", "-f", DEPLOY / "Dockerfile"]
    image = subprocess.check_output([*build, ROOT], text=True, timeout=3600).strip()
    run = [docker, "run", "--rm", "--read-only", "--tmpfs", "/tmp", image]
    try:
        done = subprocess.run(
            [*run, "--runner", "sim", "--print-config"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        subprocess.run([docker, "rmi", image], check=False, timeout=300)
    assert 'host = "0.0.0.0"' in done.stdout
