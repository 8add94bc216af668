"""The ``:::MLLOG`` lines of a file as MLCommons' parser reads them, and how their run ended."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fluxtrain.contract.process import MLPERF_TOKEN
from fluxtrain.contract.run.presets import MLPERF_TARGET_LOSS

TOKEN = MLPERF_TOKEN
NO_LOG = f"no line holds '{TOKEN.strip()}': this is not an MLPerf log"
MAX_BYTES = 256 * 2**20
"""Of a log: that of a run is below one MiB; a pod's log has other lines too."""
_MAX_NUMBER = 2**53
"""Greater counts and times are no numbers that a program has counted."""
_MAX_MS = 2**42
_MAX_FLOAT = sys.float_info.max
_FIELDS = ("time_ms", "key", "value", "metadata")


@dataclass(frozen=True)
class LogLine:
    """A line with the token; ``fault`` is the parse error, empty if the line is a valid event."""

    number: int  # of the line in the file, from 1
    text: str  # from the token on
    fields: dict[str, Any]
    fault: str = ""
    hides: bool = False  # an event before it on its line, which MLCommons' parser drops

    @property
    def key(self) -> str:
        """Return the event's key, the empty string if it has none."""
        return str(self.fields.get("key", ""))

    @property
    def value(self) -> Any:
        return self.fields.get("value")

    @property
    def place(self) -> str:
        """Return the event's key with the number of its line."""
        return f"{self.key} (line {self.number})"

    @property
    def samples(self) -> int | None:
        """Return the event's samples_count, None if it has none."""
        metadata = self.fields.get("metadata")
        samples = metadata.get("samples_count") if isinstance(metadata, dict) else None
        return samples if is_number(samples) and isinstance(samples, int) else None

    @property
    def measured(self) -> float | None:
        """Return the event's value as a float, infinite beyond its range; None if it is no number."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if abs(value) > _MAX_FLOAT:
            return math.inf if value > 0 else -math.inf
        return float(value)


def read_lines(path: Path) -> Iterator[LogLine]:
    """Yield the lines with the token; text before the last token of a line is removed.

    Latin-1 as in MLCommons' parser, which accepts every byte. Raises OSError if the file cannot be read.
    """
    with path.open(encoding="latin-1") as file:
        for number, line in enumerate(file, 1):
            if TOKEN in line:
                *before, text = line.split(TOKEN)
                parsed = parse(number, TOKEN + text.strip())
                hides = any(each.startswith("{") for each in before[1:])
                yield replace(parsed, hides=True) if hides else parsed


def parse(number: int, text: str) -> LogLine:
    """Return the parsed line ``text``, which starts with the token."""
    try:
        fields = json.loads(text.removeprefix(TOKEN), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        return LogLine(number, text, {}, str(error))
    if not isinstance(fields, dict):
        return LogLine(number, text, {}, "not a JSON object")
    if missing := [name for name in _FIELDS if name not in fields]:
        return LogLine(number, text, fields, f"no {', '.join(missing)}")
    if not isinstance(fields["metadata"], dict):
        return LogLine(number, text, fields, "metadata is not an object")
    if not is_number(fields["time_ms"]):
        return LogLine(number, text, fields, "time_ms is not a number")
    return LogLine(number, text, fields)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object; raise ValueError for a name that it has twice, whose last value would count."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def is_number(value: object) -> bool:
    """Return whether ``value`` is a finite number of a size that occurs."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _MAX_NUMBER


NO_TARGET: Literal["ended, no target set"] = "ended, no target set"
Outcome = Literal[
    "waiting", "training", "converged", "not converged", "aborted", "ended, no target set"
]
TARGET_KEY = "target_accuracy"
_PROGRESS = ("run_start", "run_resumed", "block_start", "run_stop")


def month_of(logs: Iterable[Sequence[LogLine]]) -> str:
    """Return year and month of the latest event of ``logs``, such as 2026-05; empty without any."""
    last = max(
        (line.fields["time_ms"] for log in logs for line in log if not line.fault), default=0
    )
    return time.strftime("%Y-%m", time.gmtime(last / 1000)) if 0 < last < _MAX_MS else ""


def target_of(lines: Sequence[LogLine]) -> float | None:
    """Return the evaluation loss that ends the run, None if none is set.

    A resumed run with another one states it again. It is the benchmark's in the closed division, and in logs
    that do not state any.
    """
    events = [line for line in lines if not line.fault]
    stated = [line for line in events if line.key == TARGET_KEY]
    closed = any(line.key == "submission_division" and line.value == "closed" for line in events)
    return stated[-1].measured if stated and not closed else MLPERF_TARGET_LOSS


def reaches(line: LogLine, target: float) -> bool:
    """Return whether the value of an evaluation is above 0 and at most ``target``."""
    return line.measured is not None and 0 < line.measured <= target


def outcome(lines: Sequence[LogLine]) -> Outcome:
    """Return whether the run has begun, trains, or how it ended: converged if it reached its target.

    A run without one converged if it reached the benchmark's, as for MLCommons' tools. ``aborted`` is one
    that its log calls so, although it has no target or reached it.
    """
    events = [line for line in lines if not line.fault]
    progress = [line for line in events if line.key in _PROGRESS]
    if not progress or progress[-1].key != "run_stop":
        begun = progress or any(line.key == "eval_accuracy" for line in events)
        return "training" if begun else "waiting"
    succeeded = progress[-1].fields["metadata"].get("status") == "success"
    target = target_of(events)
    needed = MLPERF_TARGET_LOSS if target is None else target
    if any(reaches(line, needed) for line in events if line.key == "eval_accuracy"):
        return "converged" if succeeded else "aborted"
    if target is None:
        return NO_TARGET if succeeded else "aborted"
    return "not converged"
