"""What kstatus, Helm and Argo CD make of a job, by their own code: ``cluster/go/health`` and Helm 4."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cluster.commands import run
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.programs import binaries
from tests.api_server.client import Kubectl, make_job
from tests.end_to_end.integrations.release import Helm
from tests.end_to_end.stage import Operator, condition, wait_for
from tests.operator.verdicts import ARGO, CASES, CURRENT
from tests.paths import ROOT

from fluxtrain_operator.base.names import stamp

NAMESPACE = "waits"
IN = f"--namespace={NAMESPACE}"
JOBS = f"/apis/fluxtrain.dev/v1beta1/namespaces/{NAMESPACE}/fluxtrainings"


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return binaries.build("health") / "object-health"
    except ClusterError as error:
        pytest.skip(f"the program cannot be built here: {error}")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file with the script of docs/operator.md."""
    page = (ROOT / "docs" / "operator.md").read_text()
    (text,) = re.findall(r"```lua\n(.*?)```", page, re.DOTALL)
    path = tmp_path_factory.mktemp("argo") / "health.lua"
    path.write_text(text)
    return path


def healths(program: Path, script: Path, *objects: Manifest) -> list[Mapping[str, str]]:
    """Return what the program makes of each object: verdicts of kstatus, status and message of Argo CD."""
    kind = {"apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTrainingList"}
    listed = json.dumps({**kind, "metadata": {}, "items": objects})
    read = json.loads(run([program, f"-script={script}"], stdin=listed))
    return [
        {**each, "argo": each["argo"]["status"], "says": each["argo"]["message"]} for each in read
    ]


@pytest.mark.proof
def test_every_status_of_the_planner_is_read_as_what_it_is(program: Path, script: Path) -> None:
    found = healths(program, script, *(case.manifest("job") for case in CASES.values()))
    for (name, case), each in zip(CASES.items(), found, strict=True):
        expected = (case.verdict, case.verdict, case.argo or ARGO[case.verdict])
        assert (each["kstatus"], each["flux"], each["argo"]) == expected, (name, each)
        assert each["says"] or case.verdict == CURRENT, name


@pytest.fixture(scope="module")
def api(kubectl: Kubectl) -> Kubectl:
    kubectl("create", "namespace", NAMESPACE)
    kubectl("create", "serviceaccount", "default", IN)
    return kubectl


def test_the_api_server_keeps_what_they_read(api: Kubectl, program: Path, script: Path) -> None:
    server = api.server
    for number, case in enumerate(CASES.values()):
        name = f"case-{number}"
        job = {**make_job(name, {}), "apiVersion": "fluxtrain.dev/v1beta1"}
        assert server.create(JOBS, job, dry_run=False).accepted
        for generation in range(2, case.generation + 1):
            spec = {"nodes": {"max": generation}}
            assert server.merge(f"{JOBS}/{name}", {"spec": spec}).accepted
        if case.status.conditions:
            status = case.manifest(name)["status"]
            response = server.merge(f"{JOBS}/{name}/status", {"status": status})
            assert response.accepted, response.message
    jobs = [server.get(f"{JOBS}/case-{number}").body for number in range(len(CASES))]
    found = healths(program, script, *jobs)
    verdicts = {name: case.verdict for name, case in CASES.items()}
    assert {name: each["kstatus"] for name, each in zip(CASES, found, strict=True)} == verdicts
    for number in range(len(CASES)):
        server.delete(f"{JOBS}/case-{number}")


class Release:
    """A chart with one FluxTraining, which Helm 4 installs and waits for, and its operator."""

    def __init__(self, kubectl: Kubectl, operator: Operator, folder: Path) -> None:
        self.kubectl, self.operator, self._folder = kubectl, operator, folder
        self._helm = Helm(kubectl.kubeconfig, folder / "helm")
        (folder / "chart" / "templates").mkdir(parents=True)
        metadata = {"apiVersion": "v2", "name": "job", "version": "0.1.0"}
        (folder / "chart" / "Chart.yaml").write_text(json.dumps(metadata))

    def upgrade(self, name: str, seconds: int, **spec: object) -> None:
        """Run ``helm upgrade --install --wait``; ClusterError if it does not succeed."""
        job = {**make_job(name, spec), "apiVersion": "fluxtrain.dev/v1beta1"}
        (self._folder / "chart" / "templates" / "job.yaml").write_text(json.dumps(job))
        options = ("--install", "--wait", f"--timeout={seconds}s")
        self._helm("upgrade", name, self._folder / "chart", IN, *options, seconds=seconds + 60)

    def status(self, name: str) -> Manifest:
        result: Manifest = self.kubectl.get("ft", name, IN)["status"]
        return result

    def end(self, name: str, code: int) -> None:
        """Let the job's pods end with ``code``, as their kubelet would report it."""
        end = {"exitCode": code, "finishedAt": stamp(time.time()), "startedAt": stamp(time.time())}
        container = {
            "name": "trainer",
            "image": "x",
            "imageID": "x",
            "ready": False,
            "restartCount": 0,
        }
        phase = "Failed" if code else "Succeeded"
        status = {
            "phase": phase,
            "containerStatuses": [{**container, "state": {"terminated": end}}],
        }
        patch = f"--patch={json.dumps({'status': status})}"
        self.kubectl("patch", "pod", f"{name}-0", IN, "--subresource=status", "--type=merge", patch)

    def has_pod(self, name: str) -> bool:
        pods = self.kubectl.get("pods", IN)["items"]
        return f"{name}-0" in [pod["metadata"]["name"] for pod in pods]


@pytest.fixture(scope="module")
def release(api: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("waits")
    limits = '--job-policy={"images":["permitted/*"]}'
    operator = Operator(api, NAMESPACE, folder, options=[limits])
    operator.start()
    try:
        yield Release(api, operator, folder)
    finally:
        operator.stop()


@pytest.mark.proof
def test_helm_waits_until_a_job_is_suspended_and_fails_when_one_fails(release: Release) -> None:
    image = {"image": "permitted/trainer"}
    release.upgrade("one", 60, lifecycle={"suspend": True}, **image)
    assert condition(release.status("one"), "Suspended")["status"] == "True"

    with pytest.raises(ClusterError, match=r"InProgress[\s\S]*0 of at least 1 nodes are up"):
        release.upgrade("one", 10, **image)
    wait_for(lambda: release.has_pod("one"), release.operator.log)
    ending = threading.Timer(3, release.end, ("one", 0))
    ending.start()
    release.upgrade("one", 60, **image)
    ending.join()
    assert release.status("one")["phase"] == "Complete"
    release.upgrade("one", 60, lifecycle={"ttlSecondsAfterFinished": 86_400}, **image)

    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"Failed[\s\S]*spec.image"):
        release.upgrade("two", 120, image="other/trainer")
    assert time.monotonic() - began < 60, "a failure is told at once, not at the timeout"
    with pytest.raises(ClusterError, match=r"InProgress"):
        release.upgrade("three", 10, **image)
    wait_for(lambda: release.has_pod("three"), release.operator.log)
    release.end("three", 2)
    with pytest.raises(ClusterError, match=r"Failed[\s\S]*exit code 2"):
        release.upgrade("three", 120, **image)
