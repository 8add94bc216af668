"""The statement of a package on how its runs differ from MLPerf's reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.deviations import Deviation, deviations, unused_reasons
from fluxtrain.errors import ConfigError

DEVIATIONS_FILE = "deviations.md"
_MAX_SHOWN = 8
_NO_REASON = "set by the job; the submitter gave no reason"


def parse_reasons(texts: Iterable[str]) -> dict[str, str]:
    """Return the reasons from ``FIELD=REASON``; raise ConfigError for other texts."""
    reasons: dict[str, str] = {}
    for text in texts:
        field, _, reason = text.partition("=")
        if not field.strip() or not reason.strip():
            raise ConfigError("--reason", text, "must be FIELD=REASON, such as model=a smaller one")
        reasons[field.strip()] = reason.strip()
    return reasons


def require_used(config: RunConfig, reasons: Mapping[str, str]) -> None:
    """Raise ConfigError if there is a reason for what is not changed."""
    if unused := unused_reasons(config, reasons):
        changed = [each.topic for each in deviations(config, {}) if "." in each.topic]
        text = (
            f"is as in the reference, or no field; changed fields: {', '.join(changed) or 'none'}"
        )
        raise ConfigError("--reason", unused[0], text)


def statement(found: Sequence[Deviation]) -> str:
    """Return the statement in Markdown: one row for each difference."""
    rows = [f"{row_of(each, each.reason or _NO_REASON)} |" for each in found]
    return "\n".join(
        [
            "# Differences from the reference",
            "",
            "How these runs differ from MLCommons' reference of the benchmark, where it bears on numbers.",
            "",
            "| | reference | these runs | reason |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def row_of(found: Deviation, reason: str) -> str:
    """Return the row of a difference in the statement, up to its end."""
    return f"| {' | '.join(map(cell, (found.topic, found.reference, found.run, reason)))}"


def summary(found: Sequence[Deviation]) -> str:
    """Return the number of differences, and those of which nobody gave a reason."""
    silent = [each.topic for each in found if each.reason is None]
    shown = ", ".join(silent[:_MAX_SHOWN]) + (", ..." if len(silent) > _MAX_SHOWN else "")
    rest = f"; without a reason (--reason FIELD=REASON): {shown}" if silent else ""
    return f"{len(found)}{rest}"


def cell(text: str) -> str:
    """Return ``text`` as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
