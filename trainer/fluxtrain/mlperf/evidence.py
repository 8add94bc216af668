"""What a review reads: the logs, configurations and system descriptions of runs, results and packages."""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from pathlib import Path
from typing import Any

from fluxtrain.contract.process import CHAIN_FILE, CONFIG_FILE, MLPERF_FILE
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_DIVERGED, UNSET, ConfigError
from fluxtrain.mlperf.compliance import RULESETS, require_readable, sanitize
from fluxtrain.mlperf.facts import SYSTEM_KEY
from fluxtrain.mlperf.log_lines import (
    MAX_BYTES,
    NO_LOG,
    LogLine,
    Outcome,
    is_number,
    outcome,
    read_lines,
)

BENCHMARK = "flux1"
"""Name of the benchmark in logs and of its folder in a package."""
_COUNT = re.compile("[0-9]{1,9}")
WAIVERS_FILE = "waivers.json"
"""Of a package, beside its code."""
OTHERS_FOLDER = "other_runs"
"""The same: the logs of runs that do not count, of more than ten or failed ones."""
FAILED_FILE = "failed_runs.json"
"""The same: the runs that failed, each with its reason."""


@dataclass(frozen=True)
class Run:
    """A run: its log, and its configuration where there is one."""

    name: str
    log: Path
    lines: Sequence[LogLine]
    """All lines with MLCommons' token, broken ones too."""
    config: Mapping[str, Any] | None = None
    config_file: Path | None = None
    """Where the configuration was read."""

    @cached_property
    def events(self) -> Sequence[LogLine]:
        """Return the lines that are valid events."""
        return [line for line in self.lines if not line.fault]

    def all(self, *keys: str) -> list[LogLine]:
        """Return the events with these keys, in the order of the log."""
        found = [line for key in keys for line in self._by_key.get(key, ())]
        return found if len(keys) == 1 else sorted(found, key=lambda line: line.number)

    def first(self, key: str) -> LogLine | None:
        return next(iter(self._by_key.get(key, ())), None)

    @cached_property
    def _by_key(self) -> Mapping[str, Sequence[LogLine]]:
        found: dict[str, list[LogLine]] = {}
        for line in self.events:
            found.setdefault(line.key, []).append(line)
        return found

    def value(self, key: str) -> Any:
        """Return the value of the first event with the key, None without one."""
        line = self.first(key)
        return None if line is None else line.value

    def number(self, key: str) -> int | None:
        """Return the value of the first event with the key if it is a whole number."""
        value = self.value(key)
        return value if is_number(value) and isinstance(value, int) else None

    @property
    def resolved(self) -> RunConfig:
        """Return the configuration; raise ConfigError, with its file, for one that is no configuration."""
        try:
            return resolve(self.config or {})
        except ConfigError as error:
            place = self.name if self.config_file is None else str(self.config_file)
            raise ConfigError(place, UNSET, str(error)) from None

    @property
    def closed(self) -> bool:
        return bool(self.value("submission_division") == "closed")

    @property
    def system(self) -> Mapping[str, Any]:
        """Return what the nodes reported about themselves, empty if the log does not have it."""
        found = self.value(SYSTEM_KEY)
        return found if isinstance(found, dict) else {}

    @cached_property
    def outcome(self) -> Outcome:
        """Return how the run ended by its log, or that it did not."""
        return outcome(self.lines)

    @property
    def succeeded(self) -> bool:
        """Return whether the run reached its target and the log calls that a success."""
        return self.outcome == "converged"

    @property
    def samples(self) -> int | None:
        """Return the samples at the last evaluation of a run that reached its target, None for others."""
        evaluations = self.all("eval_accuracy")
        return evaluations[-1].samples if self.succeeded and evaluations else None

    @property
    def minutes(self) -> float:
        """Return the minutes from run_start to run_stop; infinite if the target was not reached."""
        start, stop = self.first("run_start"), self.first("run_stop")
        if self.samples is None or start is None or stop is None:
            return inf
        return float(stop.fields["time_ms"] - start.fields["time_ms"]) / 60_000


@dataclass(frozen=True)
class FailedRun:
    """A run that failed before its end, so that it is no run of a result; it stays in the record."""

    name: str
    reason: str
    """In words: why it failed."""
    exit_code: int | None = None
    """Of its program, None if unknown."""
    log: Run | None = None
    """None if it failed before it had one."""

    @property
    def diverged(self) -> bool:
        """Return whether its loss was not finite: it did not converge."""
        return self.exit_code == EXIT_DIVERGED


@dataclass(frozen=True)
class Result:
    """The runs of one result, with the description of their system where there is one."""

    name: str
    runs: Sequence[Run]
    description: Mapping[str, Any] | None = None
    implementation: Path | None = None
    """Folder of the package with the code that ran, None outside a package."""
    waivers: Mapping[str, str] = field(default_factory=dict)
    """Rules whose findings the submitter knows of, each with the reason; of a package."""
    folder: Path | None = None
    """Folder of the package with the logs, None outside a package."""
    ruleset: str = RULESETS[-1]
    others: Sequence[Run] = ()
    """Of more than ten runs, those that do not count."""
    failed: Sequence[FailedRun] = ()

    @property
    def closed(self) -> bool:
        """Return whether its first log is of the closed division."""
        return bool(self.runs) and self.runs[0].closed


def read_finished_run(folder: Path) -> Run:
    """Return the run whose output is ``folder``.

    Raises ConfigError if it has no log or no configuration, or if its log has no end.
    """
    log, config = folder / MLPERF_FILE, folder / CONFIG_FILE
    for path in (log, config):
        if not is_file(path):
            text = f"has no {path.name}: give output folders of fluxtrain run"
            raise ConfigError("RUN", str(folder), text)
    run = run_of(log, config, str(folder))
    if run.first("run_stop") is None:
        raise ConfigError("RUN", str(folder), "the run is not over: its log has no run_stop")
    return run


def read_run(log: Path) -> Run:
    """Return the run whose log is ``log``, with the configuration beside it, if there is one."""
    return run_of(log, log.parent / CONFIG_FILE)


def chain_of(run: Run) -> Path | None:
    """Return where the chain of ``run`` belongs: beside its log, in a package beside its configuration.

    None if only its log is given, which has neither.
    """
    if run.config_file is None:
        return None
    if run.config_file.name == CONFIG_FILE:
        return run.log.parent / CHAIN_FILE
    return run.config_file.with_name(enclosed_name(run.config_file.stem.removeprefix("config_")))


def enclosed_name(number: int | str) -> str:
    """Return the name of a chain in a package."""
    return f"chain_{number}.jsonl"


def is_file(path: Path) -> bool:
    """Return whether there is such a file; raise ConfigError if its folder cannot be read."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("PATH", str(path), f"cannot be read ({reason})") from None


def num_ranks(system: Mapping[str, Any]) -> int | None:
    """Return nodes x accelerators of a system description, None if it does not say."""
    counts = [count_of(system, name) for name in ("number_of_nodes", "accelerators_per_node")]
    return None if None in counts else prod(count for count in counts if count is not None)


def count_of(system: Mapping[str, Any], field: str) -> int | None:
    """Return the number in ``field`` of a system description, None if it holds none."""
    text = str(system.get(field))
    return int(text) if _COUNT.fullmatch(text) else None


def run_of(log: Path, config: Path | None, name: str = "") -> Run:
    """Return the run of ``log`` and the file ``config``, if there is one.

    Raises ConfigError if one cannot be read, and for what is no log, or one of another benchmark.
    """
    _require_file(log)
    try:
        if (size := log.stat().st_size) > MAX_BYTES:
            text = f"{size} bytes; a log has at most {MAX_BYTES}"
            raise ConfigError("PATH", str(log), text)
        lines = list(read_lines(log))
    except OSError as error:
        raise ConfigError("PATH", str(log), f"cannot be read ({error.strerror})") from None
    if size and not lines:
        require_readable(log)
        raise ConfigError("PATH", str(log), NO_LOG)
    values = None if config is None else read_object(config)
    run = Run(name or log.name, log, lines, values, None if values is None else config)
    if (told := run.value("submission_benchmark")) not in (None, BENCHMARK):
        text = f"is a log of the benchmark {sanitize(str(told))}; allowed: {BENCHMARK}"
        raise ConfigError("PATH", str(log), text)
    return run


def _require_file(path: Path) -> None:
    """Raise ConfigError for what exists and is no file: a pipe that nobody writes would never end."""
    if not is_file(path) and path.exists() and not path.is_dir():
        raise ConfigError("PATH", str(path), "is not a regular file")


def read_bytes(path: Path) -> bytes:
    """Return the content of a log or a chain; raise ConfigError if it cannot be read, or is too large."""
    _require_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("PATH", str(path), f"cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise ConfigError("PATH", str(path), f"more than {MAX_BYTES} bytes, which no log has")
    return content


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Return the object in the file, None if there is no such file; raise ConfigError for other content."""
    _require_file(path)
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(str(path), UNSET, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), UNSET, f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(str(path), UNSET, "is not a JSON object")
    return values


def write_json(path: Path, values: object) -> None:
    """Write ``values`` into the file ``path``, whose folder is made too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


_RUNS = "runs"


def file_name(number: int) -> str:
    """Return the name of the log of a failed run, below the folder of the code."""
    return f"{OTHERS_FOLDER}/failed_{number:02}.txt"


def named_texts(
    option: str, texts: Iterable[str], allowed: str, may_be_empty: bool = False
) -> dict[str, str]:
    """Return the texts of ``option``, NAME=TEXT, by name; ConfigError with what is ``allowed`` for others."""
    found: dict[str, str] = {}
    for text in texts:
        name, mark, value = (part.strip() for part in text.partition("="))
        if not mark or not (may_be_empty or (name and value)):
            raise ConfigError(option, text, allowed)
        found[name] = value
    return found


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
        log = None
        if run.log is not None:
            log = file_name(number)
            shutil.copyfile(run.log.log, folder / log)
        told.append(
            {"name": run.name, "reason": run.reason, "exit_code": run.exit_code, "log": log}
        )
    write_json(folder / FAILED_FILE, {_RUNS: told})


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
