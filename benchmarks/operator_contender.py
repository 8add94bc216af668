"""The operators that are compared: how each is started, its jobs, and what it says of itself.

Both run on this machine, beside the cluster, with a kubeconfig, and look after one namespace.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import cluster.fake_nodes
from cluster import binaries, processes
from cluster.commands import run
from cluster.kubectl import Manifest, kubectl
from cluster.places import FOLDER, KUBECONFIG
from cluster.progress import wait_until
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.free_ports import free_port, free_ports

IMAGE = "example.org/trainer:1"  # never pulled: the nodes are fake
START_SECONDS = 60
PEER_MODULE = "github.com/kubeflow/training-operator"
PEER_CERTIFICATES = Path("/tmp/k8s-webhook-server")
"""Where the peer looks for its webhook's certificate; a constant in its source."""
PEER_SECRET = "training-operator-webhook-cert"

_ON_FAKE_NODES: Manifest = {
    "nodeSelector": {"type": "fake"},
    "tolerations": [{"key": cluster.fake_nodes.TAINT["key"], "operator": "Exists"}],
}


@dataclass
class Contender:
    """An operator as a process of this machine."""

    namespace: str
    port: int = 0

    title = ""
    kind = ""
    reconcile_seconds = ""
    """The metric with the buckets of its reconciles' durations."""
    requests = ""
    """The metric that counts its requests to the API server."""

    @property
    def process(self) -> str:
        """Return the name under which it runs."""
        return f"bench-{self.kind}"

    def crds(self) -> str:
        """Return the flag with which kubectl reads the definition of its resource."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it; return when it is ready for jobs."""
        raise NotImplementedError

    def job(self, name: str, num_pods: int) -> Manifest:
        """Return a job of ``num_pods`` training pods with a GPU each."""
        raise NotImplementedError

    def is_training_pod(self, name: str) -> bool:
        """Tell whether the pod ``name`` is one of those that were asked for."""
        return True

    def stop(self) -> None:
        """End it, if it runs."""
        processes.stop([self.process], patience=10)

    def samples(self) -> dict[tuple[str, str], float]:
        """Return its own metrics, by name and ``le``, summed over all other labels."""
        found: dict[tuple[str, str], float] = {}
        for family in _scrape(self.port):
            for sample in family.samples:
                key = sample.name, sample.labels.get("le", "")
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def _start(self, argv: list[str | Path], env: dict[str, str], ready: str) -> None:
        processes.start(self.process, argv, env={"KUBECONFIG": str(KUBECONFIG), **env})

        def answers() -> bool:
            processes.require_alive(self.process)
            return self._is_up(ready)

        wait_until(answers, f"{self.title} is ready", seconds=START_SECONDS)

    def _is_up(self, ready: str) -> bool:
        return _answer(ready) is not None


class Fluxtrain(Contender):
    """This project's operator."""

    title = "fluxtrain"
    kind = "FluxTraining"
    reconcile_seconds = "fluxtrain_operator_reconcile_seconds_bucket"
    requests = "fluxtrain_operator_api_requests_total"

    def crds(self) -> str:
        """Return the definition of this tree."""
        return f"--filename={FOLDER.parent / 'manifests' / 'crd.yaml'}"

    def start(self) -> None:
        """Start it; return when it leads."""
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
                "scheduling": _ON_FAKE_NODES,
            },
        }

    def is_training_pod(self, name: str) -> bool:
        """Tell it from the pod of the rendezvous, which each of our jobs has beside the others."""
        return not name.endswith("-rendezvous")

    def _is_up(self, ready: str) -> bool:
        return super()._is_up(ready) and self.samples().get(("fluxtrain_operator_leader", "")) == 1


class TrainingOperator(Contender):
    """Kubeflow's training-operator with its default flags; of its six controllers the one that is asked."""

    title = "training-operator"
    kind = "PyTorchJob"
    reconcile_seconds = "controller_runtime_reconcile_time_seconds_bucket"
    requests = "rest_client_requests_total"

    def crds(self) -> str:
        """Return the definition in the module that it is built from."""
        folder = FOLDER / "go" / "training-operator"
        found = run([binaries.go(), "list", "-m", "-f", "{{.Dir}}", PEER_MODULE], folder=folder)
        crds = Path(found.strip()) / "manifests" / "base" / "crds"
        return f"--filename={crds / 'kubeflow.org_pytorchjobs.yaml'}"

    def start(self) -> None:
        """Start it with the certificate that its webhook server wants, though nobody calls that one.

        It fills a secret that must be there, and waits until a kubelet mounts it: here this function
        writes the files, in a mount namespace of its own, since the folder is a constant.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="training-operator-"))
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": PEER_SECRET}}
        kubectl.apply(secret, namespace=self.namespace)
        PEER_CERTIFICATES.mkdir(exist_ok=True)
        self.port, probes, webhook = free_ports(3)
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        argv = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "sh"]
        argv += [str(self._folder), str(PEER_CERTIFICATES)]
        argv += [str(binaries.path("training-operator.v1")), f"--namespace={self.namespace}"]
        argv += ["--enable-scheme=pytorchjob", f"--metrics-bind-address=127.0.0.1:{self.port}"]
        argv += [f"--health-probe-bind-address=127.0.0.1:{probes}"]
        argv += [f"--webhook-server-port={webhook}"]
        ready = f"http://127.0.0.1:{probes}/readyz"
        self._start([*argv], {"MY_POD_NAMESPACE": self.namespace}, ready)

    def stop(self) -> None:
        """End it, and remove what it was given."""
        super().stop()
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)
        if PEER_CERTIFICATES.is_dir() and not any(PEER_CERTIFICATES.iterdir()):
            PEER_CERTIFICATES.rmdir()

    def job(self, name: str, num_pods: int) -> Manifest:
        """Return a job of one master and ``num_pods`` - 1 workers, as its examples are written."""
        gpu = {"limits": {"amd.com/gpu": "1"}}
        container = {"name": "pytorch", "image": IMAGE, "resources": gpu}
        pod = {"spec": {"containers": [container], **_ON_FAKE_NODES}}
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
        self._mount()
        return super()._is_up(ready)

    def _mount(self) -> None:
        """Do what a kubelet would: write the secret's data where it is looked for."""
        secret = kubectl.get("secret", PEER_SECRET, f"--namespace={self.namespace}")
        served = self._folder / "serving-certs"
        if "tls.crt" in secret.get("data", {}) and not served.exists():
            new = self._folder / "new"
            new.mkdir()
            for name, value in secret["data"].items():
                (new / name).write_bytes(base64.b64decode(value))
            new.rename(served)  # at once, as a kubelet does: it reads as soon as there is a file


def _scrape(port: int) -> list[Metric]:
    text = _answer(f"http://127.0.0.1:{port}/metrics")
    return [] if text is None else list(text_string_to_metric_families(text))


def _answer(url: str) -> str | None:
    """Return what ``url`` answers, None where it does not, or not with 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.HTTPError):
        return None
