"""From the checker's messages to what is wrong, what is allowed and what to change."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fluxtrain.mlperf.lines import TOKEN, LogLine, parse
from fluxtrain.mlperf.log_keys import RULES, Rule

_TARGET = 0.586  # the evaluation loss that ends a run of flux1
_EVERY = 262_144  # training samples between two evaluations
_INIT_MINUTES = {"closed": 30, "open": 240}
_MANY = 6  # missing keys from which on the log's beginning is thought to be lost
_MAX_TEXT = 200
_UNKNOWN = Rule("see MLCommons' training rules")

_CHECK = re.compile(r"CHECK for '(?P<key>[^']+)' failed in line (?P<index>\d+):")
_BROKEN = re.compile(r"Failed executing .*triggered by line ?:\n(?P<line>[^\n]*)", re.DOTALL)
_COUNT = re.compile(r"Required (?:EXACTLY_ONE|AT_LEAST_ONE) occurrence of '(?P<key>[^']+)'")
_FOUND = re.compile(r"but found (?P<count>\d+)(?P<different> with different values)?")
_NEVER = re.compile(r"Failed checks for (?P<key>\w+) :")


def explain(messages: Iterable[str], lines: Sequence[LogLine], ruleset: str) -> list[str]:
    """Return one text per finding, the likely root first; never empty."""
    if not lines:
        return [f"no line holds '{TOKEN.strip()}': this is not an MLPerf log"]
    messages = list(messages)
    findings = [_fault(line) for line in lines if line.fault]
    if any(message.startswith("Traceback") for message in messages):
        return findings or _causes_of_a_crash(lines) or [_crash(messages)]
    missing, others = [], []
    for message in messages:
        if (key := _missing_key(message)) is not None:
            missing.append(key)
        elif text := _explain_one(message, lines, ruleset):
            others.append(text)
    findings += _explain_missing(missing, lines) + others
    return findings or [printable(message) for message in messages] or ["no reason was given"]


def hostile(lines: Iterable[LogLine]) -> str | None:
    """Return why these lines must not reach the checker: it opens, and runs, files that they name."""
    for line in lines:
        if line.key in ("submission_division", "submission_benchmark") and re.search(
            r"[/\\\0]", str(line.value)
        ):
            return (
                f"{line.key} (line {line.number}) is {_shown(line.value)}, a path; "
                "the checker was not asked, for it would open that file"
            )
    return None


def printable(text: str) -> str:
    """Return ``text`` short and without control characters: a log may not steer the terminal."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= _MAX_TEXT else f"{clean[:_MAX_TEXT]}..."


def _explain_one(message: str, lines: Sequence[LogLine], ruleset: str) -> str | None:
    """Return what ``message`` means, None where it is a mere warning or said elsewhere."""
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
    """Explain a line that stands there and does not pass."""
    if special := _SPECIAL.get(line.key):
        return special(line, lines, ruleset)
    rule = RULES.get(line.key, _UNKNOWN)
    value = line.value
    if value is None:  # an interval's line: what counts is its place and its metadata
        return f"{_named(line, lines)} does not pass; needed: {rule.allowed}; {rule.cure}"
    return f"{_named(line, lines)} is {_shown(value)}; allowed: {rule.allowed}; {rule.cure}"


def _evaluation_frequency(line: LogLine, lines: Sequence[LogLine], ruleset: str) -> str:
    head = f"{_named(line, lines)} is {_shown(line.value)}"
    if ruleset != "6.1.0":
        return (
            f"{head}; ruleset {ruleset} allows {_EVERY} only, which needs a "
            f"spec.run.schedule.global_batch_size that divides it, and "
            f"spec.run.evaluation.every_samples {_EVERY}"
        )
    batch = _first(lines, "global_batch_size")
    if batch is None or not _is_count(batch.value):
        return f"{head}; it is checked against global_batch_size, which must stand before it"
    if batch.number > _place(line, lines):
        return f"{head}; global_batch_size must stand before it (it stands in line {batch.number})"
    wanted = math.ceil(_EVERY / batch.value) * batch.value
    return (
        f"{head}; with global_batch_size {batch.value} ruleset 6.1.0 allows {wanted} only "
        f"({_EVERY} rounded up to whole batches); set spec.run.evaluation.every_samples to {_EVERY}"
    )


def _init_stop(line: LogLine, lines: Sequence[LogLine], ruleset: str) -> str:
    here, begin = _named(line, lines), _first(lines, "init_start")
    division, run = _first(lines, "submission_division"), _first(lines, "run_start")
    place = _place(line, lines)
    if begin is None or begin.number > place:
        return f"{here} stands before any init_start"
    if run is not None and run.number < place:
        return f"{here} stands after run_start; it must stand before it"
    if division is None or division.number > place:
        return f"{here} stands before submission_division, which sets its time limit"
    minutes = (line.fields["time_ms"] - begin.fields["time_ms"]) / 60_000
    limit = _INIT_MINUTES.get(str(division.value), 0)
    return (
        f"{here}: the initialisation took {minutes:.1f} minutes, the {division.value} division "
        f"allows less than {limit}; build, load and compile faster"
    )


def _order(line: LogLine, lines: Sequence[LogLine], ruleset: str) -> str:
    if line.key == "init_start":
        return (
            f"{_named(line, lines)} stands after init_stop or run_start: two runs, or a restart "
            "that began anew, lie in one file; keep one run per file"
        )
    return f"{_named(line, lines)} stands before init_stop"


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
        return f"{key} is never a number above 0; the target is {_TARGET} or less"
    best = min(numbers, key=lambda one: float(one.value))
    return (
        f"the target was not reached: {key} was {best.value:.5g} at best, after {best.samples} "
        f"samples, in {len(values)} evaluations; needed: above 0 and at most {_TARGET}"
    )


def _repeated(key: str, message: str, lines: Sequence[LogLine]) -> str | None:
    found = _FOUND.search(message)
    if found is None or not found["different"]:
        return None  # equal values several times are a warning only
    places = ", ".join(str(line.number) for line in lines if line.key == key)
    return (
        f"{key} stands there {found['count']} times with different values (lines {printable(places)}); "
        "allowed: once; keep one run per file"
    )


def _missing_key(message: str) -> str | None:
    match, found = _COUNT.match(message), _FOUND.search(message)
    if match is None or (found is not None and int(found["count"]) > 0):
        return None
    return match["key"].replace("epoch_", "block_")


def _explain_missing(keys: list[str], lines: Sequence[LogLine]) -> list[str]:
    if len(keys) < _MANY:
        return [f"{key} is missing; {RULES.get(key, _UNKNOWN).absent}" for key in keys]
    if _first(lines, "run_resumed") and _first(lines, "run_start") is None:
        why = "the file was lost before the run resumed; only a new run can prove itself"
    else:
        why = "the log was cut off or rotated away; take the mlperf.log in the run's output folder"
    return [f"{len(keys)} keys are missing, {', '.join(keys[:3])} among them: {why}"]


def _fault(line: LogLine) -> str:
    hint = "nothing may follow the JSON on its line, and no other text may run into it"
    text = (
        f"line {line.number} cannot be read ({printable(line.fault)}): {printable(line.text[:60])}"
    )
    return text if line.fields else f"{text}; {hint}"


def _causes_of_a_crash(lines: Sequence[LogLine]) -> list[str]:
    """Return the lines that the checker is known to fall over, without a verdict."""
    causes = []
    for line in lines:
        if line.key in ("eval_accuracy", "averaged_validation_loss") and not isinstance(
            line.value, int | float
        ):
            causes.append(f"{line.key} (line {line.number}) is {_shown(line.value)}, not a number")
        elif line.key == "submission_division" and line.value not in _INIT_MINUTES:
            rule = RULES[line.key]
            causes.append(
                f"{line.key} (line {line.number}) is {_shown(line.value)}; allowed: {rule.allowed}; "
                f"{rule.cure}"
            )
        elif line.key == "submission_benchmark" and line.value != "flux1":
            causes.append(
                f"{line.key} (line {line.number}) is {_shown(line.value)}; allowed: flux1"
            )
    return [f"{cause}; the checker crashed on it" for cause in causes]


def _crash(messages: list[str]) -> str:
    trace = next(message for message in messages if message.startswith("Traceback"))
    return f"the checker crashed ({printable(trace.splitlines()[-1])}); no line explains it"


def _first(lines: Iterable[LogLine], key: str) -> LogLine | None:
    return next((line for line in lines if line.key == key), None)


def _place(line: LogLine, lines: Sequence[LogLine]) -> int:
    """Return the line's number; the checker sometimes gives its text only."""
    return line.number or next((one.number for one in lines if one.text == line.text), 0)


def _named(line: LogLine, lines: Sequence[LogLine]) -> str:
    return f"{line.key} (line {_place(line, lines)})"


def _shown(value: object) -> str:
    return printable(repr(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 < value <= 2**53
