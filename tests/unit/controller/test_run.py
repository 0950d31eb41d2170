"""Tests of rl.controller.run: how a run that cannot be closed cleanly ends. Whole runs: tests/integration."""

import logging
from pathlib import Path

import pytest

from rl.controller import run as run_module
from rl.core.errors import ConfigError
from rl.core.resources import RunResources
from tests.support.tiny_run import make_tiny_run


def test_a_cleaner_and_a_summary_that_fail_do_not_mask_the_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_tiny_run(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    close = RunResources.close

    def broken_close(resources: RunResources) -> None:
        close(resources)
        raise OSError("the temporary folder is gone")

    def broken_summary(_: object, outcome: str) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr(RunResources, "close", broken_close)
    monkeypatch.setattr(run_module, "_summarize", broken_summary)
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="lacks the columns"):
        run.run()
    assert "closing the run's cleaner failed: OSError: the temporary folder is gone" in caplog.text
    assert "closing the summary failed: OSError: no terminal" in caplog.text
