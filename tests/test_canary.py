"""transformers as the engine calls it: the first test to fail when a new release no longer fits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch").set_num_threads(1)

from tiny_checkpoint import FAMILIES  # noqa: E402


class Complaints(logging.Handler):
    """What transformers logs as a warning, or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_the_models_of_this_release_without_a_complaint(
    tmp_path: Path, family: str
) -> None:
    """The tokens of `generate`, no warning, and nothing deprecated in the log."""
    from engine_kit import Kit

    complaints = Complaints()
    logger = logging.getLogger("transformers")
    logger.addHandler(complaints)
    try:
        kit = Kit(tmp_path, family)
        prompt = kit.prepare("Hello there.")
        served = kit.serve([prompt], chunk=512)
        expected = kit.generate(prompt)
    except Exception as error:
        error.add_note(f"with transformers {transformers.__version__}")
        raise
    finally:
        logger.removeHandler(complaints)
    assert served == [expected]
    deprecated = [each for each in complaints.lines if "deprecated" in each]
    assert deprecated == [], f"with transformers {transformers.__version__}"
