"""Both documented ways to install, on an empty API server."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.errors import ClusterError
from cluster.programs import binaries
from tests.api_server.client import Kubectl
from tests.api_server.empty_api_server import empty_api_server
from tests.chart.objects import EARLIER
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


@pytest.fixture(params=[3, 4])
def helm(server: Kubectl, tmp_path: Path, request: pytest.FixtureRequest) -> Helm:
    program = binaries.helm3() if request.param == 3 else None
    return Helm(server.kubeconfig, tmp_path / "helm", program)


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


def hand_over() -> list[str]:
    """Return the command of docs/operator.md after which Helm is the manager of what kubectl applied."""
    page = (ROOT / "docs" / "operator.md").read_text()
    (command,) = re.findall(r"^\$ (kubectl patch -k manifests/ .*)$", page, re.MULTILINE)
    return shlex.split(command.replace("manifests/", str(ROOT / "manifests")))[1:]


@pytest.mark.proof
def test_kubectl_installs_everything_and_helm_can_adopt_and_upgrade_it(
    empty: Kubectl, helm: Helm, tmp_path: Path
) -> None:
    empty(*PLAIN)
    submit(empty)
    empty(*PLAIN, "--dry-run=server")
    before = empty.get("deployment", NAME, SYSTEM)["spec"]
    with pytest.raises(ClusterError, match="cannot be imported"):
        helm("install", NAME, CHART, SYSTEM)
    empty(*hand_over())
    helm("install", NAME, CHART, SYSTEM, "--take-ownership")
    assert empty.get("deployment", NAME, SYSTEM)["spec"] == before
    chart = Path(shutil.copytree(CHART, tmp_path / "chart"))
    metadata = chart / "Chart.yaml"
    metadata.write_text(metadata.read_text().replace("ersion: 0.1.0", "ersion: 9.9.9"))
    crd = chart / "files" / "crd.yaml"
    crd.write_text(crd.read_text().replace("- ft\n", "- ft\n    - fts\n", 1))
    for value in ("replicas=1,logFormat=text", "watchNamespaces={default}", "gangs.volcano=false"):
        helm("upgrade", NAME, chart, SYSTEM, f"--set={value}", "--reuse-values")
    after = empty.get("deployment", NAME, SYSTEM)["spec"]
    assert after["replicas"] == 1
    assert {"name": "FLUXTRAIN_LOG_FORMAT", "value": "text"} in container_of(after)["env"]
    assert container_of(after)["image"].endswith(":9.9.9")
    helm("rollback", NAME, "1", SYSTEM)
    assert empty.get("deployment", NAME, SYSTEM)["spec"]["replicas"] == 2
    empty("get", "ft", "micro")


def test_the_values_of_an_earlier_chart_are_reused(
    empty: Kubectl, helm: Helm, tmp_path: Path
) -> None:
    chart = Path(shutil.copytree(CHART, tmp_path / "chart"))
    (chart / "values.yaml").write_text(EARLIER)
    helm("install", NAME, chart, SYSTEM, "--create-namespace", "--set=replicas=3")
    helm("upgrade", NAME, CHART, SYSTEM, "--reuse-values")
    assert empty.get("deployment", NAME, SYSTEM)["spec"]["replicas"] == 3
    helm("upgrade", NAME, CHART, SYSTEM, "--reuse-values", "--set-json=podSecurityContext=null")
    pod = empty.get("deployment", NAME, SYSTEM)["spec"]["template"]["spec"]
    assert pod["securityContext"] == {}


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = deployment["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize("profile", ["openshift", "gke-autopilot", "eks"])
def test_the_pods_of_a_profile_pass_pod_securitys_level_restricted(
    profile: str, empty: Kubectl, helm: Helm
) -> None:
    values = f"--values={CHART / 'profiles' / profile}.yaml"
    namespace = f"{profile}-{'own' if helm.program is None else helm.program.parent.name}"
    empty("create", "namespace", namespace)
    empty("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    helm("install", NAME, CHART, SYSTEM, "--create-namespace", values)  # the API server's defaults
    template = empty.get("deployment", NAME, SYSTEM)["spec"]["template"]
    spec = template["spec"] | {"serviceAccountName": "default"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
    spec.pop("priorityClassName", None)  # controllers create it, which do not run here
    empty("create", "serviceaccount", "default", f"--namespace={namespace}")
    response = empty.server.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    assert response.accepted, response.message
    spec["containers"][0]["securityContext"] = {}
    refused = empty.server.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    assert "violates PodSecurity" in refused.message
    empty("delete", "namespace", namespace, "--wait=false")
