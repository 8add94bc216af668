"""Each test has the variables and signal handlers of its process; tests of numbers are marked."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest

COMPUTING = {"adapter", "encode", "model", "optim", "parallel", "sample", "train", "weights"}
"""Folders whose tests compare numbers that torch's kernels compute: `make test-isa`."""

TRAINING = {"ranks", "in_process"}
"""Modules that start trainings: `make test-quick` leaves out the tests of modules that import one."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and TRAINING.intersection(vars(item.module)):
            item.add_marker("trains")
        parts = item.path.parent.relative_to(item.config.rootpath).parts
        if parts[:2] == ("tests", "trainer") and COMPUTING.intersection(parts[2:]):
            item.add_marker("computes")


def pytest_collection_finish() -> None:
    """Let collections skip what exists now: a run in this process would begin by one of all tests."""
    gc.collect()
    gc.freeze()
    vars(gc).update(freeze=lambda: None, unfreeze=lambda: None)  # at its end it thaws all


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports modules whose kernels Triton's interpreter runs, on the CPU.

    It returns the last one.
    """
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from tests.trainer.ranks import interpret_triton

    interpret_triton(monkeypatch)
    modules = []

    def load(*names: str) -> ModuleType:
        modules.extend(importlib.reload(importlib.import_module(name)) for name in names)
        return modules[-1]

    yield load
    monkeypatch.undo()
    for module in modules:
        importlib.reload(module)


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> Iterator[None]:
    """Let the fork server hear Ctrl-C even in the background: fixtures of modules start it before a test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Give each test the same variables and signal handlers; Ctrl-C is heard even in the background."""
    environment = dict(os.environ)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = {signal.SIGINT: before, signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
