"""Findings, a report of them, and its tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["pass", "fail", "not observable"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: what was sent, what was seen, and what that means."""

    id: str
    sent: str
    seen: str
    verdict: Verdict
    because: str

    @property
    def link(self) -> str:
        """The section of the page "Check a server" that explains this check."""
        return "check-a-server.md#" + self.id.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Report:
    """What one run found of one server."""

    server: str
    date: str
    version: str
    settings: dict[str, object]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(finding.verdict == "fail" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a report that `to_json` wrote.

        Raises:
            ValueError: the file is no such report.
        """
        try:
            data = json.loads(path.read_text())
            findings = tuple(Finding(**finding) for finding in data.pop("findings"))
            return cls(**data, findings=findings)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no report of `lifecycle check`") from error


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown(report: Report) -> str:
    """Return one report as a Markdown table."""
    lines = [
        _row("check", "sent", "seen", "verdict", "because"),
        _row(*["---"] * 5),
    ]
    for finding in report.findings:
        name = f"[{finding.id}]({finding.link})"
        lines.append(
            _row(name, finding.sent, finding.seen, finding.verdict, finding.because)
        )
    return "\n".join(lines) + "\n"


def compare(reports: Sequence[Report]) -> str:
    """Return several reports as one Markdown table: a line a check, a column each."""
    ids = list(dict.fromkeys(f.id for report in reports for f in report.findings))
    lines = [
        _row("check", *(report.server for report in reports)),
        _row(*["---"] * (1 + len(reports))),
        _row("measured on", *(report.date for report in reports)),
    ]
    for name in ids:
        cells = []
        for report in reports:
            found = [f for f in report.findings if f.id == name]
            cells.append(f"{found[0].verdict}: {found[0].seen}" if found else "not run")
        lines.append(_row(name, *cells))
    return "\n".join(lines) + "\n"
