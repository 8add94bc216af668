"""MLCommons' tools run in forks and parse their rules in C, and nothing waits for the disk."""

from __future__ import annotations

import os

import pytest
import yaml
from tests.trainer.mlperf.forked_tools import run_tool

from fluxtrain.mlperf import compliance


@pytest.fixture(autouse=True)
def forked_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(yaml, "BaseLoader", yaml.CBaseLoader)
    monkeypatch.setattr(compliance, "run_tool", run_tool)
