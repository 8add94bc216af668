"""One thread for all tests, and the option --fail-on-skip: a skipped test fails the run."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The models are small: on busy cores several threads mostly wait for each other.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="exit with 1 if a test was skipped",
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--fail-on-skip") or reporter is None:
        return
    skipped = len(reporter.stats.get("skipped", []))
    if skipped and exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"\n{skipped} skipped, and --fail-on-skip was given", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
