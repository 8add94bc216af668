"""The table of docs/faults.md. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.fault import CRASH_STEPS, LOSS_TOLERANCE, Outcome
from tests.faults.target import CHECKPOINT_STEPS, STEP_SECONDS

HEADER = """\
# What each fault costs

Written by `make faults`, which does each of these to a real Kubernetes of three nodes on one machine
({machine}; {date}). The job: {job}. A step takes about {step} s, and a checkpoint is started every {every}
steps, so that a crash costs at most {crash}. Times are in seconds, and depend on the machine.

| column | meaning |
|---|---|
"""
MEANINGS = {
    "detected": "from the fault to the first report, and which: a generation or a lost agent at `/members`,"
    " a condition or an event of the job, a new pod; – if there is none",
    "lost": "steps that were done again",
    "pause": "the longest time without a new step, that is one beyond all before",
    "samples": "whether each step used each of its samples exactly once",
    "charged": "restarts that count towards `spec.restart.maxRestarts`; in brackets those that do not",
    "loss": "largest difference of the training loss from that of one undisturbed process, within the row's"
    " steps; it must be below {tolerance}",
}
COLUMNS = ("fault", "what is done", "detected", "lost", "pause", "samples", "charged", "loss", "")


def render(outcomes: Sequence[Outcome], machine: str, job: str, date: str, notes: str) -> str:
    """Return the whole page: the header, a line for each outcome, what failed, ``notes``."""
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
    table = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *map(row, outcomes)]
    failed = [f"- **{o.fault.name}**: {'; '.join(o.faults)}" for o in outcomes if o.faults]
    parts = [header, "\n".join(table)]
    if failed:
        parts.append("## What does not hold\n\n" + "\n".join(failed))
    return "\n\n".join(part.strip() for part in [*parts, notes] if part.strip()) + "\n"


def row(outcome: Outcome) -> str:
    """Return the line of ``outcome``."""
    sign = outcome.detected
    return _line(
        [
            f"`{outcome.fault.name}`",
            outcome.fault.text,
            f"{sign.at:.1f}, {sign.text}" if sign else "–",
            str(outcome.lost_steps),
            f"{outcome.pause_seconds:.1f}",
            {None: "?", 0: "once"}.get(
                outcome.wrong_samples, f"{outcome.wrong_samples} steps wrong"
            ),
            _charged(outcome),
            "?" if outcome.loss_difference is None else f"{outcome.loss_difference:.0e}",
            "FAILED" if outcome.faults else "ok",
        ]
    )


def _charged(outcome: Outcome) -> str:
    counts = outcome.restarts.items()
    free = ", ".join(f"{count} {kind}" for kind, count in counts if kind != "gang" and count)
    return f"{outcome.charged} ({free})" if free else str(outcome.charged)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
