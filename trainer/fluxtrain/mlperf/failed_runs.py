"""The failed runs of a package: their logs, and a file with the reason of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxtrain.contract.launch import MLPERF_FILE
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.mlperf.evidence import (
    FAILED_FILE,
    OTHERS_FOLDER,
    FailedRun,
    is_file,
    read_object,
    read_run,
    run_of,
)

_RUNS = "runs"


def file_name(number: int) -> str:
    """Return the name of the log of a failed run, below the folder of the code."""
    return f"{OTHERS_FOLDER}/failed_{number:02}.txt"


def parse_failed(texts: Iterable[str]) -> list[FailedRun]:
    """Return the failed runs from ``FOLDER=REASON``; raise ConfigError for other texts, and ended runs."""
    runs = []
    for text in texts:
        folder, _, reason = text.partition("=")
        if not folder.strip() or not reason.strip():
            raise ConfigError(
                "--failed", text, "must be RUN=REASON, such as runs/four=a node was lost"
            )
        log = Path(folder) / MLPERF_FILE
        if not Path(folder).is_dir():
            raise ConfigError("--failed", folder, "no output folder of fluxtrain run")
        run = read_run(log) if is_file(log) else None
        if run is not None and run.first("run_stop") is not None:
            text = "its log has a run_stop: it is a run like the others; give it without --failed"
            raise ConfigError("--failed", folder, text)
        runs.append(FailedRun(Path(folder).name, reason.strip(), None, run))
    return runs


def write_failed(runs: Sequence[FailedRun], folder: Path) -> None:
    """Write the logs of ``runs``, and their reasons, below ``folder``; nothing without any."""
    if not runs:
        return
    (folder / OTHERS_FOLDER).mkdir(exist_ok=True)
    told = []
    for number, run in enumerate(runs):
        if run.log is not None:
            shutil.copyfile(run.log.log, folder / file_name(number))
        log = None if run.log is None else file_name(number)
        told.append(
            {"name": run.name, "reason": run.reason, "exit_code": run.exit_code, "log": log}
        )
    (folder / FAILED_FILE).write_text(json.dumps({_RUNS: told}, indent=2) + "\n")


def read_failed(folder: Path) -> list[FailedRun]:
    """Return the failed runs in ``folder``; raise ConfigError if their file or a log cannot be read."""
    path = folder / FAILED_FILE
    values = read_object(path) or {}
    told = values.get(_RUNS, [])
    if not isinstance(told, list) or not all(isinstance(each, dict) for each in told):
        raise ConfigError(str(path), UNSET, f"{_RUNS} is not a list of objects")
    return [_read(each, number, folder) for number, each in enumerate(told)]


def _read(told: Mapping[str, Any], number: int, folder: Path) -> FailedRun:
    """Return a failed run; its log has the name that its place in the file gives it."""
    name, code = str(told.get("name")), told.get("exit_code")
    log = None
    if told.get("log") is not None:
        log = run_of(folder / file_name(number), None, file_name(number))
    return FailedRun(
        name, str(told.get("reason") or ""), code if isinstance(code, int) else None, log
    )
