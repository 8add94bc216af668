"""A separate API server, for tests that would disturb others, such as those that own the CRD."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster.commands import run
from cluster.console import wait_until
from cluster.control_plane import POD_GROUPS
from cluster.free_ports import free_ports
from cluster.programs import binaries
from cluster.programs.packages import program
from tests.api_server.client import Kubectl
from tests.paths import ROOT

START_SECONDS = 120


@contextmanager
def api_server(folder: Path) -> Iterator[Kubectl]:
    """Yield kubectl for an empty API server with our CRD."""
    with empty_api_server(folder) as kubectl:
        kubectl("apply", "--server-side", f"--filename={ROOT / 'manifests' / 'crd.yaml'}")
        kubectl.wait_for_crds()
        yield kubectl


@contextmanager
def empty_api_server(folder: Path) -> Iterator[Kubectl]:
    """Yield kubectl for an API server with etcd, without nodes and controllers: no pod runs."""
    store, peer, port = free_ports(3)
    urls = {"client": f"http://127.0.0.1:{store}", "peer": f"http://127.0.0.1:{peer}"}
    token = secrets.token_hex(16)
    private, public = token_keys(folder)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    etcd = [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={urls['client']}",
        f"--advertise-client-urls={urls['client']}",
        f"--listen-peer-urls={urls['peer']}",
        f"--initial-advertise-peer-urls={urls['peer']}",
        f"--initial-cluster=default={urls['peer']}",
        "--unsafe-no-fsync",
    ]
    api_server = [
        f"--etcd-servers={urls['client']}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder}",  # for its self-signed certificate
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--endpoint-reconciler-type=none",  # required on loopback
        "--service-cluster-ip-range=10.95.0.0/16",
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={public}",
        f"--service-account-signing-key-file={private}",
        *POD_GROUPS,
    ]
    with ExitStack() as stack:
        stack.enter_context(running("etcd", etcd, folder))
        stack.enter_context(running("kube-apiserver", api_server, folder))
        kubectl = Kubectl(kubeconfig(folder, port, token))
        wait_until(kubectl.is_ready, "the API server is ready", seconds=START_SECONDS)
        stack.callback(kubectl.server.close)
        yield kubectl


def token_keys(folder: Path) -> tuple[Path, Path]:
    """Create the key pair of service-account tokens; return the private and the public key."""
    private, public = folder / "tokens.key", folder / "tokens.pub"
    run([program("openssl"), "genpkey", "-algorithm", "RSA", "-out", private])
    run([program("openssl"), "pkey", "-in", private, "-pubout", "-out", public])
    return private, public


@contextmanager
def running(program: str, flags: list[str], folder: Path) -> Iterator[None]:
    """Run a program of the cluster; its log is in ``folder``."""
    with (folder / f"{program}.log").open("wb") as log:
        process = subprocess.Popen([binaries.path(program), *flags], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def kubeconfig(folder: Path, port: int, token: str) -> Path:
    """Write a kubeconfig for the API server."""
    authority = str(folder / "apiserver.crt")
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": authority}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "empty", "cluster": server}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "empty", "context": {"cluster": "empty", "user": "admin"}}],
        "current-context": "empty",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path
