"""Run the tests of a suite in four workers of pytest at once.

    python -m tests.run {test,quick,proof,all} [--repeat] [pytest's own options]

`test` has what is not marked `proof`, `quick` the part of it that is short, `proof` the rest, and the
tests with kernels of older processors, on a cluster without IPv4 and with other versions of torch; `all` has
both marks in one run. There are two workers more than cores, as agents and a cluster mostly wait. Ends with
the ten slowest tests, files and folders, all counts, and the errors of all tests that failed. With
``--repeat`` a failed test runs once more, alone; if it then passes it is reported as FLAKY, with both logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import ROOT


@dataclass(frozen=True)
class Suite:
    """The tests that one command runs."""

    marks: str
    """Pytest's expression of the tests that are run."""
    folders: Sequence[str]
    """In the order of their start: what takes longest begins first."""
    commands: Sequence[Sequence[str]] = ()
    """Make's targets, each with its variables, that run one after the other, after the tests."""


KUBERNETES = {"cluster": "cluster", "end_to_end": "cluster", "api_server": "api_server"}
"""By folder, what its tests start: one worker has all with a cluster, one all with only an API server."""
FOLDERS = ("trainer", "benchmarks", "faults", "operator", "chart", "contract", "architecture")
SUITES = {
    "test": Suite("not proof", (*KUBERNETES, *FOLDERS)),
    "all": Suite("proof or not proof", (*KUBERNETES, *FOLDERS)),
    "quick": Suite("not slow and not trains and not proof", FOLDERS),
    "proof": Suite(
        "proof",
        (*KUBERNETES, *FOLDERS),
        (
            (
                "test-isa",
                "ISA_TESTS=tests/trainer/model/test_fp8.py"
                " tests/trainer/parallel/test_attention_backend.py tests/trainer/optim",
            ),
            ("test-ipv6",),
            ("test-torch",),
        ),
    ),
}
WORKERS = 4
NUM_SLOWEST = 10
OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "PYTEST_OPTIONS", "PYTHON", "TORCH"}
UNCACHED = "PYTHONDONTWRITEBYTECODE"
"""With it every worker would compile all tests, and every process what it imports of the product."""
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


def run(suite: Suite, options: Sequence[str], folder: Path) -> Result:
    """Run the tests of ``suite`` with pytest's ``options``; their reports go into ``folder``."""
    report = folder / f"{time.monotonic_ns()}.xml"
    command = [
        *(sys.executable, "-m", "pytest", f"--junitxml={report}", "-o", "junit_logging=all"),
        *("-m", suite.marks, *options, *(f"tests/{name}" for name in suite.folders)),
    ]
    variables = {name: os.environ[name] for name in os.environ.keys() - {UNCACHED}}
    result = Result(subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode)
    if report.exists():
        read(report, result)
    return result


def make(targets: Sequence[Sequence[str]]) -> Result:
    """Run Make's ``targets``, each with its variables, but not with those of a Make around this."""
    variables = {name: os.environ[name] for name in os.environ.keys() - OF_MAKE}
    result = Result(0)
    for target, *settings in targets:
        begin = time.monotonic()
        command = ["make", "--no-print-directory", target, *settings]
        code = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
        result.outcomes[f"make {target}"] = "failed" if code else "passed"
        result.seconds[f"make {target}"] = time.monotonic() - begin
        result.logs[f"make {target}"] = f"exit code {code}"
        result.exit_code = result.exit_code or code
    return result


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


def repeat(suite: Suite, first: Result, options: Sequence[str], folder: Path) -> list[str]:
    """Run the failed tests again, alone; return those that passed then, and count them as passed.

    A test that is skipped the second time has not passed.
    """
    again = ["--numprocesses=0", "--last-failed", "--last-failed-no-failures=none"]
    second = run(suite, [*options, *again], folder)
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
    """Run a suite; return 0 if all its tests and commands passed."""
    suite = SUITES[arguments[0]]
    options = [argument for argument in arguments[1:] if argument != "--repeat"]
    begin, flaky = time.monotonic(), list[str]()
    with TemporaryDirectory() as name:
        workers = f"--numprocesses={WORKERS}"
        tests = run(suite, [workers, *options], Path(name))
        if "--repeat" in arguments and "failed" in tests.outcomes.values():
            flaky = repeat(suite, tests, options, Path(name))
        skipped = [name for name, kind in tests.outcomes.items() if kind == "skipped"]
        if skipped and "--fail-on-skip" in options:
            tests.exit_code = tests.exit_code or 1  # although all that had failed then passed
        results = [tests, make(suite.commands)]
    by_test, by_file, by_folder = (defaultdict[str, float](float) for _ in range(3))
    for name, took in (pair for result in results for pair in result.seconds.items()):
        by_test[name] += took
        by_file[name.partition("::")[0]] += took
        by_folder[".".join(name.split(".")[:3]).partition("::")[0]] += took
    print_slowest("tests", by_test)
    print_slowest("files", by_file)
    print_slowest("folders", by_folder)
    outcomes = {name: kind for result in results for name, kind in result.outcomes.items()}
    counts = sorted(Counter(outcomes.values()).items())
    total = ", ".join(f"{count} {kind}" for kind, count in counts) or "no tests"
    print(f"{total}, exit code {tests.exit_code}, {sum(by_test.values()) / 60:.1f} min of workers")
    for name in (name for name, kind in outcomes.items() if kind == "failed"):
        print(f"FAILED {name}: {error_of(results[name not in tests.logs].logs[name])}")
    for name in flaky:
        print(f"FLAKY {name}")
    for name in skipped if "--fail-on-skip" in options else ():
        print(f"SKIPPED {name}: {tests.logs[name].splitlines()[0]}")
    minutes, rest = divmod(round(time.monotonic() - begin), 60)
    print(f"{minutes} min {rest} s, {len(flaky)} flaky")
    return 0 if all(result.exit_code in (0, NO_TESTS) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
