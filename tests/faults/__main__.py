"""Do each fault of the matrix to a job on a real cluster and write docs/faults.md; `make faults`.

    python -m tests.faults [--output FILE] [FAULT ...]

Without names, all; else the other rows of the page stay. Exits with 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ClusterError
from tests.faults import report
from tests.faults.experiment import compare, measure
from tests.faults.fault import Fault, Outcome
from tests.faults.matrix import FAULTS, NOTES
from tests.faults.session import Session, machine, session
from tests.faults.target import NUM_NODES, RUN, Target
from tests.paths import ROOT

PAGE = ROOT / "docs" / "faults.md"
JOB = (
    f"the preset {RUN['preset']} on {NUM_NODES} nodes, batches of "
    f"{RUN['schedule']['global_batch_size']} samples, asynchronous checkpoints"
)


def main() -> int:
    """Return the exit code."""
    arguments = _parser().parse_args()
    faults = [f for f in FAULTS if not arguments.faults or f.name in arguments.faults]
    outcomes: list[Outcome] = []
    with session() as current:
        try:
            shared = [fault for fault in faults if fault.own_job is None]
            run_shared(current, shared, outcomes)
            for fault in faults:
                if fault.own_job is not None:
                    run_own(current, fault, outcomes)
        finally:
            write(arguments.output, outcomes)
    failed = [outcome.fault.name for outcome in outcomes if outcome.faults]
    print(f"{len(outcomes)} faults, {len(failed)} failed: {' '.join(failed) or '-'}")
    return 1 if failed else 0


def write(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Write ``page``; rows that were not measured now stay as they were."""
    rows = report.rows_of(page.read_text()) if page.exists() else {}
    rows |= {outcome.fault.name: report.row(outcome) for outcome in outcomes}
    ordered = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    today = time.strftime("%Y-%m-%d", time.gmtime())
    page.write_text(report.render(ordered, machine(), JOB, today, NOTES))


def run_shared(current: Session, faults: Sequence[Fault], outcomes: list[Outcome]) -> None:
    """Do ``faults`` to one job; to another if it does not train any more."""
    target, measured = None, list[Outcome]()
    try:
        for fault in faults:
            if target is None:
                target, measured = current.create_job(), []
            measured.append(_measure(fault, target))
            if measured[-1].error:
                outcomes += _finish(current, target, measured)
                target = None
    finally:  # an error of this program costs no row that was measured before
        if target is not None:
            outcomes += _finish(current, target, measured)


def run_own(current: Session, fault: Fault, outcomes: list[Outcome]) -> None:
    """Do ``fault`` to a job of its own."""
    target = current.create_job(fault.own_job, fault.prepare)
    outcomes += _finish(current, target, [_measure(fault, target)])


def _measure(fault: Fault, target: Target) -> Outcome:
    began = time.monotonic()
    outcome = measure(fault, target)
    pause, seconds = outcome.pause_seconds, time.monotonic() - began
    print(
        f"{fault.name}: {outcome.lost_steps} steps lost, {pause:.0f} s without a new step; "
        f"took {seconds:.0f} s {outcome.error}",
        flush=True,
    )
    return outcome


def _finish(current: Session, target: Target, measured: list[Outcome]) -> list[Outcome]:
    """Delete the job, and compare its output with the undisturbed run."""
    try:
        here = target.jobs.here
        current.kubectl("delete", "ft", target.name, here, "--cascade=foreground", seconds=240)
        compare(measured, target.output, target.spec["run"])
    except (AssertionError, ClusterError) as error:
        for outcome in measured:
            outcome.error = outcome.error or f"cannot be compared: {str(error)[:200]}"
    for outcome in measured:
        print(report.row(outcome), flush=True)
    return measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=(__doc__ or "").splitlines()[0]
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(names))
    parser.add_argument("--output", type=Path, default=PAGE, help=f"default {PAGE}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
