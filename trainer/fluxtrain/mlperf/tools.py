"""MLCommons' tools over a whole package, in the order that their side effects ask for.

Several of them exit with 0 whatever they find, so each is judged by its own success line. The package
checker comes before the summarizer, which applies the scaling factor that it finds when it starts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_SECONDS = 600.0
_LEVELS = ("ERROR - ", "WARNING - ")


@dataclass(frozen=True)
class Finding:
    """One tool's verdict and the errors in its own words."""

    tool: str
    passed: bool
    messages: list[str]


@dataclass(frozen=True)
class _Tool:
    name: str
    arguments: tuple[str, ...]
    success: tuple[str, ...]  # all of them must be said


def check_package(organisation: Path, system: str, ruleset: str, closed: bool) -> Iterator[Finding]:
    """Yield the verdict of each tool on the package in ``organisation``, as it is known.

    The package checker also runs the compliance checker on every log, the seed check and, in the closed
    division, the test against the reference convergence points.
    """
    for tool in _tools(organisation, system, ruleset, closed):
        yield _run(tool)


def _tools(organisation: Path, system: str, ruleset: str, closed: bool) -> Iterator[_Tool]:
    package, usage = str(organisation), ("training", ruleset)
    description = organisation / "systems" / f"{system}.json"
    yield _Tool("system_desc_checker", (str(description), *usage), ("checker passed",))
    # A result folder that it does not know is skipped, and the package still declared a success.
    seen = ("Running compliance on file", "RCP Test Passed") if closed else ("Running compliance",)
    yield _Tool("package_checker", (package, *usage), ("FOUND NO ERRORS, SUCCESS", *seen))
    if closed:
        results = str(organisation / "results" / system / "flux1")
        yield _Tool("rcp_checker", (results, "--rcp_version", ruleset), ("RCP test PASSED",))
    yield _Tool("result_summarizer", (package, *usage, "--csv", "summary.csv"), (system,))
    yield _Tool("repo_checker", (package, *usage), ("ALL CHECKS PASSED",))


def _run(tool: _Tool) -> Finding:
    # -P: the working directory is no place to import from. The tools drop logs where they stand.
    command = [sys.executable, "-P", "-m", f"mlperf_logging.{tool.name}", *tool.arguments]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Finding(tool.name, False, [f"not done after {_TIMEOUT_SECONDS:.0f} seconds"])
        written = "".join(path.read_text() for path in sorted(Path(folder).glob("*.csv")))
    said = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")
    passed = done.returncode == 0 and all(words in said + written for words in tool.success)
    return Finding(tool.name, passed, [] if passed else _errors(said))


def _errors(said: str) -> list[str]:
    """Return the errors and warnings, or the end of what was said where there is none."""
    lines = said.splitlines()
    found = [line.split(" - ", 1)[1].strip() for line in lines if line.startswith(_LEVELS)]
    return list(dict.fromkeys(found)) or [line for line in lines if line.strip()][-3:]
