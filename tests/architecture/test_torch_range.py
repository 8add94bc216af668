"""The tests that run with other versions of torch: which, and the environments that are kept for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests import torch_range
from tests.paths import ROOT


def test_continuous_integration_runs_the_lowest_torch() -> None:
    (bound,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    (versions,) = re.findall(r'test-torch TORCH="([^"]+)"', (ROOT / ".ci" / "run").read_text())
    assert versions.split()[0] == f"{bound}.0"


def test_another_torch_or_python_is_not_that_of_the_environment(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv/bin/python"  # says what it is asked for
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    command = ["make", "test-torch", "TORCH=2.9.0 2.11", "PYTHON=3.14"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "-m supply_chain.torch_wheel auto https" in done.stdout
    assert "-m tests.torch_range 2.9.0 2.11 --python 3.14" in done.stdout


def test_the_environments_used_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_range, "KEPT", tmp_path)
    for number in range(7):
        (tmp_path / f"torch-2.{number}" / "bin").mkdir(parents=True)
        os.utime(tmp_path / f"torch-2.{number}", (0, 100 - number))
    (tmp_path / "cache").mkdir()
    torch_range.forget_oldest()
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"cache", *(f"torch-2.{number}" for number in range(5))}
