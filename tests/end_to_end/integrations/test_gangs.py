"""Gangs of Kubernetes and of the coscheduling plugin: real schedulers bind ``nodes.min`` pods or none."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.errors import ClusterError
from cluster.free_ports import free_port
from cluster.kubectl import NO_PROXY
from cluster.nodes.fake_gpus import NUM_GPUS, RESOURCE
from cluster.programs import binaries
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.jobs import ENDLESS, Jobs
from tests.end_to_end.stage import condition, job, wait_for

pytestmark = pytest.mark.proof

NAMESPACE = "gangs"
PLUGIN = "Coscheduling"
SCHEDULERS = {PLUGIN: "coscheduling", "Native": "default-scheduler"}


class Gangs(Jobs):
    """Jobs that share the GPUs of one node, and the plugin's scheduler, a process of this machine."""

    def __init__(self, kubectl: Kubectl, folder: Path, node: str) -> None:
        super().__init__(kubectl, folder, NAMESPACE)
        self._folder, self._node = folder, node
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, programs: Path) -> None:
        """Install the plugin's CRDs, and start the scheduler next to the cluster's own."""
        crd = programs / "crds" / "scheduling.x-k8s.io_podgroups.yaml"
        self.kubectl("apply", "--server-side", f"--filename={crd}")
        self.kubectl.wait_for_crds()
        only = {"enabled": [{"name": PLUGIN}], "disabled": [{"name": "*"}]}
        plugins = {"multiPoint": {"enabled": [{"name": PLUGIN}]}, "queueSort": only}
        settings = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubectl.kubeconfig)},
            "leaderElection": {"leaderElect": False},
            "profiles": [{"schedulerName": SCHEDULERS[PLUGIN], "plugins": plugins}],
        }
        config = self._folder / "scheduler.json"
        config.write_text(json.dumps(settings))
        ports = ["--bind-address=127.0.0.1", f"--secure-port={free_port()}"]
        with (self._folder / "scheduler.log").open("wb") as log:
            self._process = subprocess.Popen(
                [programs / "coscheduling", f"--config={config}", *ports],
                env={"NO_PROXY": f"{NO_PROXY},127.0.0.1"},
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)
        self.kubectl("delete", "crd", "podgroups.scheduling.x-k8s.io", "--ignore-not-found")

    def train(self, name: str, gang: str, num_nodes: int, gpus: int) -> None:
        """Create a gang of ``num_nodes`` pods with ``gpus`` each, which trains without end."""
        limits = {RESOURCE: str(gpus)}
        scheduling = {"nodes": {"min": num_nodes}, "scheduling": {"gang": gang}}
        stage.make_output(self.kubectl, NAMESPACE, name, self._folder / name)
        storage = {"output": {"persistentVolumeClaim": {"claimName": name}}}
        manifest = job(name, run=ENDLESS, storage=storage, **scheduling)
        pods = manifest["spec"]["podTemplate"]["spec"]
        pods["schedulerName"] = SCHEDULERS[gang]
        pods["nodeSelector"] = {"kubernetes.io/hostname": self._node}
        pods["containers"][0]["resources"] = {"requests": limits, "limits": limits}
        self.kubectl.apply(manifest, namespace=NAMESPACE)

    def bound(self, name: str) -> set[str]:
        """Return the uids of the training pods that are bound to a node."""
        pods = {uid: pod for uid, pod in self.pods(name).items() if "rendezvous" not in uid}
        return {p["metadata"]["uid"] for p in pods.values() if p["spec"].get("nodeName")}

    def wait_until_runs(self, name: str, nodes: int) -> None:
        self.wait(name, lambda s: condition(s, "Training").get("status") == "True")
        wait_for(
            lambda: len(self.bound(name)) == nodes,
            lambda: self.debug_text(name, self.status(name)),
        )

    def debug_text(self, name: str, status: dict[str, object]) -> str:
        kinds = "podgroups.scheduling.x-k8s.io,podgroups.scheduling.k8s.io,events"
        objects = self.kubectl("get", kinds, "--output=yaml", self.here)
        log = (self._folder / "scheduler.log").read_text()[-4000:]
        return f"{super().debug_text(name, status)}\n{objects}\n{log}"


@pytest.fixture(scope="module")
def gangs(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    try:
        programs = binaries.build("coscheduling")
    except ClusterError as error:
        pytest.skip(f"the scheduler cannot be built here: {error}")
    node = kubectl.get("nodes")["items"][0]["metadata"]["labels"]["kubernetes.io/hostname"]
    gangs = Gangs(kubectl, tmp_path_factory.mktemp("gangs"), node)
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, gangs.output)
    try:
        gangs.start(programs)
        gangs.operator.start()
        yield gangs
    finally:
        gangs.operator.stop()
        stage.clear(kubectl, NAMESPACE)
        gangs.stop()


@pytest.mark.parametrize("gang", SCHEDULERS)
def test_pods_of_a_gang_are_bound_together_and_replaced_one_by_one(gangs: Gangs, gang: str) -> None:
    first, second = f"first-{gang.lower()}", f"second-{gang.lower()}"
    gangs.train(first, gang, 1, gpus=NUM_GPUS - 3)
    gangs.wait_until_runs(first, 1)
    gangs.train(second, gang, 2, gpus=2)
    wait_for(
        lambda: len(gangs.pods(second)) == 3,
        lambda: gangs.debug_text(second, gangs.status(second)),
    )
    for _ in range(20):  # one of the two would fit
        assert gangs.bound(second) == set()
        time.sleep(0.5)
    gangs.kubectl("delete", "ft", first, gangs.here)
    gangs.wait_until_runs(second, 2)

    gangs.patch(second, nodes={"min": 2, "max": 3})
    gangs.wait_until_runs(second, 3)
    before = gangs.bound(second)
    gangs.kubectl("delete", "pod", f"{second}-1", gangs.here)
    wait_for(
        lambda: len(gangs.bound(second) - before) == 1 and len(gangs.bound(second)) == 3,
        lambda: gangs.debug_text(second, gangs.status(second)),
    )
    assert len(gangs.bound(second) & before) == 2, "the others keep their nodes"
    gangs.patch(second, nodes={"min": 3, "max": 3})
    gangs.wait_until_runs(second, 3)
    assert len(gangs.bound(second) & before) == 2, "a larger minimum restarts none"
    gangs.kubectl("delete", "ft", second, gangs.here)
