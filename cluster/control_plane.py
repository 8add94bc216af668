"""The control plane: etcd, API server, controllers, scheduler and DNS, as processes of the host."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

from cluster import processes
from cluster.access import kubeconfigs
from cluster.access.certificates import (
    ADMIN,
    AUTHORITY,
    CONTROLLER_MANAGER,
    DNS,
    SCHEDULER,
    SERVER,
    SERVICE_ACCOUNT_KEY,
    SERVICE_ACCOUNT_PUBLIC_KEY,
)
from cluster.console import wait_until
from cluster.host import mounts
from cluster.kubectl import kubectl
from cluster.layout import (
    API_PORT,
    BRIDGE_ADDRESS,
    BRIDGE_HOST,
    DOMAIN,
    KUBECONFIG,
    SERVICE_RANGE,
    STATE,
)
from cluster.programs.binaries import path

ETCD_URL = "http://127.0.0.1:23790"
ETCD_PEER_URL = "http://127.0.0.1:23800"
DNS_READY_URL = f"http://{BRIDGE_HOST}:8181/ready"

_GATES = "--feature-gates=GenericWorkload=true"
POD_GROUPS = (_GATES, "--runtime-config=scheduling.k8s.io/v1beta1=true")
"""Flags of an API server with Kubernetes' own pod groups, which are off by default in 1.37."""
START_SECONDS = 60


def start(node_grace_seconds: int) -> None:
    """Start all five and return when the API server is ready.

    Raises ClusterError with the end of the log of a program that exited.
    """
    kubeconfigs.write(KUBECONFIG, ADMIN)
    start_etcd()
    start_api_server()
    _wait("kube-apiserver", kubectl.is_ready)
    start_controller_manager(node_grace_seconds)
    start_scheduler()
    start_dns()


def wait_for_dns() -> None:
    """Wait until names resolve."""
    _wait("coredns", _dns_is_ready)


def start_etcd() -> None:
    """Start etcd without fsync: faster, but not safe against a crash of the machine.

    Its data outlive the process: a restart continues with them.
    """
    data = STATE / "etcd"
    if not mounts.mount_points(data):
        mounts.mount_tmpfs(data)
    flags = [
        f"--data-dir={data}",
        f"--listen-client-urls={ETCD_URL}",
        f"--advertise-client-urls={ETCD_URL}",
        f"--listen-peer-urls={ETCD_PEER_URL}",
        f"--initial-advertise-peer-urls={ETCD_PEER_URL}",
        f"--initial-cluster=default={ETCD_PEER_URL}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]
    processes.start("etcd", [path("etcd"), *flags])


def start_api_server() -> None:
    """Start the API server with the authorizers and admission plugins of a production cluster."""
    flags = [
        f"--etcd-servers={ETCD_URL}",
        f"--bind-address={BRIDGE_ADDRESS}",
        f"--advertise-address={BRIDGE_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={SERVER.certificate}",
        f"--tls-private-key-file={SERVER.key}",
        f"--client-ca-file={AUTHORITY.certificate}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        f"--service-account-key-file={SERVICE_ACCOUNT_PUBLIC_KEY}",
        f"--service-account-signing-key-file={SERVICE_ACCOUNT_KEY}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        # for logs and exec: node names do not resolve
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-certificate-authority={AUTHORITY.certificate}",
        f"--kubelet-client-certificate={ADMIN.certificate}",
        f"--kubelet-client-key={ADMIN.key}",
        # aggregated APIs are not used, but the controllers require these flags
        f"--requestheader-client-ca-file={AUTHORITY.certificate}",
        "--requestheader-allowed-names=front-proxy",
        *POD_GROUPS,
    ]
    processes.start("kube-apiserver", [path("kube-apiserver"), *flags])


def start_controller_manager(node_grace_seconds: int) -> None:
    """Start the controllers; pod ranges are static, see layout.py."""
    config = kubeconfigs.write(STATE / "controller-manager.kubeconfig", CONTROLLER_MANAGER)
    flags = [
        _GATES,
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        f"--node-monitor-grace-period={node_grace_seconds}s",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={SERVICE_ACCOUNT_KEY}",
        f"--root-ca-file={AUTHORITY.certificate}",
        f"--cluster-signing-cert-file={AUTHORITY.certificate}",
        f"--cluster-signing-key-file={AUTHORITY.key}",
    ]
    processes.start("kube-controller-manager", [path("kube-controller-manager"), *flags])


def start_scheduler() -> None:
    """Start the scheduler, with a client rate limit for hundreds of fake nodes."""
    config = kubeconfigs.write(STATE / "scheduler.kubeconfig", SCHEDULER)
    settings = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(config), "qps": 1000, "burst": 2000},
        "leaderElection": {"leaderElect": False},
    }
    flags = [
        _GATES,
        f"--config={_write('scheduler.json', json.dumps(settings, indent=2))}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
    ]
    processes.start("kube-scheduler", [path("kube-scheduler"), *flags])


def start_dns() -> None:
    """Start CoreDNS on the bridge, for the cluster's names only."""
    config = kubeconfigs.write(STATE / "dns.kubeconfig", DNS)
    kubectl.apply(*_dns_role())
    lines = [
        ". {",
        f"    bind {BRIDGE_ADDRESS}",
        "    errors",
        f"    ready {BRIDGE_HOST}:8181",
        f"    kubernetes {DOMAIN} in-addr.arpa ip6.arpa {{",
        f"        kubeconfig {config}",
        "        ttl 1",
        "    }",
        "}",
    ]
    file = _write("Corefile", "\n".join(lines) + "\n")
    processes.start("coredns", [path("coredns"), "-conf", file])


def _dns_role() -> list[dict[str, object]]:
    """Return the role of the DNS: read services, endpoints and namespaces."""
    group = "rbac.authorization.k8s.io"
    listing = ["list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": listing},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": listing},
    ]
    header = {"apiVersion": f"{group}/v1", "metadata": {"name": "coredns"}}
    return [
        {**header, "kind": "ClusterRole", "rules": rules},
        {
            **header,
            "kind": "ClusterRoleBinding",
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "coredns"},
            "subjects": [{"apiGroup": group, "kind": "User", "name": DNS.common_name}],
        },
    ]


def _dns_is_ready() -> bool:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(DNS_READY_URL, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _wait(name: str, is_ready: Callable[[], bool]) -> None:
    def ready() -> bool:
        processes.require_running(name)
        return is_ready()

    wait_until(ready, f"{name} is ready", seconds=START_SECONDS)


def _write(name: str, text: str) -> Path:
    file = STATE / name
    file.write_text(text)
    return file
