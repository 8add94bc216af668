"""Run MLCommons' tools on a log and on a package, and explain their findings.

Several of them always exit with 0, so success is determined from the output. The package checker runs
before the summarizer, which applies the scaling factor that the checker wrote.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fluxtrain.contract.run.presets import MLPERF_EVALUATION_SAMPLES, MLPERF_TARGET_LOSS
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.log_lines import (
    MAX_BYTES,
    NO_LOG,
    NO_TARGET,
    LogLine,
    outcome,
    parse,
    read_lines,
    target_of,
)
from fluxtrain.runtime.progress import counted, first_of

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
"""The rulesets with the benchmark ``flux1``; the newest last."""
_ROUNDS = (("2025-06", "2025-11", "5.1.0"), ("2025-12", "2026-06", "6.0.0"))
"""The months from the results of the round before to those of the round, with its ruleset."""
_SEPARATOR = "\n" + "-" * 30 + "\n"
_GZIP = b"\x1f\x8b"
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

    @property
    def only_missed(self) -> bool:
        """Return whether nothing but the target was missed."""
        return bool(self.messages) and all(map(_NEVER.match, self.messages))


def check(
    log: Path, ruleset: str = RULESETS[-1], read: Sequence[LogLine] | None = None
) -> CheckResult:
    """Return the result of MLCommons' compliance checker for ``log``, ``read`` before or not.

    Raises ConfigError if the ruleset is unknown or the file is missing, empty, too large or not text.
    """
    require_ruleset(ruleset)
    require_readable(log)
    lines = list(read_lines(log)) if read is None else read
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


def require_ruleset(ruleset: str | None) -> None:
    """Raise ConfigError if there is no such ruleset; None is that of the log."""
    if ruleset not in (None, *RULESETS):
        raise ConfigError("--ruleset", ruleset, f"allowed: {', '.join(RULESETS)}")


def require_readable(log: Path) -> None:
    """Raise ConfigError for what is no file with text."""
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
    if start.startswith(_GZIP):
        raise ConfigError("LOG", str(log), "is packed by gzip; unpack it first")
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


@dataclass(frozen=True)
class KeyRule:
    """The values that the checker accepts for a key, how to fix others, and why the key may be missing."""

    allowed: str
    fix: str = "fluxtrain writes this line; check the original log"
    absent: str = "fluxtrain always writes it; check the original log"


def _field(name: str) -> str:
    return f"set spec.run.{name}"


_FORMATS = (
    "fp64, fp32, tf32, fp16, bfloat16, fp8, mxfp6 (6.1.0 only), nvfp4, mxfp4, int8, uint8, int4 "
    "or uint4"
)
_ONE_OR_MORE = "a whole number from 1; an axis that is not used is 1"
_SAMPLES = "samples_count in its metadata, after run_start"

_LOSS = "a number, with samples_count in its metadata"
_NOT_EVALUATED = "nothing was evaluated; set spec.run.evaluation.every_samples above 0"
_NOT_OVER = "the run is not over; the same command resumes it"

KEY_RULES: dict[str, KeyRule] = {
    "submission_benchmark": KeyRule("flux1"),
    "submission_org": KeyRule("any text but the empty one", _field("logging.mlperf.organization")),
    "submission_platform": KeyRule("any text but the empty one", _field("logging.mlperf.platform")),
    "submission_division": KeyRule("closed or open", _field("logging.mlperf.division")),
    "cache_clear": KeyRule("any value"),
    "init_start": KeyRule("to be before init_stop and run_start"),
    "run_start": KeyRule("to be after init_stop, once"),
    "run_stop": KeyRule("once, after run_start, with a status in its metadata", absent=_NOT_OVER),
    "block_start": KeyRule(_SAMPLES, absent="no step was taken"),
    "block_stop": KeyRule(_SAMPLES, absent=_NOT_OVER),
    "eval_start": KeyRule(_SAMPLES),
    "eval_stop": KeyRule(_SAMPLES),
    "train_samples": KeyRule("any value but the empty text"),
    "eval_samples": KeyRule("any value but the empty text"),
    "global_batch_size": KeyRule("a number from 0", _field("schedule.global_batch_size")),
    "gradient_accumulation_steps": KeyRule("a number above 0"),
    "opt_name": KeyRule("adamw, in lower case"),
    "opt_adamw_beta_1": KeyRule("exactly 0.9", _field("optim.beta1")),
    "opt_adamw_beta_2": KeyRule("exactly 0.95", _field("optim.beta2")),
    "opt_adamw_epsilon": KeyRule("exactly 1e-08", _field("optim.epsilon")),
    "opt_adamw_weight_decay": KeyRule("exactly 0.1", _field("optim.weight_decay")),
    "opt_gradient_clip_norm": KeyRule("exactly 1.0", _field("optim.max_grad_norm")),
    "opt_base_learning_rate": KeyRule("a number from 0", _field("optim.learning_rate")),
    "opt_learning_rate_warmup_steps": KeyRule("a number from 0", _field("schedule.warmup_steps")),
    "lowest_numerical_precision_in_linear": KeyRule(_FORMATS, _field("precision.compute")),
    "lowest_numerical_precision_in_attn": KeyRule(_FORMATS, _field("precision.compute")),
    "lowest_numerical_precision_in_comm": KeyRule(_FORMATS, _field("precision.reduce")),
    "tensor_parallelism": KeyRule(_ONE_OR_MORE),
    "pipeline_parallelism": KeyRule(_ONE_OR_MORE),
    "context_parallelism": KeyRule(_ONE_OR_MORE),
    "expert_parallelism": KeyRule(_ONE_OR_MORE),
    "micro_batch_size": KeyRule("a whole number from 1", _field("parallel.micro_batch_size")),
    "config_filename": KeyRule("any value but the empty text"),
    "eval_accuracy": KeyRule(_LOSS, absent=_NOT_EVALUATED),
    "averaged_validation_loss": KeyRule(_LOSS, absent=_NOT_EVALUATED),
}
"""The rules of rulesets 5.1.0 to 6.1.0; ``init_stop`` and ``evaluation_frequency`` depend on other lines."""


_DISCLOSED = (
    *("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn"),
    *("lowest_numerical_precision_in_comm", "tensor_parallelism", "pipeline_parallelism"),
    *("context_parallelism", "expert_parallelism", "micro_batch_size", "config_filename"),
)
"""Keys that ruleset 6.1.0 is the first to require."""


def fit(logs: Iterable[Sequence[LogLine]]) -> dict[str, list[str]]:
    """Return for each ruleset what it needs that the others do not, and ``logs`` lack."""
    needed: dict[str, dict[str, None]] = {ruleset: {} for ruleset in RULESETS}
    for lines in logs:
        first = {line.key: line.value for line in reversed(lines) if not line.fault}
        given, batch = first.get("evaluation_frequency"), first.get("global_batch_size")
        closed = first.get("submission_division") == "closed" and given is not None
        for ruleset, texts in needed.items():
            newest = ruleset == RULESETS[-1]
            texts.update(dict.fromkeys(key for key in _DISCLOSED if newest and key not in first))
            every = rounded(batch) if newest else MLPERF_EVALUATION_SAMPLES
            if closed and given != every:
                texts[f"evaluation_frequency {every}"] = None
    return {ruleset: list(texts) for ruleset, texts in needed.items()}


def best_fit(needed: Mapping[str, Sequence[str]], month: str) -> str:
    """Return which of the rulesets that need least is that of the round of ``month``, else the newest."""
    least = min(map(len, needed.values()))
    equal = [ruleset for ruleset in RULESETS if len(needed[ruleset]) == least]
    dated = _ruleset_of(month)
    return dated if dated in equal else equal[-1]


def _ruleset_of(month: str) -> str:
    """Return the ruleset of the round of ``month``, empty if it is of none."""
    return next((ruleset for since, until, ruleset in _ROUNDS if since <= month <= until), "")


def describe_fit(needed: Mapping[str, Sequence[str]], passed: bool, month: str) -> str:
    """Return in words which rulesets logs pass, or fit by their keys, and what each other one needs."""
    fits = [ruleset for ruleset in RULESETS if not needed[ruleset]]
    head = f"{'passes' if passed else 'its keys fit'} {' and '.join(fits) or 'no ruleset'}"
    texts = [f"{name} needs {first_of(needed[name])}" for name in RULESETS if needed[name]]
    if len(fits) > 1 and (dated := _ruleset_of(month)) in fits:
        texts.append(f"the logs are of {month}: round {dated.removesuffix('.0')}")
    return "; ".join([head, *texts])


def rounded(batch: object) -> int:
    """Return the samples between two evaluations: 262,144, rounded up to whole batches."""
    size = batch if isinstance(batch, int) and 0 < batch <= 2**53 else 1
    return math.ceil(MLPERF_EVALUATION_SAMPLES / size) * size


_INIT_MINUTES = {"closed": 30, "open": 240}
_MANY = 6  # with as many missing keys the beginning of the log is assumed to be lost
_MAX_TEXT = 200
_MAX_FAULTS = 4
_LOSSES = ("eval_accuracy", "averaged_validation_loss")
_UNKNOWN_KEY = KeyRule("see MLCommons' training rules")

_CHECK = re.compile(r"CHECK for '(?P<key>[^']+)' failed in line (?P<index>\d+):")
_BROKEN = re.compile(r"Failed executing .*triggered by line ?:\n(?P<line>[^\n]*)", re.DOTALL)
_COUNT = re.compile(r"Required (?:EXACTLY_ONE|AT_LEAST_ONE) occurrence of '(?P<key>[^']+)'")
_FOUND = re.compile(r"but found (?P<count>\d+)(?P<different> with different values)?")
_NEVER = re.compile(r"Failed checks for (?P<key>\w+) :")


def explain(messages: Iterable[str], lines: Sequence[LogLine], ruleset: str) -> list[str]:
    """Return one text per finding, the most likely cause first; never empty."""
    if not lines:
        return [NO_LOG]
    messages = list(messages)
    findings = _faults([line for line in lines if line.fault])
    if any(message.startswith("Traceback") for message in messages):
        return findings or _crash_causes(lines) or [_crash(messages)]
    missing, others = [], []
    for message in messages:
        if (key := _missing_key(message)) is not None:
            missing.append(key)
        elif text := _explain_one(message, lines, ruleset):
            others.append(text)
    findings += _explain_missing(missing, lines) + others
    return findings or [sanitize(message) for message in messages] or ["no reason was given"]


def path_finding(lines: Iterable[LogLine]) -> str | None:
    """Return the finding for a line whose value is a path, None if there is none.

    The checker must not read such a log: it would open, and execute, the file.
    """
    for line in lines:
        if line.key in ("submission_division", "submission_benchmark") and re.search(
            r"[/\\\0]", str(line.value)
        ):
            return (
                f"{line.key} (line {line.number}) is {_repr(line.value)}, a path; "
                "the checker was not run, because it would open that file"
            )
    return None


def sanitize(text: str, most: int = _MAX_TEXT) -> str:
    """Return ``text`` shortened and without control characters, safe to print on a terminal."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= most else f"{clean[:most]}..."


def _explain_one(message: str, lines: Sequence[LogLine], ruleset: str) -> str | None:
    if match := _CHECK.match(message):
        line = lines[int(match["index"])] if int(match["index"]) < len(lines) else lines[-1]
        return _wrong_value(line, lines, ruleset)
    if match := _BROKEN.match(message):
        return _wrong_value(parse(0, match["line"]), lines, ruleset)
    if match := _NEVER.match(message):
        return _never_converged(match["key"], lines)
    if match := _COUNT.match(message):
        return _repeated(match["key"], message, lines)
    return None


def _wrong_value(line: LogLine, lines: Sequence[LogLine], ruleset: str) -> str:
    if special := _SPECIAL.get(line.key):
        return special(line, lines, ruleset)
    rule = KEY_RULES.get(line.key, _UNKNOWN_KEY)
    value = line.value
    if value is None:  # start or end of an interval: its position and metadata are checked
        return f"{_named(line, lines)} does not pass; needed: {rule.allowed}; {rule.fix}"
    return f"{_named(line, lines)} is {_repr(value)}; allowed: {rule.allowed}; {rule.fix}"


def _evaluation_frequency(line: LogLine, lines: Sequence[LogLine], ruleset: str) -> str:
    head = f"{_named(line, lines)} is {_repr(line.value)}"
    if ruleset != "6.1.0":
        return (
            f"{head}; ruleset {ruleset} allows {MLPERF_EVALUATION_SAMPLES} only, which needs a "
            f"spec.run.schedule.global_batch_size that divides it, and "
            f"spec.run.evaluation.every_samples {MLPERF_EVALUATION_SAMPLES}"
        )
    batch = _first(lines, "global_batch_size")
    if batch is None or not isinstance(batch.value, int) or not 0 < batch.value <= 2**53:
        return f"{head}; it is checked against global_batch_size, which must come before it"
    if batch.number > _line_number(line, lines):
        return f"{head}; global_batch_size must come before it (it is in line {batch.number})"
    expected = rounded(batch.value)
    return (
        f"{head}; with global_batch_size {batch.value} ruleset 6.1.0 allows {expected} only "
        f"({MLPERF_EVALUATION_SAMPLES} rounded up to whole batches); "
        f"set spec.run.evaluation.every_samples to {MLPERF_EVALUATION_SAMPLES}"
    )


def _init_stop(line: LogLine, lines: Sequence[LogLine], ruleset: str) -> str:
    name, begin = _named(line, lines), _first(lines, "init_start")
    division, run = _first(lines, "submission_division"), _first(lines, "run_start")
    number = _line_number(line, lines)
    if begin is None or begin.number > number:
        return f"{name} is before any init_start"
    if run is not None and run.number < number:
        return f"{name} is after run_start; it must come before it"
    if division is None or division.number > number:
        return f"{name} is before submission_division, which sets its time limit"
    minutes = (line.fields["time_ms"] - begin.fields["time_ms"]) / 60_000
    limit = _INIT_MINUTES.get(str(division.value), 0)
    return (
        f"{name}: the initialisation took {minutes:.1f} minutes, the {division.value} division "
        f"allows less than {limit}; build, load and compile faster"
    )


def _order(line: LogLine, lines: Sequence[LogLine], ruleset: str) -> str:
    if line.key == "init_start":
        return (
            f"{_named(line, lines)} is after init_stop or run_start: the file contains two runs, "
            "or a restart from the beginning; keep one run per file"
        )
    return f"{_named(line, lines)} is before init_stop"


_SPECIAL: dict[str, Callable[[LogLine, Sequence[LogLine], str], str]] = {
    "evaluation_frequency": _evaluation_frequency,
    "init_stop": _init_stop,
    "init_start": _order,
    "run_start": _order,
}


def _never_converged(key: str, lines: Sequence[LogLine]) -> str:
    values = [line for line in lines if line.key == key]
    numbers = [one for one in values if isinstance(one.value, float) and one.value > 0]
    if not numbers:
        return f"{key} is never a number above 0; the target is {MLPERF_TARGET_LOSS} or less"
    best = min(numbers, key=lambda one: float(one.value))
    return (
        f"{_missed(lines)}: {key} was {best.value:.5g} at best, after {best.samples} "
        f"samples, in {counted(len(values), 'evaluation')}; needed: above 0 and at most {MLPERF_TARGET_LOSS}"
    )


def _missed(lines: Sequence[LogLine]) -> str:
    """Return in words how a run without the benchmark's target ended."""
    target, how = target_of(lines), outcome(lines)
    if target is None:
        return NO_TARGET if how == NO_TARGET else f"{how}, no target set"
    if how == "converged":
        return f"the run's own target of {target:g} was reached, the benchmark's was not"
    return f"the target was not reached{' yet' if how == 'training' else ''}"


def _repeated(key: str, message: str, lines: Sequence[LogLine]) -> str | None:
    match = _FOUND.search(message)
    if match is None or not match["different"]:
        return None  # equal values several times are a warning only
    places = ", ".join(str(line.number) for line in lines if line.key == key)
    return (
        f"{key} occurs {match['count']} times with different values (lines {sanitize(places)}); "
        "allowed: once; keep one run per file"
    )


def _missing_key(message: str) -> str | None:
    match, count = _COUNT.match(message), _FOUND.search(message)
    if match is None or (count is not None and int(count["count"]) > 0):
        return None
    return match["key"].replace("epoch_", "block_")


def _explain_missing(keys: list[str], lines: Sequence[LogLine]) -> list[str]:
    rest = [key for key in keys if key not in _DISCLOSED]
    if len(rest) < _MANY <= len(keys):
        disclosed = [key for key in keys if key in _DISCLOSED]
        text = f"ruleset {RULESETS[-1]} needs {first_of(disclosed)}; earlier rulesets do not"
        return [*_explain_missing(rest, lines), text]
    if len(keys) < _MANY:
        return [f"{key} is missing; {_absent(key, lines)}" for key in keys]
    if _first(lines, "run_resumed") and _first(lines, "run_start") is None:
        why = "the file was lost before the run resumed; the log can only be recreated by a new run"
    else:
        why = "the log was truncated or rotated; use the mlperf.log in the run's output folder"
    return [f"{len(keys)} keys are missing, including {', '.join(keys[:3])}: {why}"]


def _absent(key: str, lines: Sequence[LogLine]) -> str:
    if key in _LOSSES and (other := next((one.key for one in lines if one.key in _LOSSES), None)):
        return f"the open division needs it beside each {other}, with samples_count in its metadata"
    return KEY_RULES.get(key, _UNKNOWN_KEY).absent


def _faults(lines: Sequence[LogLine]) -> list[str]:
    """Return the first faults, and how many more there are: colours of a terminal break each line."""
    more = len(lines) - _MAX_FAULTS
    rest = [f"{counted(more, 'more line')} cannot be read"] if more > 0 else []
    return [_fault(line) for line in lines[:_MAX_FAULTS]] + rest


def _fault(line: LogLine) -> str:
    hint = "no other text may follow the JSON or be mixed with it on its line"
    text = f"line {line.number} cannot be read ({sanitize(line.fault)}): {sanitize(line.text[:60])}"
    return text if line.fields else f"{text}; {hint}"


def _crash_causes(lines: Sequence[LogLine]) -> list[str]:
    causes = []
    for line in lines:
        given = f"{line.key} (line {line.number}) is {_repr(line.value)}"
        if line.key in _LOSSES:
            if not isinstance(line.value, int | float):
                causes.append(f"{given}, not a number")
        elif line.key == "submission_division" and line.value not in _INIT_MINUTES:
            rule = KEY_RULES[line.key]
            causes.append(f"{given}; allowed: {rule.allowed}; {rule.fix}")
        elif line.key == "submission_benchmark" and line.value != "flux1":
            causes.append(f"{given}; allowed: flux1")
    return [f"{cause}; the checker crashed on it" for cause in causes]


def _crash(messages: list[str]) -> str:
    trace = next(message for message in messages if message.startswith("Traceback"))
    return f"the checker crashed ({sanitize(trace.splitlines()[-1])}); no line explains it"


def _first(lines: Iterable[LogLine], key: str) -> LogLine | None:
    return next((line for line in lines if line.key == key), None)


def _line_number(line: LogLine, lines: Sequence[LogLine]) -> int:
    """Return the line's number; the checker sometimes reports its text only."""
    return line.number or next((one.number for one in lines if one.text == line.text), 0)


def _named(line: LogLine, lines: Sequence[LogLine]) -> str:
    return f"{line.key} (line {_line_number(line, lines)})"


def _repr(value: object) -> str:
    return sanitize(repr(value))


TIMEOUT_SECONDS = 600.0
"""Time limit of one tool."""


@dataclass(frozen=True)
class ToolResult:
    """Result of one tool, with its errors, or with its warnings if it passed."""

    tool: str
    passed: bool
    messages: list[str]


def run_tool(name: str, arguments: Sequence[str], folder: Path | None = None) -> tuple[int, str]:
    """Run the tool ``name`` in ``folder``; return its exit code and output, stderr last.

    Raises subprocess.TimeoutExpired.
    """
    completed = subprocess.run(
        # -P: do not import from the working directory, into which the tools write logs.
        [sys.executable, "-P", "-m", f"mlperf_logging.{name}", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    output = completed.stdout + b"\n" + completed.stderr
    return completed.returncode, output.decode("utf-8", "replace")


def check_package(
    organisation: Path, system: str, ruleset: str, closed: bool
) -> Iterator[ToolResult]:
    """Yield the result of each tool for the package in ``organisation``, as soon as it has run.

    The package checker also runs the compliance checker on every log, the seed check and, in the closed
    division, the comparison with the reference convergence points.
    """
    package = organisation.resolve()
    whole = (str(package), "training", ruleset)
    description = str(package / "systems" / f"{system}.json")
    yield _run("system_desc_checker", (description, *whole[1:]), "checker passed")
    # The checker skips unknown result folders and still reports success.
    checked = (
        ["Running compliance on file", "RCP Test Passed"] if closed else ["Running compliance"]
    )
    yield _run("package_checker", whole, "FOUND NO ERRORS, SUCCESS", *checked)
    if closed:
        results = str(package / "results" / system / "flux1")
        yield _run("rcp_checker", (results, "--rcp_version", ruleset), "RCP test PASSED")
    yield _run("result_summarizer", (*whole, "--csv", "summary.csv"), system)
    yield _run("repo_checker", whole, "ALL CHECKS PASSED")


def _run(name: str, arguments: Sequence[str], *success: str) -> ToolResult:
    """Run a tool, which has passed if all texts of ``success`` are in its output."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            returncode, output = run_tool(name, arguments, Path(folder))
        except subprocess.TimeoutExpired:
            return ToolResult(name, False, [f"timed out after {TIMEOUT_SECONDS:.0f} seconds"])
        written = "".join(path.read_text("utf-8") for path in sorted(Path(folder).glob("*.csv")))
    if returncode == 0 and all(text in output + written for text in success):
        told = [text for text in _told(output, "WARNING - ") if text and "scaling.json" not in text]
        return ToolResult(name, True, told)  # the tools write scaling.json themselves
    last = [line for line in output.splitlines() if line.strip()][-3:]
    return ToolResult(name, False, _told(output, "ERROR - ", "WARNING - ") or last)


def _told(output: str, *levels: str) -> list[str]:
    """Return the messages of these levels, each once."""
    lines = [line for line in output.splitlines() if line.startswith(levels)]
    return list(dict.fromkeys(line.split(" - ", 1)[1].strip() for line in lines))
