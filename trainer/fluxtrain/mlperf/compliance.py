"""Run MLCommons' compliance checker in a subprocess and explain its findings."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.explain import explain, path_finding, sanitize
from fluxtrain.mlperf.lines import MAX_BYTES, read_lines
from fluxtrain.mlperf.tools import TIMEOUT_SECONDS, run_tool

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
"""The rulesets with the benchmark ``flux1``; the newest last."""
_SEPARATOR = "\n" + "-" * 30 + "\n"
_RECORDS = ("INFO - ", "ERROR - ", "WARNING - ", "Traceback")


@dataclass(frozen=True)
class CheckResult:
    """Result of the checker for one log; ``explanations`` is empty if it succeeded."""

    success: bool
    ruleset: str
    log: Path
    messages: list[str]
    """Messages of the checker, including warnings."""
    explanations: list[str]
    """One text per finding: what is wrong, what is allowed, what to change."""


def check(log: Path, ruleset: str = RULESETS[-1]) -> CheckResult:
    """Return the result of MLCommons' compliance checker for ``log`` under ``ruleset``.

    Raises ConfigError if the ruleset is unknown or the file is missing, empty, too large or not text.
    """
    require_ruleset(ruleset)
    _require_readable(log)
    lines = list(read_lines(log))
    if (finding := path_finding(lines)) is not None:
        return CheckResult(False, ruleset, log, [], [finding])
    returncode, output = _run_checker(log, ruleset)
    messages = _messages(output)
    success = returncode == 0 and output.rstrip().endswith("INFO - SUCCESS")
    explanations = [] if success else explain(messages, lines, ruleset)
    return CheckResult(success, ruleset, log, messages, explanations)


def render(result: CheckResult) -> str:
    """Return the result for a terminal: SUCCESS, or FAILED and one numbered paragraph per finding."""
    outcome = "SUCCESS" if result.success else "FAILED"
    checker = f"MLCommons' compliance checker {version('mlperf-logging')}"
    head = f"{outcome}: {sanitize(str(result.log))} ({checker}, ruleset {result.ruleset})"
    findings = [f"  {i}. {text}" for i, text in enumerate(result.explanations, 1)]
    return "\n".join([head, *findings])


def require_ruleset(ruleset: str) -> None:
    """Raise ConfigError if there is no such ruleset."""
    if ruleset not in RULESETS:
        raise ConfigError("--ruleset", ruleset, f"allowed: {', '.join(RULESETS)}")


def _require_readable(log: Path) -> None:
    try:
        if not log.is_file():
            reason = "not a file" if log.exists() else "no such file"
            raise ConfigError("LOG", str(log), f"{reason}; give the mlperf.log of a run")
        size = log.stat().st_size
        with log.open("rb") as file:
            start = file.read(2**16)
    except OSError as error:
        raise ConfigError("LOG", str(log), f"cannot be read ({error.strerror})") from None
    if size == 0:
        raise ConfigError("LOG", str(log), "the file is empty")
    if size > MAX_BYTES:
        raise ConfigError("LOG", str(log), f"{size} bytes; a log has at most {MAX_BYTES}")
    if b"\0" in start:
        raise ConfigError("LOG", str(log), "not a text file")


def _run_checker(log: Path, ruleset: str) -> tuple[int, str]:
    """Return the checker's exit code and output; no file is written."""
    options = ("--usage", "training", "--ruleset", ruleset, "--log_output", os.devnull)
    try:
        return run_tool("compliance_checker", (*options, str(log.resolve())))
    except subprocess.TimeoutExpired:
        text = f"the checker timed out after {TIMEOUT_SECONDS:.0f} seconds"
        raise ConfigError("LOG", str(log), text) from None


def _messages(output: str) -> list[str]:
    """Return the checker's messages; a traceback is one message."""
    messages: list[str] = []
    for record in _records(output):
        if record.startswith("WARNING - "):
            texts = record.removeprefix("WARNING - ").split(_SEPARATOR)
            messages += [text.strip() for text in texts if text.strip()]
        elif record.startswith("Traceback"):
            messages.append(record.strip())
    return messages


def _records(output: str) -> list[str]:
    """Return the log records of ``output``, each with its continuation lines."""
    records: list[list[str]] = []
    for line in output.splitlines():
        if line.startswith(_RECORDS) or not records:
            records.append([])
        records[-1].append(line)
    return ["\n".join(record) for record in records]
