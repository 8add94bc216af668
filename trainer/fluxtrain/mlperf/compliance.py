"""MLCommons' compliance checker, run as they ship it, and its verdict in plain words."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.explain import explain, hostile, printable
from fluxtrain.mlperf.lines import read_lines

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
"""The rulesets that know the benchmark ``flux1``; the newest last."""
_MAX_BYTES = 256 * 2**20  # a run's own log is below one MiB; a pod's log may carry chatter
_TIMEOUT_SECONDS = 300.0
_SEPARATOR = "\n" + "-" * 30 + "\n"
_PREFIXES = ("INFO - ", "ERROR - ")


@dataclass(frozen=True)
class Verdict:
    """What the checker says of one log; ``explanations`` are empty where it says SUCCESS."""

    success: bool
    ruleset: str
    log: Path
    messages: list[str]
    """The checker's own words, warnings included."""
    explanations: list[str]
    """What is wrong, what is allowed, what to change: one text per finding."""


def check(log: Path, ruleset: str = RULESETS[-1]) -> Verdict:
    """Return the verdict of MLCommons' compliance checker on ``log`` under ``ruleset``.

    Raises ConfigError where the ruleset is unknown or the file is missing, empty, too large or not a text.
    """
    _require_ruleset(ruleset)
    _require_readable(log)
    lines = list(read_lines(log))
    if (reason := hostile(lines)) is not None:
        return Verdict(False, ruleset, log, [], [reason])
    returncode, output = _run_checker(log, ruleset)
    messages = _messages(output)
    success = returncode == 0 and output.rstrip().endswith("INFO - SUCCESS")
    explanations = [] if success else explain(messages, lines, ruleset)
    return Verdict(success, ruleset, log, messages, explanations)


def render(verdict: Verdict) -> str:
    """Return the verdict for a terminal: SUCCESS, or FAILED and one numbered paragraph per finding."""
    word = "SUCCESS" if verdict.success else "FAILED"
    checker = f"MLCommons' compliance checker {version('mlperf-logging')}"
    head = f"{word}: {printable(str(verdict.log))} ({checker}, ruleset {verdict.ruleset})"
    findings = [f"  {i}. {text}" for i, text in enumerate(verdict.explanations, 1)]
    return "\n".join([head, *findings])


def _require_ruleset(ruleset: str) -> None:
    if ruleset not in RULESETS:
        raise ConfigError("--ruleset", ruleset, f"allowed: {', '.join(RULESETS)}")


def _require_readable(log: Path) -> None:
    try:
        if not log.is_file():
            what = "not a file" if log.exists() else "no such file"
            raise ConfigError("LOG", str(log), f"{what}; give the mlperf.log of a run")
        size = log.stat().st_size
        with log.open("rb") as file:
            start = file.read(2**16)
    except OSError as error:
        raise ConfigError("LOG", str(log), f"cannot be read ({error.strerror})") from None
    if size == 0:
        raise ConfigError("LOG", str(log), "the file is empty")
    if size > _MAX_BYTES:
        raise ConfigError("LOG", str(log), f"{size} bytes; a log has at most {_MAX_BYTES}")
    if b"\0" in start:
        raise ConfigError("LOG", str(log), "not a text file")


def _run_checker(log: Path, ruleset: str) -> tuple[int, str]:
    """Return the checker's exit code and what it wrote to stderr; it leaves no file behind."""
    # -P: the working directory is no place to import from.
    command = [sys.executable, "-P", "-m", "mlperf_logging.compliance_checker"]
    command += ["--usage", "training", "--ruleset", ruleset, "--log_output", os.devnull]
    try:
        done = subprocess.run(
            [*command, str(log.resolve())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        took = f"the checker was not done after {_TIMEOUT_SECONDS:.0f} seconds"
        raise ConfigError("LOG", str(log), took) from None
    return done.returncode, done.stderr.decode("utf-8", "replace")


def _messages(output: str) -> list[str]:
    """Return the checker's messages, split; a traceback counts as one."""
    found: list[str] = []
    for record in _records(output):
        if record.startswith("WARNING - "):
            texts = record.removeprefix("WARNING - ").split(_SEPARATOR)
            found += [text.strip() for text in texts if text.strip()]
        elif record.startswith("Traceback"):
            found.append(record.strip())
    return found


def _records(output: str) -> list[str]:
    """Return the log records of ``output``, each with the lines that follow it."""
    starts = (*_PREFIXES, "WARNING - ", "Traceback")
    records: list[list[str]] = []
    for line in output.splitlines():
        if line.startswith(starts) or not records:
            records.append([])
        records[-1].append(line)
    return ["\n".join(record) for record in records]
