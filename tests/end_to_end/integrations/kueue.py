"""A real Kueue outside the cluster, for the pods of one namespace, and its queues with one quota each."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from cluster.access.certificates import AUTHORITY, SERVER
from cluster.commands import run
from cluster.errors import ClusterError
from cluster.free_ports import free_ports
from cluster.kubectl import NO_PROXY, Manifest
from cluster.layout import BRIDGE_ADDRESS, FOLDER
from cluster.programs import binaries
from tests.api_server.client import Kubectl
from tests.end_to_end.stage import wait_for

GROUP = "kueue.x-k8s.io"
GATES = [f"{GROUP}/admission", f"{GROUP}/topology"]
"""Of each pod: Kueue removes the second one with the first if it assigns no topology."""
FINALIZER = f"{GROUP}/managed"
RESOURCE = "amd.com/gpu"
_MODULE = "sigs.k8s.io/kueue"
_OWN_NAMESPACE = "kueue-system"
_OVERLAY = 'mount -t overlay kueue -o "lowerdir=$1:/etc" /etc && shift && exec "$@"'
"""Runs a program with a folder's files in its /etc, where Kueue wants the certificate of its metrics."""
_WEBHOOKS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")


class Kueue:
    """Kueue as a process of this machine, with its resources and webhooks in the cluster."""

    def __init__(self, kubectl: Kubectl, namespace: str, folder: Path) -> None:
        """Manage pods of ``namespace`` only; files are in ``folder``."""
        self.kubectl, self.namespace, self._folder = kubectl, namespace, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = dict(zip(("health", "webhook"), free_ports(2), strict=True))
        self._sources = self._programs = Path()

    def prepare(self) -> None:
        """Build Kueue; ClusterError if that fails."""
        self._programs = binaries.build("kueue")
        self._sources = _module_folder() / "config" / "components"

    def start(self) -> None:
        """Install its CRDs, start it, and install its webhooks."""
        self._folder.mkdir()
        self.kubectl("apply", "--server-side", f"--filename={self._crds}")
        self.kubectl.wait_for_crds()
        self.kubectl.apply(_object("v1", "Namespace", _OWN_NAMESPACE))
        self._start(self._programs / "kueue")
        self.kubectl.apply(*self._webhooks())

    def stop(self) -> None:
        """Stop it and remove everything that `start` created."""
        names = [f"{kind}/{_webhook_name(kind)}".lower() for kind in _WEBHOOKS]
        self.kubectl("delete", "--ignore-not-found", *names)
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)
        self.kubectl("delete", "--ignore-not-found", f"--filename={self._crds}")
        self.kubectl("delete", "--ignore-not-found", "namespace", _OWN_NAMESPACE)

    def create_queue(self, name: str, gpus: int, topology: str = "") -> None:
        """Create a queue with a quota of ``gpus``, where a higher priority preempts.

        ``topology`` is the label of racks, in which it assigns nodes.
        """
        quota = {"name": name, "resources": [{"name": RESOURCE, "nominalQuota": gpus}]}
        resources = [{"coveredResources": [RESOURCE], "flavors": [quota]}]
        preempting = {"withinClusterQueue": "LowerPriority"}
        shared = {
            "namespaceSelector": {},
            "resourceGroups": resources,
            "preemption": preempting,
        }
        version = f"{GROUP}/v1beta2"
        levels = [{"nodeLabel": label} for label in (topology, "kubernetes.io/hostname")]
        nodes = {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": name}
        if topology:
            self.kubectl.apply(_object(version, "Topology", name, spec={"levels": levels}))
        self.kubectl.apply(
            _object(version, "ResourceFlavor", name, spec=nodes if topology else {}),
            _object(version, "ClusterQueue", name, spec=shared),
            _object(version, "LocalQueue", name, spec={"clusterQueue": name}),
            namespace=self.namespace,
        )

    def remove_queue(self, name: str) -> None:
        for kind in ("localqueue", "clusterqueue", "resourceflavor", "topology"):
            self.kubectl(
                *("delete", f"{kind}.{GROUP}", name, "--ignore-not-found"),
                *(f"--namespace={self.namespace}", "--timeout=30s"),
            )

    def remove_workloads(self) -> None:
        """Delete the workloads of the namespace, so that Kueue releases its pods."""
        kind = f"workloads.{GROUP}"
        self.kubectl("delete", kind, "--all", f"--namespace={self.namespace}", "--timeout=30s")

    def set_policy(self, name: str, policy: str) -> None:
        """Set a queue's stop policy: ``None``, ``Hold`` or ``HoldAndDrain``."""
        patch = json.dumps({"spec": {"stopPolicy": policy}})
        self.kubectl("patch", f"clusterqueue.{GROUP}", name, "--type=merge", f"--patch={patch}")

    def log(self) -> str:
        return (self._folder / "kueue.log").read_text()[-4000:]

    @property
    def _crds(self) -> Path:
        return self._sources / "crd" / "bases"

    def _start(self, program: Path) -> None:
        certificates = self._folder / "etc" / "kueue" / "metrics" / "certs"
        certificates.mkdir(parents=True)
        shutil.copy(SERVER.certificate, certificates / "tls.crt")
        shutil.copy(SERVER.key, certificates / "tls.key")
        config = self._folder / "kueue.json"
        config.write_text(json.dumps(self._configuration(certificates)))
        env = {"KUBECONFIG": str(self.kubectl.kubeconfig), "NO_PROXY": f"{NO_PROXY},127.0.0.1"}
        with (self._folder / "kueue.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "sh", "-c", _OVERLAY, "sh", self._folder / "etc"),
                    *(program, f"--config={config}", "--zap-log-level=3"),
                    "--feature-gates=VisibilityOnDemand=false,MultiKueue=false",
                ],
                env=env,
                stdout=log,
                stderr=log,
            )
        wait_for(self._is_ready, self.log, seconds=60)

    def _configuration(self, certificates: Path) -> Manifest:
        webhook = {"host": BRIDGE_ADDRESS, "port": self._ports["webhook"]}
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": _OWN_NAMESPACE,
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._ports['health']}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {**webhook, "certDir": str(certificates)},
            "internalCertManagement": {"enable": False},
            "leaderElection": {"leaderElect": False},
            "integrations": {"frameworks": ["pod"]},
            "managedJobsNamespaceSelector": _only(self.namespace),
        }

    def _webhooks(self) -> list[Manifest]:
        """Return its webhooks for its own kinds and for pods, at this machine's address."""
        text = (self._sources / "webhook" / "manifests.yaml").read_text()
        return [self._webhook(manifest) for manifest in yaml.safe_load_all(text)]

    def _webhook(self, configuration: Manifest) -> Manifest:
        hooks = []
        for hook in configuration["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            if not path.endswith("--v1-pod") and "-kueue-x-k8s-io-" not in path:
                continue
            url = f"https://{BRIDGE_ADDRESS}:{self._ports['webhook']}{path}"
            bundle = base64.b64encode(AUTHORITY.certificate.read_bytes()).decode()
            hook["clientConfig"] = {"url": url, "caBundle": bundle}
            if path.endswith("--v1-pod"):
                hook["namespaceSelector"] = _only(self.namespace)
            hooks.append(hook)
        name = _webhook_name(configuration["kind"])
        return {**configuration, "metadata": {"name": name}, "webhooks": hooks}

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ClusterError(f"kueue has exited:\n{self.log()}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._ports['health']}/readyz", timeout=5):
                return True
        except OSError:
            return False


def _module_folder() -> Path:
    """Return the folder of its Go module, which contains its CRDs."""
    argv = [binaries.go(), "list", "-m", "-f", "{{.Dir}}", _MODULE]
    env = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    return Path(run(argv, env=env, folder=FOLDER / "go" / "kueue", seconds=600).strip())


def _only(namespace: str) -> Manifest:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def _webhook_name(kind: str) -> str:
    return "kueue-" + kind.removesuffix("WebhookConfiguration").lower()


def _object(version: str, kind: str, name: str, **fields: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}
