"""Run all tests in three pytest processes at once: of the trainer, of the operator, and on a cluster.

    python -m tests.run [--repeat] [pytest's own options]

The second has all that needs an API server at most, and those folders of the trainer's tests that make them
about equally long. Ends with the ten slowest tests, files and folders, all counts, and the errors of all
tests that failed. With ``--repeat`` a failed test runs once more; if it then passes it is reported as FLAKY,
with both logs.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import ROOT

LANES = {
    "trainer": ["trainer"],
    "operator": [
        *("api_server", "architecture", "contract", "operator", "chart", "benchmarks", "faults"),
        *("trainer/adapter", "trainer/benchmark", "trainer/bombs", "trainer/cli", "trainer/launch"),
        *("trainer/mlperf", "trainer/model", "trainer/imports", "trainer/plan"),
        *("trainer/prepare", "trainer/rendezvous"),
    ],
    "cluster": ["cluster", "end_to_end"],
}
NUM_SLOWEST = 10
NO_TESTS = 5  # pytest's exit code if options select none


@dataclass
class Result:
    """What one pytest process reported."""

    exit_code: int
    seconds: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    """passed, failed, skipped or xfailed, by test."""
    logs: dict[str, str] = field(default_factory=dict)
    """Errors and output, by test."""


def run(lane: str, options: Sequence[str], folder: Path) -> Result:
    """Run the tests of ``lane``; its lines go to the terminal with the lane's name."""
    report = folder / f"{lane}-{time.monotonic_ns()}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "--color=no", f"--junitxml={report}"),
        *("-o", f"cache_dir=.pytest_cache/{lane}", "-o", "junit_logging=all", *options),
        *selected(lane),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{lane} | {line}", end="", flush=True)
    result = Result(process.returncode)
    if report.exists():
        read(report, result)
    return result


def selected(lane: str) -> list[str]:
    """Return pytest's options that select the folders of ``lane``, without those inside that another has."""
    folders = LANES[lane]
    others = [name for other in LANES if other != lane for name in LANES[other]]
    inside = [name for name in others if any(name.startswith(f"{own}/") for own in folders)]
    return [f"tests/{name}" for name in folders] + [f"--ignore=tests/{name}" for name in inside]


def read(report: Path, result: Result) -> None:
    """Add what is in pytest's XML ``report`` to ``result``."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        result.seconds[name] = result.seconds.get(name, 0.0) + float(case.get("time", 0))
        tags = {child.tag for child in case}
        skipped = case.find("skipped")
        if tags & {"failure", "error"}:
            result.outcomes[name] = "failed"
        elif skipped is not None:
            result.outcomes[name] = (
                "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"
            )
        else:
            result.outcomes[name] = "passed"
        result.logs[name] = "\n".join(child.text or "" for child in case)


def run_all(options: Sequence[str], folder: Path) -> dict[str, Result]:
    """Run all lanes at once."""
    results: dict[str, Result] = {}

    def keep(lane: str) -> None:
        results[lane] = run(lane, options, folder)

    threads = [threading.Thread(target=keep, args=(lane,)) for lane in LANES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def repeat(lane: str, first: Result, options: Sequence[str], folder: Path) -> list[str]:
    """Run the failed tests of ``lane`` again; return those that passed then, and count them as passed.

    A test that is skipped the second time has not passed.
    """
    second = run(lane, [*options, "--last-failed", "--last-failed-no-failures=none"], folder)
    failed = [name for name, kind in first.outcomes.items() if kind == "failed"]
    flaky = [name for name in failed if second.outcomes.get(name) == "passed"]
    for name in flaky:
        print(f"\nFLAKY {name}: failed, then passed. The first log:\n{first.logs[name]}")
        print(f"The second log, {second.seconds[name]:.0f} s:\n{second.logs[name]}")
        first.outcomes[name] = "passed"
    if second.exit_code == 0 and flaky == failed:
        first.exit_code = 0
    return flaky


def error_of(log: str) -> str:
    """Return the first lines of ``log`` that pytest marks as the error, or its last line, in one line."""
    errors = [line[2:].strip() for line in log.splitlines() if line.startswith("E ")]
    return " | ".join(errors[:4] or log.strip().splitlines()[-1:])[:600]


def print_slowest(title: str, seconds: Mapping[str, float]) -> None:
    """Print the names with the most ``seconds``."""
    print(f"\n{NUM_SLOWEST} slowest {title}")
    for name in sorted(seconds, key=lambda each: -seconds[each])[:NUM_SLOWEST]:
        print(f"{seconds[name]:7.1f} s  {name}")


def main(arguments: list[str]) -> int:
    """Run everything; return 0 if all lanes passed."""
    options = [argument for argument in arguments if argument != "--repeat"]
    begin, flaky = time.monotonic(), list[str]()
    with TemporaryDirectory() as name:
        results = run_all(options, Path(name))
        for lane, result in results.items():
            failed = "failed" in result.outcomes.values()
            if "--repeat" in arguments and failed:
                flaky += repeat(lane, result, options, Path(name))
    by_test, by_file, by_folder = (defaultdict[str, float](float) for _ in range(3))
    for result in results.values():
        for name, took in result.seconds.items():
            by_test[name] += took
            by_file[name.partition("::")[0]] += took
            by_folder[".".join(name.split(".")[:3]).partition("::")[0]] += took
    print_slowest("tests", by_test)
    print_slowest("files", by_file)
    print_slowest("folders", by_folder)
    for lane, result in results.items():
        counts = ", ".join(
            f"{count} {kind}" for kind, count in sorted(Counter(result.outcomes.values()).items())
        )
        total = sum(result.seconds.values()) / 60
        print(f"{lane}: {counts or 'no tests'}, exit code {result.exit_code}, {total:.1f} min")
    for result in results.values():
        for name, kind in result.outcomes.items():
            if kind == "failed":
                print(f"FAILED {name}: {error_of(result.logs[name])}")
    for name in flaky:
        print(f"FLAKY {name}")
    minutes, rest = divmod(round(time.monotonic() - begin), 60)
    print(f"{minutes} min {rest} s, {len(flaky)} flaky")
    return 0 if all(result.exit_code in (0, NO_TESTS) for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
