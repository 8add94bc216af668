"""Both documented ways to install, on an empty API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.errors import ClusterError
from tests.api_server.client import Kubectl
from tests.api_server.empty_api_server import empty_api_server
from tests.end_to_end.integrations.release import CHART, Helm
from tests.paths import ROOT

NAME = "fluxtrain-operator"
SYSTEM = "--namespace=fluxtrain-system"
CRD = "crd/fluxtrainings.fluxtrain.dev"
MICRO = f"--filename={ROOT / 'examples' / 'micro.yaml'}"
PLAIN = ("apply", "--server-side", "--kustomize", str(ROOT / "manifests"))


@pytest.fixture(scope="module")
def server(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Return kubectl for an API server without our CRD."""
    with empty_api_server(tmp_path_factory.mktemp("install")) as kubectl:
        yield kubectl


@pytest.fixture
def helm(server: Kubectl, tmp_path: Path) -> Helm:
    return Helm(server.kubeconfig, tmp_path / "helm")


@pytest.fixture
def empty(server: Kubectl, helm: Helm) -> Iterator[Kubectl]:
    """Return kubectl; afterwards remove everything that the test has installed."""
    yield server
    for release in helm("list", "--short", SYSTEM).split():
        helm("uninstall", release, SYSTEM)
    server("delete", CRD)


def submit(kubectl: Kubectl) -> None:
    kubectl.wait_for_crds()
    kubectl("apply", MICRO)


def test_helm_installs_everything_and_keeps_crd_and_jobs_on_uninstall(
    empty: Kubectl, helm: Helm
) -> None:
    helm("install", NAME, CHART, SYSTEM, "--create-namespace")
    submit(empty)
    helm("upgrade", NAME, CHART, SYSTEM, "--set=replicas=1")
    assert empty.get("deployment", NAME, SYSTEM)["spec"]["replicas"] == 1
    helm("uninstall", NAME, SYSTEM)
    empty("get", "ft", "micro")
    left = empty("get", "deployments,clusterroles,roles,services", "--all-namespaces", "-o=name")
    assert NAME not in left

    helm("install", NAME, CHART, SYSTEM)  # the same release adopts its CRD again
    helm("uninstall", NAME, SYSTEM)
    with pytest.raises(ClusterError, match=r"fluxtrainings\.fluxtrain\.dev.*cannot be imported"):
        helm("install", "other", CHART, SYSTEM)
    helm("install", "other", CHART, SYSTEM, "--take-ownership")
    helm("uninstall", "other", SYSTEM)
    helm("install", "third", CHART, SYSTEM, "--set=crds.install=false")
    empty("get", "ft", "micro")


def test_kubectl_installs_everything_and_helm_can_adopt_it(empty: Kubectl, helm: Helm) -> None:
    empty(*PLAIN)
    submit(empty)
    empty(*PLAIN, "--dry-run=server")
    before = empty.get("deployment", NAME, SYSTEM)["spec"]
    with pytest.raises(ClusterError, match="cannot be imported"):
        helm("install", NAME, CHART, SYSTEM)
    helm("install", NAME, CHART, SYSTEM, "--take-ownership")
    assert empty.get("deployment", NAME, SYSTEM)["spec"] == before
    empty("get", "ft", "micro")
