"""Helm on a real cluster: a release from a registry, a job from apply to Complete, an upgrade meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.layout import BRIDGE_ADDRESS
from cluster.nodes.volumes import host_folder
from tests.api_server.client import Kubectl
from tests.chart.release.registry import VERSION, serve
from tests.end_to_end import stage
from tests.end_to_end.integrations import openmoji
from tests.end_to_end.integrations.release import CHART, NEXT_TAG, Helm, publish
from tests.end_to_end.stage import losses, step, wait_for

from fluxtrain.mlperf import check

pytestmark = pytest.mark.proof

NAMESPACE = "helm"
NAME = "fluxtrain-operator"
IN = f"--namespace={NAMESPACE}"
VALUES = (
    f"--set=watchNamespaces={{{NAMESPACE}}}",
    f"--values={CHART / 'profiles' / 'namespaced.yaml'}",  # the CRD is used by other operators too
)
UPGRADED = (f"--set=image.tag={NEXT_TAG}", "--set=resources.requests.cpu=50m")
"""The name of another image and another value, as in a release."""


@pytest.fixture(scope="module")
def registry(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a registry, on the cluster's bridge, that has the release."""
    began = time.monotonic()
    with serve(BRIDGE_ADDRESS, tmp_path_factory.mktemp("registry")) as address:
        publish(address, tmp_path_factory.mktemp("context"))
        print(f"release pushed, images pulled: {time.monotonic() - began:.1f} s")
        yield address


@pytest.fixture(scope="module")
def release(registry: str) -> list[str]:
    """Return Helm's arguments of the chart in the registry, with the images there."""
    names = {"image": "operator", "trainerImage": "trainer"}
    chart = [f"oci://{registry}/charts/{NAME}", "--plain-http", f"--version={VERSION}"]
    images = [f"--set={at}.repository={registry}/fluxtrain/{name}" for at, name in names.items()]
    return [*chart, *images, *VALUES]


@pytest.fixture(scope="module")
def helm(
    kubectl: Kubectl, release: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Helm]:
    """Return Helm, with the release installed in a restricted namespace."""
    stage.make_namespace(kubectl, NAMESPACE)
    helm = Helm(kubectl.kubeconfig, tmp_path_factory.mktemp("helm"))
    began = time.monotonic()
    try:
        helm("install", NAME, *release, IN, "--wait")
        print(f"installed, both replicas ready: {time.monotonic() - began:.1f} s")
        yield helm
    finally:
        helm("uninstall", NAME, IN, "--ignore-not-found", "--wait")
        kubectl("delete", "namespace", NAMESPACE, seconds=120)


@pytest.fixture
def folder(kubectl: Kubectl, helm: Helm, tmp_path: Path) -> Iterator[Path]:
    """Return a folder with the volumes `demo` and `output` of a job."""
    openmoji.prepare(tmp_path / "demo")
    stage.make_volumes(kubectl, NAMESPACE, tmp_path / "output")
    demo = host_folder("demo", tmp_path / "demo", NAMESPACE, read_only=True)
    kubectl.apply(*demo, namespace=NAMESPACE)
    yield tmp_path
    stage.clear(kubectl, NAMESPACE)


def pods(kubectl: Kubectl, selector: str) -> dict[str, Manifest]:
    listed = kubectl.get("pods", IN, f"--selector={selector}")["items"]
    return {pod["metadata"]["name"]: pod for pod in listed}


def operators(kubectl: Kubectl) -> dict[str, Manifest]:
    return pods(kubectl, f"app.kubernetes.io/name={NAME}")


def uids(pods: dict[str, Manifest]) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods.items()}


def leader(kubectl: Kubectl) -> str:
    """Return the name of the leader's pod, or ''."""
    holder = kubectl.get("lease", NAME, IN)["spec"].get("holderIdentity") or ""
    return next((name for name in operators(kubectl) if holder.startswith(name)), "")


def status(kubectl: Kubectl) -> Manifest:
    return stage.status(kubectl, NAMESPACE, "openmoji")


def row(kubectl: Kubectl) -> dict[str, str]:
    """Return the output of `kubectl get ft -o wide`, by column."""
    head, line = kubectl("get", "ft", "openmoji", "--output=wide", IN).splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    ends = [*starts[1:], None]
    return {  # a finished job has no ETA
        head[start:end].strip(): line[start:end].strip()
        for start, end in zip(starts, ends, strict=True)
    }


def debug_text(kubectl: Kubectl) -> str:
    """Return everything that explains why a wait timed out."""
    logs = kubectl("logs", f"deployment/{NAME}", "--all-pods", "--tail=30", IN)
    listed = kubectl("get", "ft,pods,events", "-o", "wide", IN)
    return f"{listed}\n{logs}\n{stage.logs(kubectl, NAMESPACE, 'openmoji')}"


INSPECT = """
import os
from importlib.util import find_spec
print(os.getuid(), find_spec("torch"), find_spec("kopf") is not None)
"""


def test_the_operators_image_works_and_has_no_torch(kubectl: Kubectl, helm: Helm) -> None:
    def inside(*command: str) -> str:
        return kubectl("exec", f"deployment/{NAME}", IN, "--", *command)

    assert "default trainer image" in inside("python3", "-m", "fluxtrain_operator", "--help")
    assert inside("python3", "-c", INSPECT).split() == ["1000", "None", "True"]
    with pytest.raises(ClusterError, match="Read-only file system"):
        inside("touch", "/tmp/x")


def test_helms_own_test_passes(kubectl: Kubectl, helm: Helm) -> None:
    assert "Succeeded" in helm("test", NAME, IN)


def test_the_main_job_completes_while_its_operator_is_upgraded_and_its_leader_deleted(
    kubectl: Kubectl, helm: Helm, release: list[str], folder: Path
) -> None:
    def debug() -> str:
        return debug_text(kubectl)

    kubectl.apply(openmoji.short_job(), namespace=NAMESPACE)
    print(
        f"first steps after {wait_for(lambda: step(status(kubectl)) >= 5, debug, seconds=600):.1f} s"
    )
    early, job_pods = row(kubectl), uids(pods(kubectl, "fluxtrain.dev/job=openmoji"))
    assert (early["PHASE"], early["NODES"]) == ("Running", "2")
    assert len(job_pods) == 3, "two nodes and the rendezvous"

    upgrade(kubectl, helm, release)
    print(f"upgraded at step {step(status(kubectl))} of {openmoji.STEPS}")
    replace_leader(kubectl, debug)

    wait_for(lambda: stage.is_complete(status(kubectl)), debug, seconds=600)
    kubectl("wait", "--for=condition=Complete", "ft/openmoji", IN, "--timeout=5s")
    late = row(kubectl)
    assert (late["PHASE"], late["STEP"]) == ("Complete", str(openmoji.STEPS)), debug()
    assert late["LOSS"] != early["LOSS"]
    now = uids(pods(kubectl, "fluxtrain.dev/job=openmoji"))
    assert now.items() <= job_pods.items(), "an upgrade restarts no pod of a job"
    assert late["RESTARTS"] == early["RESTARTS"]
    restarts = kubectl("get", "events", IN, "--field-selector=reason=Restarting", "--output=name")
    assert restarts == "", "a new leader lists the pods before it plans"
    compare_with_the_laptop(kubectl, folder)


def upgrade(kubectl: Kubectl, helm: Helm, release: list[str]) -> None:
    """Upgrade to a new image and another value; the operator's pods are replaced."""
    old, began = uids(operators(kubectl)), time.monotonic()
    helm("upgrade", NAME, *release, IN, *UPGRADED, "--wait")
    print(f"helm upgrade, new replicas ready: {time.monotonic() - began:.1f} s")
    new = operators(kubectl)
    ready = [pod for pod in new.values() if pod["metadata"]["uid"] not in old.values()]
    assert len(ready) == 2
    for pod in ready:
        container = pod["spec"]["containers"][0]
        assert container["image"].endswith(f"/fluxtrain/operator:{NEXT_TAG}")
        assert container["resources"]["requests"]["cpu"] == "50m"


def replace_leader(kubectl: Kubectl, debug: Callable[[], str]) -> None:
    """Delete the leader's pod; another replica takes over."""
    wait_for(lambda: leader(kubectl) != "", debug)
    deleted = leader(kubectl)
    kubectl("delete", "pod", deleted, IN, "--wait=false")
    seconds = wait_for(lambda: leader(kubectl) not in ("", deleted), debug)
    print(f"the leader deleted: another one leads after {seconds:.1f} s")


def compare_with_the_laptop(kubectl: Kubectl, folder: Path) -> None:
    """Run the same file on this machine: losses, images, checkpoints and the checker's verdict are equal."""
    ours, alone = folder / "output", openmoji.laptop(folder)
    steps = list(range(1, openmoji.STEPS + 1))
    assert list(losses(ours)) == steps, "no step is missing or repeated"
    assert losses(ours) == pytest.approx(losses(alone), rel=1e-4)
    for pattern in ("samples/*.png", "checkpoints/step_*/DONE"):
        assert names(ours, pattern) == names(alone, pattern) != []
    log = folder / "pod.log"
    log.write_text(rank_0_log(kubectl))
    assert log.read_text() == (ours / "mlperf.log").read_text(), "the pod's log is complete"
    verdicts = [check(path) for path in (log, alone / "mlperf.log")]
    explanations = [
        [re.sub(r"[\d.]+", "#", text) for text in verdict.explanations] for verdict in verdicts
    ]
    assert verdicts[0].success == verdicts[1].success
    assert explanations[0] == explanations[1]
    print(f"the checker on both logs: {verdicts[0].explanations}")


def names(folder: Path, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))


def rank_0_log(kubectl: Kubectl) -> str:
    """Return the MLPerf lines of rank 0, which is on either pod."""
    logs = [kubectl("logs", f"openmoji-{index}", IN) for index in range(2)]
    (log,) = [text for text in logs if ":::MLLOG" in text]
    assert log.startswith(":::MLLOG"), log[:2000]
    return "".join(f"{line}\n" for line in log.splitlines() if line.startswith(":::MLLOG"))


def test_uninstall_keeps_crd_and_jobs(kubectl: Kubectl, helm: Helm) -> None:
    left = {**openmoji.short_job(), "metadata": {"name": "left"}}
    left["spec"]["lifecycle"] = {"suspend": True}
    kubectl.apply(left, namespace=NAMESPACE)
    helm("uninstall", NAME, IN, "--wait")
    wait_for(lambda: not operators(kubectl), lambda: str(operators(kubectl)), seconds=90)
    kubectl("get", "ft", "left", IN)
    kubectl("delete", "ft", "left", IN)
