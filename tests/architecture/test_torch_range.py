"""The tests that run with other versions of torch: which, and the environments that are kept for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cluster.errors import ClusterError, MachineError
from tests import torch_range
from tests.paths import ROOT
from tests.run import SUITES


def test_continuous_integration_runs_the_lowest_torch() -> None:
    (bound,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert ("test-torch",) in SUITES["proof"].commands, "with Make's default"
    (versions,) = re.findall(r"\$\(TORCH:auto=([\d. ]+)\)", (ROOT / "Makefile").read_text())
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


@pytest.mark.parametrize(
    ("targets", "has_environment", "kind"),
    [
        ("run", True, "auto"),
        ("test check", True, "auto"),
        ("setup run", True, "cpu"),
        ("run", False, "cpu"),
    ],
)
def test_only_setup_exchanges_the_torch_that_is_there(
    tmp_path: Path, targets: str, has_environment: bool, kind: str
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    if has_environment:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").touch()
    command = ["make", "--dry-run", *targets.split(), "TORCH=cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f'-m supply_chain.torch_wheel "{kind}" ' in done.stdout


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


def test_a_python_that_the_machine_lacks_runs_with_debians_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suites = list[str]()

    def unpack(argv: list[str | Path], **_: object) -> str:
        """Do what uv, debootstrap and dpkg-deb would; the shell stands for Python."""
        name, folder = Path(argv[0]).name, Path(argv[-1])
        if name == "uv":
            raise ClusterError("error: No interpreter found")
        if name == "debootstrap":
            suites.append(str(argv[-2]))
            if argv[-2] == "testing":
                raise ClusterError("E: Couldn't find these debs: python3.99")
            (folder / "var/cache/apt/archives").mkdir(parents=True)
            (folder / "var/cache/apt/archives/python.deb").touch()
        else:
            for path in ("usr/bin", "usr/lib/any-linux-gnu", "usr/include/python3.99"):
                (folder / path).mkdir(parents=True)
            [loader] = Path("/").glob("lib*/ld-linux-*.so.*")
            shutil.copy(loader, folder / "usr/lib/any-linux-gnu")
            shutil.copy("/bin/sh", folder / "usr/bin/python3.99")
        return ""

    monkeypatch.setattr(torch_range, "KEPT", tmp_path / "with space")
    monkeypatch.setattr(torch_range, "run", unpack)
    monkeypatch.setattr(torch_range, "program", str)
    monkeypatch.setattr(torch_range, "installed", Path)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("cluster.programs.packages.ensure_programs", lambda _: None)
    python = torch_range.find_python("3.99")
    assert torch_range.find_python("3.99") == python
    assert suites == ["testing", "unstable"]
    linked = tmp_path / "linked"
    linked.symlink_to(python)
    script = 'printf "%s|" "$0" "$@"; read -r line < /proc/$$/cmdline; echo "$line"'
    done = subprocess.run([linked, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{linked}|")
    assert f"{tmp_path}/with space/python-3.99/usr/lib/any-linux-gnu/ld-linux" in done.stdout


@pytest.mark.parametrize(
    ("python", "user", "message"),
    [
        ("3.99", 1000, "run as root"),
        ("3.99", 0, "E: Couldn't find these debs: python3.99"),
        ("/no/python", 0, "give a version such as 3.14"),
        ("3.14.1", 0, "give a version such as 3.14"),
    ],
)
def test_a_python_that_is_nowhere_is_one_line(
    python: str, user: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: list[str | Path], **_: object) -> str:
        if Path(argv[0]).name == "uv":
            raise ClusterError("uv …: exit code 2\nerror: No interpreter found")
        raise ClusterError("debootstrap …: exit code 1\nE: Couldn't find these debs: python3.99")

    monkeypatch.setattr(torch_range, "KEPT", tmp_path)
    monkeypatch.setattr(torch_range, "run", fail)
    monkeypatch.setattr(torch_range, "program", str)
    monkeypatch.setattr(torch_range, "installed", Path)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("cluster.programs.packages.ensure_programs", lambda _: None)
    with pytest.raises(MachineError) as error:
        torch_range.find_python(python)
    assert str(error.value).startswith(f"PYTHON={python}: there is none that runs")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
