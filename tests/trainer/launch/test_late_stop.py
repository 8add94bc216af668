"""A run that is asked to stop when it is over already ends as one that was not asked."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.paths import MICRO
from tests.trainer.commands import Forked, environment, run_command
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api

from fluxtrain.cli import run as summary
from fluxtrain.errors import EXIT_OK, EXIT_STOPPED

pytestmark = pytest.mark.slow

LAUNCH, PRINT_SUMMARY = api.elastic_launch, summary.print_summary


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class _StoppedAtItsEnd(LAUNCH):
    def __call__(self, *arguments: Any) -> dict[int, Any]:
        results = super().__call__(*arguments)
        stop()
        return results


class _StoppedAtItsBegin(LAUNCH):
    def __call__(self, *arguments: Any) -> dict[int, Any]:
        raise SignalException("", signal.SIGTERM)


def _print_summary(*arguments: Any) -> None:
    stop()
    PRINT_SUMMARY(*arguments)


STOPPED = {
    "begin": mock.patch.object(api, "elastic_launch", _StoppedAtItsBegin),
    "end": mock.patch.object(api, "elastic_launch", _StoppedAtItsEnd),
    "summary": mock.patch.object(summary, "print_summary", _print_summary),
}


def _run(arguments: tuple[str, ...], log: Path, moment: str) -> None:
    with STOPPED[moment]:
        run_command(arguments, environment(), log, log)


def run(output: Path, steps: int, moment: str) -> tuple[int | None, str]:
    """Return the exit code and the output of a run that gets SIGTERM at ``moment``."""
    log = output.with_suffix(".log")
    options = (f"--schedule.steps={steps}", "--evaluation.every_samples=0")
    process = Forked(_run, ("run", str(MICRO), f"--output={output}", *options), log, moment)
    code = process.wait(120)
    process.kill()
    return code, log.read_text()


@pytest.mark.torch_range
def test_a_run_that_is_over_is_a_success_and_one_that_has_more_to_do_is_stopped(
    tmp_path: Path,
) -> None:
    for moment in ("end", "summary"):
        code, text = run(tmp_path / moment, 2, moment)
        assert code == EXIT_OK, text
        assert "every logged step" in text
        assert "stopped" not in text
        assert "Traceback" not in text
    code, text = run(tmp_path / "end", 4, "begin")
    assert code == EXIT_STOPPED, text
    assert "stopped by SIGTERM" in text
    assert "a checkpoint of step 2; the same command resumes" in text
