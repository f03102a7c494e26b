"""The alert rules of the documentation, judged by Prometheus' own `promtool`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "docs" / "alerts.yml"
GATE, MODEL = {"gate": "requests"}, {"model": "qwen"}
# Of each alert: its labels, and the metrics that raise it and that do not. Values are of
# each minute: a+bxn is a, and then n values more that each grow by b.
CASES: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "GateSaturated": (
        GATE,
        {'lifecycle_gate_waiting{gate="requests"}': "3x20"},
        {'lifecycle_gate_waiting{gate="requests"}': "3x14 0 3x4"},
    ),
    "RequestsRefused": (
        GATE,
        {
            'lifecycle_gate_requests_total{gate="requests",result="admitted"}': "0+90x20",
            'lifecycle_gate_requests_total{gate="requests",result="refused"}': "0+10x20",
        },
        {
            'lifecycle_gate_requests_total{gate="requests",result="admitted"}': "0+99x20",
            'lifecycle_gate_requests_total{gate="requests",result="refused"}': "0+1x20",
        },
    ),
    "SlowFirstToken": (
        {},
        {
            'lifecycle_time_to_first_item_seconds_bucket{le="10"}': "0+90x20",
            'lifecycle_time_to_first_item_seconds_bucket{le="30"}': "0+100x20",
            'lifecycle_time_to_first_item_seconds_bucket{le="+Inf"}': "0+100x20",
        },
        {
            'lifecycle_time_to_first_item_seconds_bucket{le="10"}': "0+99x20",
            'lifecycle_time_to_first_item_seconds_bucket{le="30"}': "0+100x20",
            'lifecycle_time_to_first_item_seconds_bucket{le="+Inf"}': "0+100x20",
        },
    ),
    "LeasesLost": (
        GATE | {"released_by": "collector"},
        {
            "lifecycle_gate_leases_released_total"
            '{gate="requests",released_by="collector"}': "0x10 1x10"
        },
        {
            "lifecycle_gate_leases_released_total"
            '{gate="requests",released_by="owner"}': "0+9x20"
        },
    ),
    "SessionEndsFailed": (
        {},
        {"lifecycle_session_ends_failed_total": "2x10 3x10"},
        {"lifecycle_session_ends_failed_total": "2x20"},
    ),
    "EngineDown": (
        MODEL,
        {'lifecycle_engine_up{model="qwen"}': "1x15 0x5"},
        {'lifecycle_engine_up{model="qwen"}': "1x18 0x1 1x1"},
    ),
    "EngineRestarts": (
        MODEL,
        {'lifecycle_engine_starts_total{model="qwen"}': "1x8 2x3 3x3 4x6"},
        {'lifecycle_engine_starts_total{model="qwen"}': "1x8 2x12"},
    ),
    "EngineQueueGrows": (
        MODEL,
        {'lifecycle_engine_requests_waiting{model="qwen"}': "5x20"},
        {'lifecycle_engine_requests_waiting{model="qwen"}': "5x14 0 5x5"},
    ),
}


def rules() -> dict[str, dict[str, Any]]:
    """Return the rules by the name of their alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def expected(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return the alert as the operator on call reads it."""
    rule = rules()[name]
    text = yaml.safe_dump(rule["annotations"])
    filled = re.sub(r"{{ \$labels\.(\w+) }}", lambda it: labels[it[1]], text)
    return {
        "exp_labels": rule["labels"] | labels,
        "exp_annotations": yaml.safe_load(filled),
    }


def test_tries_every_rule() -> None:
    """With metrics that raise it, and others that do not."""
    assert CASES.keys() == rules().keys()


@pytest.mark.skipif(not shutil.which("promtool"), reason="no Prometheus here")
@pytest.mark.parametrize("name", CASES)
def test_raises_what_it_should(name: str, tmp_path: Path) -> None:
    """At the twentieth minute, and names the gate or the model in words."""
    labels, wrong, right = CASES[name]
    for metrics in (wrong, right):
        series = [{"series": key, "values": value} for key, value in metrics.items()]
        alerts = [expected(name, labels)] if metrics is wrong else []
        check = {"eval_time": "20m", "alertname": name, "exp_alerts": alerts}
        test = {"interval": "1m", "input_series": series, "alert_rule_test": [check]}
        file = tmp_path / "test.yml"
        file.write_text(
            yaml.safe_dump(
                {
                    "rule_files": [str(RULES)],
                    "evaluation_interval": "1m",
                    "tests": [test],
                }
            )
        )
        done = subprocess.run(
            ["promtool", "test", "rules", str(file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
