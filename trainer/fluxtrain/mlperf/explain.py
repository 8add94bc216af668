"""Explain the checker's messages: what is wrong, what is allowed and what to change."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from fluxtrain.contract.run.presets import MLPERF_EVALUATION_SAMPLES, MLPERF_TARGET_LOSS
from fluxtrain.mlperf.lines import TOKEN, LogLine, parse
from fluxtrain.mlperf.log_keys import KEY_RULES, KeyRule

_INIT_MINUTES = {"closed": 30, "open": 240}
_MANY = 6  # with as many missing keys the beginning of the log is assumed to be lost
_MAX_TEXT = 200
_UNKNOWN_KEY = KeyRule("see MLCommons' training rules")

_CHECK = re.compile(r"CHECK for '(?P<key>[^']+)' failed in line (?P<index>\d+):")
_BROKEN = re.compile(r"Failed executing .*triggered by line ?:\n(?P<line>[^\n]*)", re.DOTALL)
_COUNT = re.compile(r"Required (?:EXACTLY_ONE|AT_LEAST_ONE) occurrence of '(?P<key>[^']+)'")
_FOUND = re.compile(r"but found (?P<count>\d+)(?P<different> with different values)?")
_NEVER = re.compile(r"Failed checks for (?P<key>\w+) :")


def explain(messages: Iterable[str], lines: Sequence[LogLine], ruleset: str) -> list[str]:
    """Return one text per finding, the most likely cause first; never empty."""
    if not lines:
        return [f"no line holds '{TOKEN.strip()}': this is not an MLPerf log"]
    messages = list(messages)
    findings = [_fault(line) for line in lines if line.fault]
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


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _explain_one(message: str, lines: Sequence[LogLine], ruleset: str) -> str | None:
    """Return the explanation of ``message``, None if it is only a warning or explained elsewhere."""
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
    """Explain a line whose value does not pass."""
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
    expected = math.ceil(MLPERF_EVALUATION_SAMPLES / batch.value) * batch.value
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
        f"the target was not reached: {key} was {best.value:.5g} at best, after {best.samples} "
        f"samples, in {len(values)} evaluations; needed: above 0 and at most {MLPERF_TARGET_LOSS}"
    )


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
    if len(keys) < _MANY:
        return [f"{key} is missing; {KEY_RULES.get(key, _UNKNOWN_KEY).absent}" for key in keys]
    if _first(lines, "run_resumed") and _first(lines, "run_start") is None:
        why = "the file was lost before the run resumed; the log can only be recreated by a new run"
    else:
        why = "the log was truncated or rotated; use the mlperf.log in the run's output folder"
    return [f"{len(keys)} keys are missing, including {', '.join(keys[:3])}: {why}"]


def _fault(line: LogLine) -> str:
    hint = "no other text may follow the JSON or be mixed with it on its line"
    text = f"line {line.number} cannot be read ({sanitize(line.fault)}): {sanitize(line.text[:60])}"
    return text if line.fields else f"{text}; {hint}"


def _crash_causes(lines: Sequence[LogLine]) -> list[str]:
    """Return the lines that are known to crash the checker."""
    causes = []
    for line in lines:
        given = f"{line.key} (line {line.number}) is {_repr(line.value)}"
        if line.key in ("eval_accuracy", "averaged_validation_loss"):
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
