"""Fuzz all readers, or the named ones, for some seconds each: python -m tests.trainer.fuzz 60 [NAME…]."""

from __future__ import annotations

import sys

from tests.trainer.fuzz.fuzzing import Result, fuzz
from tests.trainer.fuzz.targets import targets


def main(arguments: list[str]) -> int:
    """Print each target with its outcome; return 1 if there is a finding."""
    seconds, names = float(arguments[0]), arguments[1:] or list(targets())
    results = list[Result]()
    for name in names:
        (result,) = fuzz([name], seconds)
        outcome = result.finding or "no finding"
        print(
            f"{name}: {result.num_inputs:,} inputs, {result.cpu_seconds:.0f} s of CPU, {outcome}",
            flush=True,
        )
        results.append(result)
    total = sum(result.cpu_seconds for result in results) / 60
    num_findings = sum(bool(result.finding) for result in results)
    print(
        f"{sum(r.num_inputs for r in results):,} inputs, {total:.1f} minutes of CPU, {num_findings} findings"
    )
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
