"""Both ways to install, as the documents say them, on an API server where nothing is yet."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl
from tests.end_to_end.empty_api_server import empty_api_server
from tests.end_to_end.release import CHART, Helm
from tests.end_to_end.stage import ROOT

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

NAME = "fluxtrain-operator"
SYSTEM = "--namespace=fluxtrain-system"
DEFINITION = "crd/fluxtrainings.fluxtrain.dev"
MICRO = f"--filename={ROOT / 'examples' / 'micro.yaml'}"
PLAIN = ("apply", "--server-side", "--kustomize", str(ROOT / "manifests"))


@pytest.fixture
def empty(kubectl: Kubectl, tmp_path: Path) -> Iterator[Kubectl]:
    """Return kubectl for an API server of this test alone, with the programs of the cluster."""
    began = time.monotonic()
    with empty_api_server(tmp_path) as found:
        print(f"an empty API server: {time.monotonic() - began:.1f} s")
        yield found


@pytest.fixture
def helm(empty: Kubectl, tmp_path: Path) -> Helm:
    return Helm(empty.kubeconfig, tmp_path / "helm")


def submit(kubectl: Kubectl) -> None:
    kubectl("wait", "--for=condition=Established", DEFINITION)
    kubectl("apply", MICRO)


def test_helm_installs_all_and_leaves_definition_and_jobs_when_it_goes(
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

    helm("install", NAME, CHART, SYSTEM)  # the same release finds its definition again
    helm("uninstall", NAME, SYSTEM)
    with pytest.raises(ClusterError, match=r"fluxtrainings\.fluxtrain\.dev.*cannot be imported"):
        helm("install", "other", CHART, SYSTEM)
    helm("install", "other", CHART, SYSTEM, "--take-ownership")
    helm("uninstall", "other", SYSTEM)
    helm("install", "third", CHART, SYSTEM, "--set=crds.install=false")
    empty("get", "ft", "micro")


def test_kubectl_alone_installs_all_and_helm_can_take_over(empty: Kubectl, helm: Helm) -> None:
    empty(*PLAIN)
    submit(empty)
    empty(*PLAIN, "--dry-run=server")
    before = empty.get("deployment", NAME, SYSTEM)["spec"]
    with pytest.raises(ClusterError, match="cannot be imported"):
        helm("install", NAME, CHART, SYSTEM)
    helm("install", NAME, CHART, SYSTEM, "--take-ownership")
    assert empty.get("deployment", NAME, SYSTEM)["spec"] == before
    empty("get", "ft", "micro")
