"""The jobs of a namespace with its own operator, and the samples that they use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cluster.kubectl import Manifest
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.stage import RUN, Operator, condition, job, losses, wait_for

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.order import Order

ENDLESS = {**RUN, "schedule": {"steps": 100_000}}


class Jobs:
    """The jobs of one namespace by name, and their operator."""

    def __init__(self, kubectl: Kubectl, folder: Path, namespace: str) -> None:
        self.kubectl, self.output = kubectl, folder / "output"
        self.operator = Operator(kubectl, namespace, folder)
        self.namespace, self.here = namespace, f"--namespace={namespace}"

    def apply(self, name: str, **spec: Any) -> None:
        self.kubectl.apply(job(name, **spec), namespace=self.namespace)

    def patch(self, name: str, **spec: Any) -> None:
        change = json.dumps({"spec": spec})
        self.kubectl("patch", "ft", name, self.here, "--type=merge", f"--patch={change}")

    def scale(self, name: str, replicas: int) -> None:
        self.kubectl("scale", f"ft/{name}", f"--replicas={replicas}", self.here)

    def status(self, name: str) -> Manifest:
        return stage.status(self.kubectl, self.namespace, name)

    def pods(self, name: str) -> dict[str, Manifest]:
        """Return the job's pods by name."""
        pods = self.kubectl.get("pods", f"--selector=fluxtrain.dev/job={name}", self.here)
        return {pod["metadata"]["name"]: pod for pod in pods["items"]}

    def uids(self, name: str) -> dict[str, str]:
        return {pod: manifest["metadata"]["uid"] for pod, manifest in self.pods(name).items()}

    def exists(self, name: str) -> bool:
        jobs = self.kubectl.get("ft", self.here)["items"]
        return name in {job["metadata"]["name"] for job in jobs}

    def wait(self, name: str, done: Callable[[Manifest], bool]) -> Manifest:
        """Return the job's status once ``done`` accepts it; fail at once if the job has failed."""
        status: Manifest = {}

        def check() -> bool:
            nonlocal status
            status = self.status(name)
            if not (accepted := done(status)) and status.get("phase") == "Failed":
                raise AssertionError(self.debug_text(name, status))
            return accepted

        wait_for(check, lambda: self.debug_text(name, status), seconds=240)
        return status

    def wait_for_condition(self, name: str, kind: str, reason: str) -> str:
        """Return the message of the condition ``kind`` once it has this ``reason``."""
        status = self.wait(name, lambda s: condition(s, kind).get("reason") == reason)
        return str(condition(status, kind)["message"])

    def wait_for_steps(self, name: str, count: int, after: str) -> None:
        """Wait for ``count`` further steps; print the seconds."""
        seconds = stage.wait_for_steps(
            self.output, count, lambda: self.debug_text(name, self.status(name))
        )
        print(f"{after}: {count} further steps after {seconds:.1f} s")

    def wait_for_nodes(self, name: str, count: int) -> None:
        """Wait until the status reports ``count`` nodes and as many ranks make five further steps."""
        self.wait(
            name,
            lambda s: s.get("phase") == "Running" and s.get("nodes", {}).get("ready") == count,
        )
        last = max(losses(self.output)) + 5
        seconds = wait_for(
            lambda: sum(step >= last for step in _last_steps(self.output)) >= count,
            lambda: self.debug_text(name, self.status(name)),
            seconds=240,
        )
        print(f"{count} nodes: all make steps after {seconds:.1f} s")

    def debug_text(self, name: str, status: Manifest) -> str:
        """Return everything that explains why a wait timed out."""
        pods = self.kubectl("get", "pods", "-o", "wide", self.here)
        logs = stage.logs(self.kubectl, self.namespace, name)
        return f"{json.dumps(status, indent=1)}\n{pods}\n{self.operator.log()}\n{logs}"


def _last_steps(output: Path) -> list[int]:
    """Return the last step of each rank that ever used samples."""
    ledgers = [path.read_text().splitlines() for path in (output / "ledger").glob("rank_*.jsonl")]
    return [json.loads(lines[-2])["step"] for lines in ledgers if len(lines) > 1]


def used_samples(output: Path) -> dict[int, list[int]]:
    """Return the samples of each step, sorted, over all ranks."""
    used: dict[int, list[int]] = {}
    for path in (output / "ledger").glob("rank_*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            used.setdefault(record["step"], []).extend(record["indices"])
    return {step: sorted(indices) for step, indices in sorted(used.items())}


def expected_samples(run: Manifest, num_steps: int) -> dict[int, list[int]]:
    """Return the samples that each of the first steps of ``run`` must use, sorted."""
    config = resolve(run)
    batch = config.schedule.global_batch_size
    order = Order(config.drawn_seed, config.data.synthetic.train_samples, batch)
    positions = np.arange(batch)
    return {k + 1: sorted(order.indices(k, positions).tolist()) for k in range(num_steps)}
