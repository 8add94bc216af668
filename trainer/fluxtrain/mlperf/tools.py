"""Run MLCommons' tools on a package, in the order that their side effects require.

Several of them always exit with 0, so success is determined from the output. The package checker runs before
the summarizer, which applies the scaling factor that the checker wrote.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_SECONDS = 600.0
"""Time limit of one tool."""
_LEVELS = ("ERROR - ", "WARNING - ")


@dataclass(frozen=True)
class ToolResult:
    """Result of one tool, with its errors, or with its warnings if it passed."""

    tool: str
    passed: bool
    messages: list[str]


@dataclass(frozen=True)
class _Tool:
    name: str
    arguments: tuple[str, ...]
    success: tuple[str, ...]  # all of them must be in the output


def run_tool(name: str, arguments: Sequence[str], folder: Path | None = None) -> tuple[int, str]:
    """Run the tool ``name`` in ``folder``; return its exit code and output, stderr last.

    Raises subprocess.TimeoutExpired.
    """
    completed = subprocess.run(
        # -P: do not import from the working directory, into which the tools write logs.
        [sys.executable, "-P", "-m", f"mlperf_logging.{name}", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    output = completed.stdout + b"\n" + completed.stderr
    return completed.returncode, output.decode("utf-8", "replace")


def check_package(
    organisation: Path, system: str, ruleset: str, closed: bool
) -> Iterator[ToolResult]:
    """Yield the result of each tool for the package in ``organisation``, as soon as it has run.

    The package checker also runs the compliance checker on every log, the seed check and, in the closed
    division, the comparison with the reference convergence points.
    """
    for tool in _tools(organisation.resolve(), system, ruleset, closed):
        yield _run(tool)


def _tools(organisation: Path, system: str, ruleset: str, closed: bool) -> Iterator[_Tool]:
    package, usage = str(organisation), ("training", ruleset)
    description = organisation / "systems" / f"{system}.json"
    yield _Tool("system_desc_checker", (str(description), *usage), ("checker passed",))
    # The checker skips unknown result folders and still reports success.
    checked = (
        ("Running compliance on file", "RCP Test Passed") if closed else ("Running compliance",)
    )
    yield _Tool("package_checker", (package, *usage), ("FOUND NO ERRORS, SUCCESS", *checked))
    if closed:
        results = str(organisation / "results" / system / "flux1")
        yield _Tool("rcp_checker", (results, "--rcp_version", ruleset), ("RCP test PASSED",))
    yield _Tool("result_summarizer", (package, *usage, "--csv", "summary.csv"), (system,))
    yield _Tool("repo_checker", (package, *usage), ("ALL CHECKS PASSED",))


def _run(tool: _Tool) -> ToolResult:
    with tempfile.TemporaryDirectory() as folder:
        try:
            returncode, output = run_tool(tool.name, tool.arguments, Path(folder))
        except subprocess.TimeoutExpired:
            return ToolResult(tool.name, False, [f"timed out after {TIMEOUT_SECONDS:.0f} seconds"])
        written = "".join(path.read_text() for path in sorted(Path(folder).glob("*.csv")))
    passed = returncode == 0 and all(text in output + written for text in tool.success)
    return ToolResult(tool.name, passed, _warnings(output) if passed else _errors(output))


def _warnings(output: str) -> list[str]:
    """Return the warnings, but those about the file that the tools write themselves."""
    lines = (line for line in output.splitlines() if line.startswith("WARNING - "))
    messages = [line.split(" - ", 1)[1].strip() for line in lines]
    return [text for text in dict.fromkeys(messages) if text and "scaling.json" not in text]


def _errors(output: str) -> list[str]:
    """Return the errors and warnings, or the last lines of the output if there are none."""
    lines = output.splitlines()
    messages = [line.split(" - ", 1)[1].strip() for line in lines if line.startswith(_LEVELS)]
    return list(dict.fromkeys(messages)) or [line for line in lines if line.strip()][-3:]
