"""Kubeflow's Trainer and the JobSet controller that it needs, as processes of this machine."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.operator.contender import (
    IMAGE,
    ON_FAKE_NODES,
    START_SECONDS,
    Contender,
    get,
    module_folder,
    samples,
)
from benchmarks.operator.mounted_secret import MountedSecret
from cluster import processes
from cluster.access.certificates import AUTHORITY, Identity, issue
from cluster.console import wait_until
from cluster.free_ports import free_ports
from cluster.kubectl import Manifest, kubectl
from cluster.layout import KUBECONFIG
from cluster.programs import binaries

TRAINER_MODULE = "github.com/kubeflow/trainer/v2"
JOBSET_MODULE = "sigs.k8s.io/jobset"
SECRET = "kubeflow-trainer-webhook-cert"
TRAINER_NAMESPACE = "kubeflow-system"
"""Where Trainer looks for its secret outside a pod; a constant in its source."""
RUNTIME = "bench"
METRICS_READER = "bench-metrics-reader"
JOBSET = "bench-jobset"


class KubeflowTrainer(Contender):
    """Kubeflow Trainer with its default flags, and JobSet with its defaulting webhook."""

    title = "Trainer"
    kind = "TrainJob"
    reconcile_seconds = "controller_runtime_reconcile_time_seconds_bucket"
    requests = "rest_client_requests_total"

    @property
    def process_names(self) -> tuple[str, ...]:
        """Return the names of both processes."""
        return (self.process, JOBSET)

    def crds(self) -> list[Path]:
        """Return the CRDs in the two Go modules."""
        trainer = module_folder("trainer", TRAINER_MODULE) / "manifests" / "base" / "crds"
        jobset = module_folder("jobset", JOBSET_MODULE) / "config" / "components" / "crd" / "bases"
        return [
            *sorted(trainer.glob("trainer.kubeflow.org_*.yaml")),
            *sorted(jobset.glob("*.yaml")),
        ]

    def start(self) -> None:
        """Start both and wait until they are ready."""
        self._folder = Path(tempfile.mkdtemp(prefix="jobset-"))
        self._secret = MountedSecret(TRAINER_NAMESPACE, SECRET)
        self._token = _metrics_token(self.namespace)
        self._start_jobset()
        kubectl.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TRAINER_NAMESPACE}}
        )
        self._secret.create()
        self.port, probes, webhook = free_ports(3)
        argv = [str(binaries.path("trainer-controller-manager")), "--metrics-secure=false"]
        argv += [f"--metrics-bind-address=127.0.0.1:{self.port}"]
        argv += [f"--health-probe-bind-address=127.0.0.1:{probes}"]
        argv += [f"--webhook-server-port={webhook}"]
        self._start([*self._secret.mounted(argv)], {}, f"http://127.0.0.1:{probes}/readyz")
        kubectl.apply(_runtime(), namespace=self.namespace)

    def stop(self) -> None:
        """Stop both and remove what they needed."""
        super().stop()
        if not hasattr(self, "_folder"):
            return
        self._free_runtime()
        self._secret.remove()
        shutil.rmtree(self._folder, ignore_errors=True)
        for kind, name in (
            ("mutatingwebhookconfiguration", JOBSET),
            ("clusterrolebinding", METRICS_READER),
            ("clusterrole", METRICS_READER),
            ("namespace", TRAINER_NAMESPACE),
        ):
            kubectl("delete", kind, name, "--ignore-not-found", "--timeout=60s", seconds=70)

    def _free_runtime(self) -> None:
        """Remove the finalizer of the runtime, for which nobody runs any more: its namespace would stay."""
        where = ("trainingruntime", RUNTIME, f"--namespace={self.namespace}")
        if kubectl("get", *where, "--ignore-not-found", "--output=name"):
            kubectl("patch", *where, "--type=merge", '--patch={"metadata":{"finalizers":null}}')

    def job(self, name: str, num_pods: int) -> Manifest:
        """Return a job of ``num_pods`` nodes."""
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": self.kind,
            "metadata": {"name": name},
            "spec": {
                "runtimeRef": {"kind": "TrainingRuntime", "name": RUNTIME},
                "trainer": {
                    "image": IMAGE,
                    "numNodes": num_pods,
                    "resourcesPerNode": {"limits": {"amd.com/gpu": "1"}},
                },
            },
        }

    def samples(self) -> dict[tuple[str, str], float]:
        """Return the metrics of both processes, added up."""
        totals = super().samples()
        for key, value in samples(self._jobset_port, self._token).items():
            totals[key] = totals.get(key, 0.0) + value
        return totals

    def _is_up(self, ready: str) -> bool:
        self._secret.update()
        return super()._is_up(ready)

    def _start_jobset(self) -> None:
        """Start JobSet with a certificate of the cluster's authority, as cert-manager would give it."""
        identity = Identity("bench-jobset", "jobset", hosts=("IP:127.0.0.1",))
        issue(identity)
        shutil.copyfile(identity.certificate, self._folder / "tls.crt")
        shutil.copyfile(identity.key, self._folder / "tls.key")
        self._jobset_port, probes, webhook = free_ports(3)
        config = self._folder / "config.json"
        config.write_text(json.dumps(_jobset_config(self._folder, webhook)))
        argv = [str(binaries.path("jobset")), f"--config={config}"]
        argv += [f"--metrics-bind-address=127.0.0.1:{self._jobset_port}"]
        argv += [f"--health-probe-bind-address=127.0.0.1:{probes}"]
        processes.start(JOBSET, argv, env={"KUBECONFIG": str(KUBECONFIG)})

        def is_up() -> bool:
            processes.require_running(JOBSET)
            return get(f"http://127.0.0.1:{probes}/readyz") is not None

        wait_until(is_up, "JobSet is ready", seconds=START_SECONDS)
        kubectl.apply(_defaulting_webhook(webhook))


def _jobset_config(folder: Path, webhook_port: int) -> Manifest:
    return {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"port": webhook_port, "host": "127.0.0.1", "certDir": str(folder)},
    }


def _defaulting_webhook(port: int) -> Manifest:
    """Return the registration of JobSet's webhook that sets the defaults of each JobSet."""
    rule = {
        "apiGroups": ["jobset.x-k8s.io"],
        "apiVersions": ["v1alpha2"],
        "operations": ["CREATE"],
        "resources": ["jobsets"],
    }
    webhook = {
        "name": "mjobset.kb.io",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {
            "url": f"https://127.0.0.1:{port}/mutate-jobset-x-k8s-io-v1alpha2-jobset",
            "caBundle": base64.b64encode(AUTHORITY.certificate.read_bytes()).decode(),
        },
        "failurePolicy": "Fail",
        "rules": [rule],
        "sideEffects": "None",
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": JOBSET},
        "webhooks": [webhook],
    }


def _runtime() -> Manifest:
    """Return the runtime of the jobs, as Trainer's `torch-distributed`, on fake nodes."""
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = {"containers": [{"name": "node", "image": IMAGE}], **ON_FAKE_NODES}
    node = {
        "name": "node",
        "template": {"metadata": {"labels": label}, "spec": {"template": {"spec": pod}}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": RUNTIME},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": "auto"}},
            "template": {"spec": {"replicatedJobs": [node]}},
        },
    }


def _metrics_token(namespace: str) -> str:
    """Return a token with which JobSet's metrics may be read."""
    rbac = "rbac.authorization.k8s.io"
    named = {"metadata": {"name": METRICS_READER}}
    kubectl.apply(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            **named,
            "rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            **named,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": METRICS_READER},
            "subjects": [
                {"kind": "ServiceAccount", "name": METRICS_READER, "namespace": namespace}
            ],
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", **named},
        namespace=namespace,
    )
    create = ("create", "token", METRICS_READER, f"--namespace={namespace}", "--duration=2h")
    return kubectl(*create).strip()
