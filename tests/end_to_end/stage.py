"""Shared by the tests on a real cluster: their job, the operator, and functions that read and wait."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from cluster.errors import ClusterError
from cluster.free_ports import free_port
from cluster.kubectl import NO_PROXY, Manifest
from cluster.nodes import images, volumes
from tests.api_server.client import Kubectl
from tests.end_to_end import slow_steps
from tests.paths import ROOT
from tests.trainer.commands import fluxtrain

IMAGE = "localhost/fluxtrain/trainer:test"
STEP_SECONDS = "0.1"
"""A pause after each step in a pod: jobs that train while a test waits do not occupy the cores."""
RUN: Manifest = {
    "preset": "micro",
    "optim": {"learning_rate": 1e-3},
    "schedule": {"steps": 300},
    "checkpoint": {"every_steps": 20},
    "evaluation": {"every_samples": 1600},
    "logging": {"every_steps": 1, "ledger": True},
}


def job(name: str, **spec: Any) -> Manifest:
    """Return a job of two nodes whose packages come from a volume, since the test's image has none."""
    mount = {"name": "packages", "mountPath": volumes.SITE_PACKAGES, "readOnly": True}
    claim = {"name": "packages", "persistentVolumeClaim": {"claimName": "packages"}}
    env = {"OMP_NUM_THREADS": "1", slow_steps.SECONDS: STEP_SECONDS}
    variables = [{"name": name, "value": value} for name, value in env.items()]
    container = {"name": "trainer", "volumeMounts": [mount], "env": variables}
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name},
        "spec": {
            "nodes": {"min": 1, "max": 2},
            "run": RUN,
            "storage": {"output": {"persistentVolumeClaim": {"claimName": "output"}}},
            "podTemplate": {"spec": {"volumes": [claim], "containers": [container]}},
            **spec,
        },
    }


def make_namespace(kubectl: Kubectl, namespace: str) -> None:
    """Make a namespace that takes only restricted pods."""
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": namespace, "labels": enforce}
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})


def make_volumes(kubectl: Kubectl, namespace: str, folder: Path) -> None:
    """Create the claims `packages` and `output` of a namespace; ``folder`` is the volume of `output`."""
    kubectl.apply(*volumes.site_packages("packages", namespace), namespace=namespace)
    make_output(kubectl, namespace, "output", folder)


def make_output(kubectl: Kubectl, namespace: str, claim: str, folder: Path) -> None:
    """Create ``claim``, whose volume is ``folder``."""
    folder.mkdir(exist_ok=True)
    shutil.chown(folder, images.USER_ID, images.USER_ID)
    for parent in list(folder.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    manifests = volumes.host_folder(claim, folder, namespace, read_only=False)
    kubectl.apply(*manifests, namespace=namespace)


def clear(kubectl: Kubectl, namespace: str) -> None:
    """Delete all jobs, pods and volumes of a namespace."""
    kubectl("delete", "fluxtraining", "--all", f"--namespace={namespace}", seconds=120)
    kubectl("delete", "pod", "--all", f"--namespace={namespace}", "--grace-period=0", "--force")
    claims = kubectl.get("pvc", f"--namespace={namespace}")["items"]
    kubectl("delete", "pvc", "--all", f"--namespace={namespace}", seconds=120)
    names = [f"{namespace}-{claim['metadata']['name']}" for claim in claims]
    kubectl("delete", "pv", *names, seconds=120)


class Operator:
    """The operator as a process of this machine, so that tests can kill and restart it."""

    def __init__(
        self,
        kubectl: Kubectl,
        namespace: str,
        folder: Path,
        identity: str = "test",
        kubeconfig: Path | None = None,
        others: Sequence[str] = (),
        code: Path = ROOT,
        options: Sequence[str] = (),
    ) -> None:
        """Watch ``namespace`` and ``others``, with the packages of the project at ``code``.

        Several operators of one namespace need different ``identity`` and ``folder``.
        """
        self._code, self._options = code, options
        self.kubectl, self.namespace = kubectl, namespace
        self._folder, self._count, self._identity = folder, 0, identity
        self._kubeconfig = kubeconfig or kubectl.kubeconfig
        self._namespaces = (namespace, *others)
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def identity(self) -> str:
        """Return the holder of the Lease, up to a suffix, if this operator leads."""
        return f"{self._identity}-{self._count}"

    def start(self) -> None:
        self._count += 1
        self.port = free_port()
        with (self._folder / f"operator_{self._count}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fluxtrain_operator", f"--image={IMAGE}"),
                    *(f"--namespace={name}" for name in self._namespaces),
                    f"--lease-namespace={self.namespace}",
                    *(f"--identity={self.identity}", "--address=127.0.0.1", f"--port={self.port}"),
                    *self._options,
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{self._code / 'operator'}:{self._code / 'trainer'}",
                    "KUBECONFIG": str(self._kubeconfig),
                    "NO_PROXY": f"{NO_PROXY},127.0.0.1",
                },
                stdout=log,
                stderr=log,
            )

    def stop(self, signum: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)
            self.process.wait(timeout=40)

    def log(self) -> str:
        files = sorted(self._folder.glob("operator_*.log"))
        return "\n".join(path.read_text()[-4000:] for path in files)


GRANT = "fluxtrain-operator-fluxtrain-system-jobs"
"""The cluster role of the manifests with the rights in each namespace, and the name of its bindings."""


def make_account(kubectl: Kubectl, namespace: str, folder: Path) -> Path:
    """Create an account in ``namespace`` that may only elect a leader there; return its kubeconfig."""
    here = f"--namespace={namespace}"
    documents = yaml.safe_load_all((ROOT / "manifests" / "rbac.yaml").read_text())
    kubectl.apply(
        *(each for each in documents if each["metadata"]["name"] == GRANT and "rules" in each)
    )
    kubectl("create", "serviceaccount", "operator", here)
    kubectl("create", "role", "election", "--verb=create,get,update", "--resource=leases", here)
    account = f"--serviceaccount={namespace}:operator"
    kubectl("create", "rolebinding", "election", "--role=election", account, here)
    config = json.loads(kubectl.kubeconfig.read_text())
    token = kubectl("create", "token", "operator", here).strip()
    config["users"][0]["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


def grant(kubectl: Kubectl, home: str, namespace: str) -> None:
    """Give the account in the namespace ``home`` an operator's rights in ``namespace``."""
    account, here = f"--serviceaccount={home}:operator", f"--namespace={namespace}"
    kubectl("create", "rolebinding", GRANT, f"--clusterrole={GRANT}", account, here)


def status(kubectl: Kubectl, namespace: str, name: str) -> Manifest:
    result: Manifest = kubectl.get("ft", name, f"--namespace={namespace}").get("status", {})
    return result


def ready_nodes(kubectl: Kubectl) -> set[str]:
    """Return the names of the nodes whose condition Ready is True."""
    return {
        node["metadata"]["name"]
        for node in kubectl.get("nodes")["items"]
        if condition(node["status"], "Ready").get("status") == "True"
    }


def wait_for(
    done: Callable[[], bool], what: str | Callable[[], str], *, seconds: float = 120
) -> float:
    """Return the seconds until ``done``; fail with ``what`` on a timeout."""
    began = time.monotonic()
    while not done():
        if time.monotonic() > began + seconds:
            raise AssertionError(what if isinstance(what, str) else what())
        time.sleep(0.1)
    return time.monotonic() - began


def wait_for_steps(
    output: Path, count: int, what: str | Callable[[], str], *, seconds: float = 240
) -> float:
    """Return the seconds until ``count`` further steps are done."""
    before = max(losses(output), default=0)
    return wait_for(lambda: max(losses(output), default=0) >= before + count, what, seconds=seconds)


def suspend(kubectl: Kubectl, namespace: str, name: str, value: bool) -> None:
    patch = json.dumps({"spec": {"lifecycle": {"suspend": value}}})
    where = ("ft", name, f"--namespace={namespace}", "--type=merge")
    kubectl("patch", *where, f"--patch={patch}")


def condition(status: Manifest, kind: str) -> Manifest:
    """Return a condition of ``status``, empty if it is missing."""
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})


def logs(kubectl: Kubectl, namespace: str, name: str) -> str:
    texts = []
    for pod in (f"{name}-0", f"{name}-1", f"{name}-rendezvous"):
        try:
            texts.append(kubectl("logs", "--tail=15", pod, f"--namespace={namespace}"))
        except ClusterError as error:
            texts.append(f"{pod}: {error}")
    return "\n".join(texts)


def step(status: Manifest) -> int:
    return int((status.get("progress") or {}).get("step", 0))


def is_complete(status: Manifest) -> bool:
    return status.get("phase") == "Complete"


def losses(folder: Path) -> dict[int, float]:
    path = folder / "metrics.jsonl"
    complete, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    records = map(json.loads, complete.splitlines())
    return {r["step"]: r["train_loss"] for r in records if "train_loss" in r}


def laptop(folder: Path, run: Manifest = RUN) -> Path:
    """Run the same training on this machine; return its output."""
    (folder / "job.json").write_text(json.dumps(job("laptop", run=run)))
    output = folder / "laptop"
    options = ("--output", str(output), "--logging.metrics_port=0")
    done = fluxtrain("run", str(folder / "job.json"), *options)
    assert done.returncode == 0, done.stderr
    return output
