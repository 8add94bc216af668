"""Pods that try which addresses and ports they reach."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from cluster.kubectl import Manifest
from cluster.policies import policy_enforcer
from tests.api_server.client import Kubectl
from tests.end_to_end.stage import IMAGE, wait_for

CONNECT = Path(__file__).with_name("connect.py").read_text()


@dataclass(frozen=True, eq=False)
class Probe:
    """A pod that only waits, or one of a job; it connects from its own network."""

    namespace: str
    name: str
    labels: dict[str, str] = field(default_factory=dict)
    host_network: bool = False
    exists: bool = False
    """Whether another made the pod."""

    def manifest(self, node: str) -> Manifest:
        """Return the pod, on ``node``."""
        restricted = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container = {
            "name": "probe",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["python3", "-c", "import time; time.sleep(100_000)"],
            "securityContext": restricted,
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": self.namespace, "labels": self.labels},
            "spec": {
                "nodeName": node,
                "hostNetwork": self.host_network,
                "automountServiceAccountToken": False,
                "containers": [container],
                "terminationGracePeriodSeconds": 0,
            },
        }

    def reaches(self, kubectl: Kubectl, targets: dict[str, str]) -> dict[str, bool]:
        """Return whether a connection to each of ``targets`` (name -> HOST:PORT) opens within a second."""
        where = (self.name, f"--namespace={self.namespace}", "--", "python3", "-c", CONNECT)
        opened: dict[str, bool] = json.loads(kubectl("exec", *where, *targets.values()))
        return {name: opened[target] for name, target in targets.items()}


def start(kubectl: Kubectl, probes: list[Probe], node: str) -> None:
    """Create the probes that do not exist on ``node``, with their namespaces, and wait until they run."""
    made = [probe for probe in probes if not probe.exists]
    for namespace in {probe.namespace for probe in made}:
        metadata = {"name": namespace}
        if not _exists(kubectl, namespace):
            kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    for probe in made:
        wait_for(lambda p=probe: _has_account(kubectl, p.namespace), "a service account")  # type: ignore[misc]
        kubectl.apply(probe.manifest(node), namespace=probe.namespace)
    for probe in made:
        where = (f"pod/{probe.name}", f"--namespace={probe.namespace}", "--timeout=60s")
        kubectl("wait", "--for=condition=Ready", *where, seconds=70)


def stop(kubectl: Kubectl, probes: list[Probe]) -> None:
    """Delete what `start` created, and the rules of all pods."""
    policy_enforcer.lift()
    for probe in probes:
        if not probe.exists:
            where = (probe.name, f"--namespace={probe.namespace}", "--ignore-not-found")
            kubectl("delete", "pod", *where, "--grace-period=0", "--force")


def _exists(kubectl: Kubectl, namespace: str) -> bool:
    return bool(kubectl("get", "namespace", namespace, "--ignore-not-found"))


def _has_account(kubectl: Kubectl, namespace: str) -> bool:
    where = ("serviceaccount", "default", f"--namespace={namespace}")
    return bool(kubectl("get", *where, "--ignore-not-found"))
