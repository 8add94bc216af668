"""The page docs/faults.md. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.faults.fault import CRASH_STEPS, LOSS_TOLERANCE, Outcome
from tests.faults.target import CHECKPOINT_STEPS, STEP_SECONDS

HEADER = """\
# What each fault costs

`make faults` inflicts each fault on a real Kubernetes of three nodes on one machine ({machine}; {date}) and
writes this page. `make faults FAULTS="NAME NAME"` repeats single rows. The job: {job}. A step takes about
{step} s. A checkpoint is started every {every} steps, so a crash costs at most {crash} steps. Times are in
seconds.

In every row with the result *ok*, each step used each of its samples exactly once.

| column | meaning |
|---|---|
"""
MEANINGS = {
    "detected": "time to the first report, and which; – if there is none",
    "replaced": "time to the first new training pod; – if there is none",
    "lost": "steps that were repeated",
    "pause": "longest time without a new step",
    "charged": "restarts that count towards `spec.restart.maxRestarts`; after *of* all, by reason",
    "result": "ok, or what does not hold of `tests/faults/matrix.py`; the largest difference from the "
    "loss of an undisturbed process, of which the limit is {tolerance}",
}
COLUMNS = (
    "fault",
    "detected",
    "replaced",
    "lost",
    "pause",
    "charged",
    "result",
)


def render(rows: Sequence[str], machine: str, job: str, date: str, notes: str) -> str:
    """Return the whole page: the header, ``rows``, ``notes``."""
    meanings = "\n".join(_line([name, text]) for name, text in MEANINGS.items())
    header = (HEADER + meanings).format(
        machine=machine,
        job=job,
        date=date,
        step=STEP_SECONDS,
        every=CHECKPOINT_STEPS,
        crash=CRASH_STEPS,
        tolerance=LOSS_TOLERANCE,
    )
    table = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *rows]
    return "\n\n".join(part.strip() for part in (header, "\n".join(table), notes)).strip() + "\n"


def rows_of(page: str) -> dict[str, str]:
    """Return the rows of an earlier page by the name of their fault; a column that it lacks is empty."""
    lines = page.splitlines()
    columns = next((_cells(line) for line in lines if line.startswith(f"| {COLUMNS[0]} |")), [])
    found = (re.match(r"\| `([a-z0-9-]+)`: ", line) for line in lines)
    return {match[1]: _aligned(columns, match.string) for match in found if match is not None}


def _aligned(columns: Sequence[str], line: str) -> str:
    """Return the row in ``line``, which has these ``columns``, with those of COLUMNS."""
    cells = dict(zip(columns, _cells(line), strict=False))
    return _line([cells.get(name, "") for name in COLUMNS])


def row(outcome: Outcome) -> str:
    """Return the line of ``outcome``."""
    sign = outcome.detected
    return _line(
        [
            f"`{outcome.fault.name}`: {outcome.fault.text}",
            f"{sign.at:.1f}, {sign.text}" if sign else "–",
            "–" if outcome.replaced_seconds is None else f"{outcome.replaced_seconds:.1f}",
            str(outcome.lost_steps),
            f"{outcome.pause_seconds:.1f}",
            _charged(outcome),
            f"{_result(outcome)}, {'?' if (loss := outcome.loss_difference) is None else f'{loss:.0e}'}",
        ]
    )


def _result(outcome: Outcome) -> str:
    return f"**failed**: {'; '.join(outcome.faults)}" if outcome.faults else "ok"


def _charged(outcome: Outcome) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(outcome.causes.items()))
    return f"{outcome.charged} of {causes}" if causes else str(outcome.charged)


def _cells(line: str) -> list[str]:
    """Return the cells of a row; no cell contains a bar."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
