"""Run the tests of a suite in several pytest processes at once, its lanes.

    python -m tests.run {test,quick,proof,all} [--repeat] [pytest's own options]

`test` has what is not marked `proof`, `quick` the part of it that is short, `proof` the rest, and the
tests with kernels of older processors and other versions of torch; `all` has both marks in one run. There
is one lane more than cores, as agents and a cluster mostly wait. Ends with the ten slowest tests, files and
folders, all counts, and the errors of all tests that failed. With ``--repeat`` a failed test runs once more;
if it then passes it is reported as FLAKY, with both logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import ROOT


@dataclass(frozen=True)
class Suite:
    """The tests that one command runs."""

    marks: str
    """Pytest's expression of the tests that are run."""
    lanes: Mapping[str, Sequence[str]]
    """Folders and files of each pytest process. Those inside what another lane has are not that one's."""
    commands: Sequence[Sequence[str]] = ()
    """Make's targets, each with its variables, that run one after the other, after the lanes."""


REAL = ("api_server", "cluster", "end_to_end")
"""Folders whose tests start a Kubernetes, or its API server."""
OPERATOR = ("architecture", "contract", "operator", "chart", "benchmarks", "faults")
WITH_OPERATOR = (
    *OPERATOR,
    *("trainer/adapter", "trainer/benchmark", "trainer/bombs", "trainer/cli", "trainer/imports"),
    "trainer/mlperf",
)
"""The operator's, and those of the trainer that make both lanes about equally long."""
LANES = {
    "trainer": ("trainer",),
    "operator": (
        *WITH_OPERATOR,
        *("trainer/launch", "trainer/model", "trainer/plan", "trainer/prepare"),
        "trainer/rendezvous",
    ),
    "cluster": REAL,
}
SUITES = {
    "test": Suite("not proof", LANES),
    "all": Suite("proof or not proof", LANES),
    "quick": Suite(
        "not slow and not trains and not proof",
        {"trainer": ("trainer",), "operator": WITH_OPERATOR},
    ),
    "proof": Suite(
        "proof",
        {"compute": (*OPERATOR, "trainer"), "cluster": REAL},
        (
            (
                "test-isa",
                "ISA_TESTS=tests/trainer/model/test_fp8.py"
                " tests/trainer/parallel/test_attention_backend.py tests/trainer/optim",
            ),
            ("test-torch", "TORCH=2.9.0 2.11"),  # the lowest, and the one of today's CUDA images
        ),
    ),
}
MAKE = "make"
"""The lane of a suite's commands."""
NUM_SLOWEST = 10
OF_MAKE = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "PYTEST_OPTIONS", "PYTHON", "TORCH"}
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


def run(suite: Suite, lane: str, options: Sequence[str], folder: Path) -> Result:
    """Run the tests of ``lane``; its lines go to the terminal with the lane's name."""
    report = folder / f"{lane}-{time.monotonic_ns()}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "--color=no", f"--junitxml={report}"),
        *("-o", f"cache_dir=.pytest_cache/{lane}", "-o", "junit_logging=all", "-m", suite.marks),
        *(*options, *selected(suite, lane)),
    ]
    result = Result(printed(lane, command))
    if report.exists():
        read(report, result)
    return result


def printed(lane: str, command: Sequence[str], variables: Mapping[str, str] = os.environ) -> int:
    """Run ``command``, print its lines with the name of ``lane``; return its exit code."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{lane} | {line}", end="", flush=True)
    return process.returncode


def make(targets: Sequence[Sequence[str]]) -> Result:
    """Run Make's ``targets``, each with its variables, but not with those of a Make around this."""
    variables = {name: os.environ[name] for name in os.environ.keys() - OF_MAKE}
    result = Result(0)
    for target, *settings in targets:
        begin = time.monotonic()
        code = printed(MAKE, ["make", "--no-print-directory", target, *settings], variables)
        result.outcomes[f"make {target}"] = "failed" if code else "passed"
        result.seconds[f"make {target}"] = time.monotonic() - begin
        result.logs[f"make {target}"] = f"exit code {code}"
        result.exit_code = result.exit_code or code
    return result


def selected(suite: Suite, lane: str) -> list[str]:
    """Return pytest's options that select what ``lane`` has, without that inside which another has."""
    own = suite.lanes[lane]
    others = [name for other in suite.lanes if other != lane for name in suite.lanes[other]]
    inside = [name for name in others if any(name.startswith(f"{folder}/") for folder in own)]
    return [f"tests/{name}" for name in own] + [f"--ignore=tests/{name}" for name in inside]


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


def run_all(suite: Suite, options: Sequence[str], folder: Path) -> dict[str, Result]:
    """Run all lanes at once, then the commands, whose tests have deadlines that the lanes would break."""
    with ThreadPoolExecutor(max(1, len(suite.lanes))) as pool:
        runs = {lane: pool.submit(run, suite, lane, options, folder) for lane in suite.lanes}
        results = {lane: future.result() for lane, future in runs.items()}
    return results | ({MAKE: make(suite.commands)} if suite.commands else {})


def repeat(
    suite: Suite, lane: str, first: Result, options: Sequence[str], folder: Path
) -> list[str]:
    """Run the failed tests of ``lane`` again; return those that passed then, and count them as passed.

    A test that is skipped the second time has not passed.
    """
    second = run(suite, lane, [*options, "--last-failed", "--last-failed-no-failures=none"], folder)
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
    """Run a suite; return 0 if all lanes passed."""
    suite = SUITES[arguments[0]]
    options = [argument for argument in arguments[1:] if argument != "--repeat"]
    begin, flaky = time.monotonic(), list[str]()
    with TemporaryDirectory() as name:
        results = run_all(suite, options, Path(name))
        for lane, result in results.items():
            failed = "failed" in result.outcomes.values()
            if "--repeat" in arguments and failed and lane in suite.lanes:
                flaky += repeat(suite, lane, result, options, Path(name))
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
