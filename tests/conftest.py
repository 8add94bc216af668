"""One thread for all tests, the work of each worker, and --fail-on-skip: a skipped test fails the run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests import run

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The models are small: on busy cores several threads mostly wait for each other.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="exit with 1 if a test was skipped",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: what is made stays, and it would go through all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def unit_of(test: str) -> str:
    """Return what one worker has all of: the folder of ``test``, or all that share an API server."""
    folder = test.partition("::")[0].rpartition("/")[0]
    return run.KUBERNETES.get(folder.removeprefix("tests/").partition("/")[0], folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Keep a folder in one worker, so that its tests share fixtures, and the given order of folders."""
    from xdist.scheduler import LoadScopeScheduling

    class Folders(LoadScopeScheduling):
        _split_scope = staticmethod(unit_of)

    config.option.loadscopereorder = False
    return Folders(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--fail-on-skip") or reporter is None:
        return
    skipped = len(reporter.stats.get("skipped", []))
    if skipped and exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"\n{skipped} skipped, and --fail-on-skip was given", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
