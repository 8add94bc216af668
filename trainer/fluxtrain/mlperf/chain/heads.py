"""The heads of a run's chain that the operator has seen: `status.logHeads` of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.chain.record import Record, digest, is_digest
from fluxtrain.mlperf.chain.verdict import Verdict

_CLOCKS_SECONDS = 300.0
"""The clocks of a node and of the operator differ by less."""


@dataclass(frozen=True)
class Head:
    """The operator saw that the chain had so many records, of which the last has this hash."""

    records: int
    sha256: str
    time: str
    """When it saw that, by its own clock."""


def read_heads(job: Mapping[str, Any]) -> list[Head]:
    """Return the heads in the status of ``job``, a FluxTraining; raise ConfigError if it has none.

    An operator or a trainer of an older version writes none.
    """
    status = job.get("status")
    entries = status.get("logHeads") if isinstance(status, Mapping) else None
    heads = [_head(entry) for entry in entries] if isinstance(entries, list) else []
    if not heads:
        text = (
            "has no heads of a log; give what `kubectl get fluxtraining NAME --output yaml` prints"
        )
        raise ConfigError("--status", "status.logHeads", text)
    return heads


def _head(entry: object) -> Head:
    values = entry if isinstance(entry, Mapping) else {}
    count, sha256, time = (values.get(name) for name in ("records", "sha256", "time"))
    if type(count) is not int or count < 1 or not is_digest(sha256) or not isinstance(time, str):
        raise ConfigError("status.logHeads", str(entry)[:80], "must have records, sha256 and time")
    return Head(count, str(sha256), time)


def check_heads(
    lines: Sequence[bytes],
    records: Sequence[Record | None],
    heads: Sequence[Head],
    verdict: Verdict,
) -> None:
    """Name the first of ``heads`` that the chain of ``lines`` does not have."""
    for head in sorted(heads, key=lambda each: each.records):
        place = f"record {head.records - 1}"
        if head.records > len(lines):
            verdict.find(
                f"{place} is missing: the chain has {len(lines)} records, and the operator had seen "
                f"{head.records} at {head.time}"
            )
            return
        if digest(lines[head.records - 1]) != head.sha256:
            verdict.find(
                f"{place}, or one before it, was changed after the operator saw it at {head.time}"
            )
            return
        record, seen = records[head.records - 1], _seconds(head.time)
        if record and record.time and seen and record.time > seen + _CLOCKS_SECONDS:
            verdict.find(f"{place} is of a later time than {head.time}, when the operator saw it")
            return
    if (rest := len(lines) - max(head.records for head in heads)) > 0:
        verdict.note(f"the last {rest} records are newer than the last head that the operator saw")


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None
