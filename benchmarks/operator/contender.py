"""The operators that are compared: how each is started, its jobs and its metrics.

All run on this machine, outside the cluster, with a kubeconfig, and watch one namespace.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import cluster.nodes.fake_nodes
from benchmarks.operator.mounted_secret import MountedSecret
from cluster import processes
from cluster.commands import run
from cluster.console import wait_until
from cluster.free_ports import free_port, free_ports
from cluster.kubectl import Manifest
from cluster.layout import FOLDER, KUBECONFIG
from cluster.programs import binaries
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

IMAGE = "example.org/trainer:1"  # never pulled: the nodes are fake
START_SECONDS = 60
PEER_MODULE = "github.com/kubeflow/training-operator"
PEER_SECRET = "training-operator-webhook-cert"

ON_FAKE_NODES: Manifest = {
    "nodeSelector": {"type": "fake"},
    "tolerations": [{"key": cluster.nodes.fake_nodes.TAINT["key"], "operator": "Exists"}],
}


@dataclass
class Contender:
    """An operator as a process of this machine."""

    namespace: str
    port: int = 0

    title = ""
    kind = ""
    reconcile_seconds = ""
    """The histogram metric of its reconcile durations."""
    requests = ""
    """The counter metric of its requests to the API server."""

    @property
    def process(self) -> str:
        """Return its process name."""
        return f"bench-{self.kind}"

    @property
    def process_names(self) -> tuple[str, ...]:
        """Return the names of all its processes."""
        return (self.process,)

    def crds(self) -> list[Path]:
        """Return the files of its CRDs."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it and wait until it is ready."""
        raise NotImplementedError

    def job(self, name: str, num_pods: int) -> Manifest:
        """Return a job of ``num_pods`` training pods with a GPU each."""
        raise NotImplementedError

    def is_training_pod(self, name: str) -> bool:
        """Return whether the pod ``name`` is a training pod."""
        return True

    def stop(self) -> None:
        """Stop it if it is running."""
        processes.stop(self.process_names, grace_seconds=10)

    def samples(self) -> dict[tuple[str, str], float]:
        """Return its metrics by name and ``le``, summed over all other labels."""
        return samples(self.port)

    def _start(self, argv: list[str | Path], env: dict[str, str], ready: str) -> None:
        processes.start(self.process, argv, env={"KUBECONFIG": str(KUBECONFIG), **env})

        def is_up() -> bool:
            processes.require_running(self.process)
            return self._is_up(ready)

        wait_until(is_up, f"{self.title} is ready", seconds=START_SECONDS)

    def _is_up(self, ready: str) -> bool:
        return get(ready) is not None


class Fluxtrain(Contender):
    """This project's operator."""

    title = "fluxtrain"
    kind = "FluxTraining"
    reconcile_seconds = "fluxtrain_operator_reconcile_seconds_bucket"
    requests = "fluxtrain_operator_api_requests_total"

    def crds(self) -> list[Path]:
        """Return the CRD of this working tree."""
        return [FOLDER.parent / "manifests" / "crd.yaml"]

    def start(self) -> None:
        """Start it and wait until it is the leader."""
        self.port = free_port()
        argv = [sys.executable, "-m", "fluxtrain_operator", f"--image={IMAGE}"]
        argv += [f"--namespace={self.namespace}", f"--lease-namespace={self.namespace}"]
        argv += ["--address=127.0.0.1", f"--port={self.port}"]
        self._start([*argv], {}, f"http://127.0.0.1:{self.port}/readyz")

    def job(self, name: str, num_pods: int) -> Manifest:
        """Return a job of ``num_pods`` nodes."""
        return {
            "apiVersion": "fluxtrain.dev/v1alpha1",
            "kind": self.kind,
            "metadata": {"name": name},
            "spec": {
                "nodes": {"min": num_pods, "max": num_pods},
                "gpusPerNode": 1,
                "run": {"preset": "micro"},
                "scheduling": ON_FAKE_NODES,
            },
        }

    def is_training_pod(self, name: str) -> bool:
        """Return whether the pod is not the rendezvous pod of its job."""
        return not name.endswith("-rendezvous")

    def _is_up(self, ready: str) -> bool:
        return super()._is_up(ready) and self.samples().get(("fluxtrain_operator_leader", "")) == 1


class TrainingOperator(Contender):
    """Kubeflow's training-operator with its default flags; only its PyTorchJob controller."""

    title = "training-operator"
    kind = "PyTorchJob"
    reconcile_seconds = "controller_runtime_reconcile_time_seconds_bucket"
    requests = "rest_client_requests_total"

    def crds(self) -> list[Path]:
        """Return the CRD in its Go module."""
        crds = module_folder("training-operator", PEER_MODULE) / "manifests" / "base" / "crds"
        return [crds / "kubeflow.org_pytorchjobs.yaml"]

    def start(self) -> None:
        """Start it with a certificate for its webhook server, which is not called."""
        self._secret = MountedSecret(self.namespace, PEER_SECRET)
        self._secret.create()
        self.port, probes, webhook = free_ports(3)
        argv = [str(binaries.path("training-operator.v1")), f"--namespace={self.namespace}"]
        argv += ["--enable-scheme=pytorchjob", f"--metrics-bind-address=127.0.0.1:{self.port}"]
        argv += [f"--health-probe-bind-address=127.0.0.1:{probes}"]
        argv += [f"--webhook-server-port={webhook}"]
        ready = f"http://127.0.0.1:{probes}/readyz"
        environment = {"MY_POD_NAMESPACE": self.namespace}
        self._start([*self._secret.mounted(argv)], environment, ready)

    def stop(self) -> None:
        """Stop it and remove its files."""
        super().stop()
        if hasattr(self, "_secret"):
            self._secret.remove()

    def job(self, name: str, num_pods: int) -> Manifest:
        """Return a job of one master and ``num_pods`` - 1 workers, as in its examples."""
        gpu = {"limits": {"amd.com/gpu": "1"}}
        container = {"name": "pytorch", "image": IMAGE, "resources": gpu}
        pod = {"spec": {"containers": [container], **ON_FAKE_NODES}}
        role = {"restartPolicy": "OnFailure", "template": pod}
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": self.kind,
            "metadata": {"name": name},
            "spec": {
                "pytorchReplicaSpecs": {
                    "Master": {"replicas": 1, **role},
                    "Worker": {"replicas": num_pods - 1, **role},
                }
            },
        }

    def _is_up(self, ready: str) -> bool:
        self._secret.update()
        return super()._is_up(ready)


def module_folder(program: str, module: str) -> Path:
    """Return the source of the Go ``module`` from which ``go/PROGRAM`` is built."""
    folder = FOLDER / "go" / program
    return Path(run([binaries.go(), "list", "-m", "-f", "{{.Dir}}", module], folder=folder).strip())


def samples(port: int, token: str = "") -> dict[tuple[str, str], float]:
    """Return the metrics of the operator at ``port`` by name and ``le``, summed over all other labels.

    With a ``token`` over TLS, whose certificate is not verified: it is the program's own.
    """
    totals: dict[tuple[str, str], float] = {}
    for family in _scrape(port, token):
        for sample in family.samples:
            key = sample.name, sample.labels.get("le", "")
            totals[key] = totals.get(key, 0.0) + sample.value
    return totals


def _scrape(port: int, token: str) -> list[Metric]:
    scheme = "https" if token else "http"
    text = get(f"{scheme}://127.0.0.1:{port}/metrics", token)
    return [] if text is None else list(text_string_to_metric_families(text))


def get(url: str, token: str = "") -> str | None:
    """Return the response of ``url``, None on any error."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=10) as response:
            return str(response.read().decode())
    except (OSError, urllib.error.HTTPError):
        return None
