"""MLCommons' tools run in forks and parse their rules in C, and nothing waits for the disk; the command."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import yaml
from tests.trainer.mlperf.forked_tools import run_tool
from tests.trainer.mlperf.good_run import CONVERGED, Evidence, good_run

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_USAGE
from fluxtrain.mlperf import compliance


@pytest.fixture(autouse=True)
def forked_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(yaml, "BaseLoader", yaml.CBaseLoader)
    monkeypatch.setattr(compliance, "run_tool", run_tool)


@pytest.fixture
def mlperf(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `fluxtrain mlperf`, and returns its output, or what a wrong use prints."""

    def run(code: int, *arguments: object) -> str:
        assert main(["mlperf", *map(str, arguments)]) == code
        printed = capsys.readouterr()
        return printed.err if code == EXIT_USAGE else printed.out

    return run


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Return a run without a fault; a test changes a copy of it."""
    return good_run(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="session")
def ten(tmp_path_factory: pytest.TempPathFactory) -> list[Evidence]:
    """Return ten runs of one result; a test changes copies of them."""
    folder = tmp_path_factory.mktemp("ten")
    return [good_run(folder, 100 + number, count) for number, count in enumerate(CONVERGED)]
