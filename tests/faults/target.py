"""Target: the job that is disturbed, its pods, its processes and its output."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.layout import Node, nodes
from tests.end_to_end import slow_steps, stage
from tests.end_to_end.jobs import Jobs
from tests.end_to_end.stage import condition, ready_nodes, wait_for

from fluxtrain.contract.process import MEMBERS_PATH, METRICS_FILE, METRICS_PORT, pod_of

IMAGE = "localhost/fluxtrain/trainer:faults"
CHECKPOINT_STEPS = 10
STEP_SECONDS = "0.25"
STEADY_STEPS = 5
"""Further steps that must be made before a fault, and during one that lasts."""
RECOVERY_SECONDS = 180.0
REPORT_SECONDS = 12.0
"""The operator reads the progress every 10 s."""
NUM_NODES = 3
RUN: Manifest = {
    **stage.RUN,
    "schedule": {"steps": 100_000, "global_batch_size": 16},  # 3 ranks do not divide it
    "checkpoint": {"every_steps": CHECKPOINT_STEPS, "keep": 3},
}
SPEC: Manifest = {
    "image": IMAGE,
    "run": RUN,
    "nodes": {"min": 2, "max": NUM_NODES},
    "restart": {"maxRestarts": 50, "noProgressSeconds": 30},
}
_TAIL_BYTES = 4096


class Target:
    """One job, which trains on all nodes unless a fault disturbs it."""

    def __init__(self, jobs: Jobs, name: str, output: Path, spec: Manifest | None = None) -> None:
        """Use ``output``, the folder of the claim ``output-NAME``; ``spec`` overrides `SPEC`."""
        self.jobs, self.kubectl, self.name, self.output = jobs, jobs.kubectl, name, output
        self.spec: Manifest = {**SPEC, **(spec or {})}
        self.wanted = int(self.spec["nodes"]["max"])

    def apply(self) -> None:
        """Create the job."""
        self.kubectl.apply(manifest(self.name, self.spec), namespace=self.jobs.namespace)

    def recreate(self) -> None:
        """Delete the job and create it again; it resumes from its output."""
        self.kubectl("delete", "ft", self.name, self.jobs.here, seconds=120)
        wait_for(lambda: not self.jobs.pods(self.name), "the pods are gone", seconds=200)
        self.apply()

    @property
    def status(self) -> Manifest:
        return self.jobs.status(self.name)

    @property
    def phase(self) -> str:
        return str(self.status.get("phase"))

    @property
    def charged(self) -> int:
        """Return the restarts that count towards ``restart.maxRestarts``."""
        return int((self.status.get("restarts") or {}).get("charged", 0))

    @property
    def causes(self) -> Counter[str]:
        """Return all restarts by reason."""
        return Counter((self.status.get("restarts") or {}).get("causes", {}))

    @property
    def step(self) -> int:
        """Return the newest step in metrics.jsonl, 0 if there is none."""
        return newest_step(self.output / METRICS_FILE)

    @property
    def pods(self) -> dict[str, Manifest]:
        """Return all pods of the job by name."""
        return self.jobs.pods(self.name)

    @property
    def rendezvous(self) -> Manifest:
        """Return the pod of the rendezvous service."""
        return self.pods[f"{self.name}-rendezvous"]

    @property
    def members(self) -> dict[str, Any]:
        """Return the answer of the rendezvous service at /members, empty if there is none."""
        try:
            return fetch_members(self.rendezvous["status"]["podIP"])
        except (OSError, ValueError, KeyError, ClusterError):
            return {}

    @property
    def training_pods(self) -> list[Manifest]:
        """Return the pods of the agents."""
        return [pod for name, pod in self.pods.items() if name != f"{self.name}-rendezvous"]

    def spread(self) -> None:
        """Delete pods that share a node with another, until there is one on each."""
        while shared := _sharing_a_node(self.training_pods):
            name = shared[0]["metadata"]["name"]
            self.kubectl("delete", "pod", name, self.jobs.here, seconds=200)
            self.wait_until_steady()

    def pod_of_rank(self, rank: int) -> Manifest:
        """Return the training pod whose agent has ``rank`` in the present generation, once there is one."""
        world: list[str] = []

        def has_rank() -> bool:
            world[:] = self.members.get("world", ())
            return len(world) > rank

        wait_for(has_rank, self.debug_text, seconds=RECOVERY_SECONDS)
        uid = pod_of(world[rank])
        return next(pod for pod in self.pods.values() if pod["metadata"]["uid"] == uid)

    @property
    def expendable_pod(self) -> Manifest:
        """Return a training pod that is not on the rendezvous service's node."""
        node = self.rendezvous["spec"]["nodeName"]
        return next(pod for pod in self.training_pods if pod["spec"]["nodeName"] != node)

    def wait_until_steady(self) -> None:
        """Wait until all wanted nodes train together, healthy, and make further steps."""
        wait_for(self._is_steady, self.debug_text, seconds=RECOVERY_SECONDS)
        self.wait_for_steps()

    def wait_for_steps(self, count: int = STEADY_STEPS) -> None:
        """Wait for ``count`` steps beyond the newest; fail at once if the job has failed."""
        goal = self.step + count

        def done() -> bool:
            if self.step >= goal:
                return True
            self._require_not_failed()
            return False

        wait_for(done, self.debug_text, seconds=RECOVERY_SECONDS)

    def wait_for_charged(self, count: int) -> None:
        """Wait until ``count`` restarts are charged, as long as the operator takes to read the progress."""
        end = time.monotonic() + REPORT_SECONDS
        while self.charged < count and time.monotonic() < end:
            time.sleep(0.2)

    def wait_for_condition(self, kind: str, reason: str) -> None:
        self.jobs.wait_for_condition(self.name, kind, reason)

    def wait_for_new_pods(self, before: Manifest) -> None:
        """Wait until a pod exists that is not among ``before``, uids by name."""
        known = set(before.values())
        wait_for(lambda: bool(set(self.uids().values()) - known), self.debug_text, seconds=120)

    def uids(self) -> dict[str, str]:
        return self.jobs.uids(self.name)

    def debug_text(self) -> str:
        """Return everything that explains a time-out."""
        return f"members {self.members}\n{self.jobs.debug_text(self.name, self.status)}"

    def _is_steady(self) -> bool:
        try:
            self._require_not_failed()
            status, world = self.status, self.members.get("world", ())
            all_ready = len(ready_nodes(self.kubectl)) == len(nodes())
        except ClusterError:  # the API server is about to be ready
            return False
        number = status.get("nodes", {})
        return (
            all_ready
            and number.get("ready") == number.get("desired") == len(world) == self.wanted
            and condition(status, "Healthy").get("status") == "True"
        )

    def _require_not_failed(self) -> None:
        try:
            failed = self.phase == "Failed"
        except (ClusterError, OSError):
            return
        if failed:
            raise AssertionError(f"the job has failed: {json.dumps(self.status.get('conditions'))}")

    def flag(self, name: str) -> Path:
        """Return the file in the output that asks for a fault inside of the pods, see inside_pods.py."""
        folder = self.output / "faults"
        folder.mkdir(exist_ok=True)
        return folder / name


def manifest(name: str, spec: Manifest) -> Manifest:
    """Return a job with ``spec``; its data, if it has any, are in the output."""
    claim = {"persistentVolumeClaim": {"claimName": f"output-{name}"}}
    job = stage.job(name, storage={"output": claim, "data": claim}, **spec)
    (container,) = job["spec"]["podTemplate"]["spec"]["containers"]
    others = [v for v in container["env"] if v["name"] != slow_steps.SECONDS]
    container["env"] = [*others, {"name": slow_steps.SECONDS, "value": STEP_SECONDS}]
    return job


def fetch_members(address: str) -> dict[str, Any]:
    """Return the answer at /members; OSError or ValueError without one."""
    opener = build_opener(ProxyHandler({}))
    with opener.open(f"http://{address}:{METRICS_PORT}{MEMBERS_PATH}", timeout=2) as response:
        answer = json.loads(response.read())
    assert isinstance(answer, dict)
    return answer


def newest_step(path: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl; 0 if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().rpartition(b"\n")[0].splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (FileNotFoundError, ValueError):
        return 0


def _sharing_a_node(pods: list[Manifest]) -> list[Manifest]:
    """Return the pods beyond the first of each node."""
    first = {pod["spec"]["nodeName"]: pod for pod in reversed(pods)}
    return [pod for pod in pods if first[pod["spec"]["nodeName"]] is not pod]


def machine_of(pod: Manifest) -> Node:
    return next(each for each in nodes() if each.name == pod["spec"]["nodeName"])
