"""A client of the API server with one kept-alive connection, a hundred times faster than kubectl.

And calls of ``kubectl fluxtrain`` as kubectl starts it.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from cluster import kubectl
from cluster.errors import ClusterError
from cluster.kubectl import NO_PROXY, Manifest
from cluster.programs import binaries

STRICT = "fieldManager=tests&fieldValidation=Strict"
"""The parameters of ``kubectl --validate=strict``: unknown fields and duplicate keys are refused."""
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"


def make_job(name: str, spec: Manifest, **metadata: Any) -> Manifest:
    """Return a FluxTraining of the smallest run, and with ``spec``."""
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name, **metadata},
        "spec": {"run": {"preset": "micro"}, **spec},
    }


@dataclass(frozen=True)
class Response:
    """A response of the API server."""

    code: int
    body: Manifest

    @property
    def message(self) -> str:
        """Return the message of a refusal."""
        return str(self.body.get("message", ""))

    @property
    def fields(self) -> list[str]:
        """Return the field path of each cause of a refusal."""
        causes = self.body.get("details", {}).get("causes", [])
        return [str(cause.get("field")) for cause in causes]

    @property
    def accepted(self) -> bool:
        """Return whether the request succeeded, or would have without a dry run."""
        return self.code in (200, 201)


class ApiServer:
    """Sends requests with the credentials of a kubeconfig with embedded certificates."""

    def __init__(self, kubeconfig: Path) -> None:
        """Read a kubeconfig with a token, or with embedded certificates."""
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._headers = {"Accept": _JSON}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        server = urlsplit(cluster["server"])
        self._connection = http.client.HTTPSConnection(
            server.hostname or "", server.port, context=_tls(cluster, user), timeout=60
        )

    def create(self, path: str, manifest: Manifest, *, dry_run: bool = True) -> Response:
        return self._send("POST", f"{path}?{STRICT}{_dry_run(dry_run)}", manifest)

    def post(self, path: str, text: str) -> Response:
        """Create the object in the JSON ``text``; the response has no body if Python cannot parse it."""
        try:
            return self._send_text("POST", path, text, _JSON)
        except RecursionError:  # the object is nested too deep; only an accepted one is returned
            return Response(HTTPStatus.CREATED, {})

    def replace(self, path: str, manifest: Manifest, *, dry_run: bool = True) -> Response:
        return self._send("PUT", f"{path}?{STRICT}{_dry_run(dry_run)}", manifest)

    def apply(self, path: str, manifest: Manifest, *, dry_run: bool = True) -> Response:
        """Apply ``manifest`` to the object at ``path``, as the operator does."""
        return self._send(
            "PATCH", f"{path}?{STRICT}&force=true{_dry_run(dry_run)}", manifest, _APPLY
        )

    def merge(self, path: str, manifest: Manifest) -> Response:
        """Merge ``manifest`` into the object at ``path``, as ``kubectl patch --type=merge`` does."""
        return self._send("PATCH", path, manifest, "application/merge-patch+json")

    def delete(self, path: str) -> Response:
        return self._send("DELETE", path, {})

    def get(self, path: str) -> Response:
        """Return the object at ``path``."""
        return self._send("GET", path, None)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _send(self, verb: str, path: str, body: Manifest | None, kind: str = _JSON) -> Response:
        return self._send_text(verb, path, None if body is None else json.dumps(body), kind)

    def _send_text(self, verb: str, path: str, text: str | None, kind: str) -> Response:
        headers = {**self._headers, "Content-Type": kind}
        try:
            self._connection.request(verb, path, text, headers)
            response = self._connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):
            self._connection.close()  # it was idle for too long, or the server was restarted
            self._connection.request(verb, path, text, headers)
            response = self._connection.getresponse()
        return Response(response.status, json.loads(response.read()))


class Kubectl(kubectl.Kubectl):
    """kubectl whose `get` of common kinds is a request of `ApiServer`, for tests that poll."""

    @cached_property
    def server(self) -> ApiServer:
        """The client, with these credentials."""
        return ApiServer(self.kubeconfig)

    def get(self, *arguments: str) -> Manifest:
        """Return an object, or a list of objects; options are ``--namespace`` and ``--selector``."""
        kind, *names = (word for word in arguments if not word.startswith("-"))
        options = dict(word[2:].split("=", 1) for word in arguments if word.startswith("-"))
        group, plural = KINDS[kind.lower()]
        within = f"/namespaces/{options.pop('namespace')}" if "namespace" in options else ""
        query = {"labelSelector": options.pop("selector", "")}
        assert not options, f"{options}: not an option of this get"
        path = "/".join([f"/{group}{within}/{plural}", *names])
        response = self.server.get(path if names else f"{path}?{urlencode(query)}")
        if not response.accepted:
            raise ClusterError(response.message)
        return response.body


KINDS = {
    **dict.fromkeys(("ft", "fluxtraining"), ("apis/fluxtrain.dev/v1alpha1", "fluxtrainings")),
    **dict.fromkeys(("pod", "pods"), ("api/v1", "pods")),
    "configmap": ("api/v1", "configmaps"),
    "secret": ("api/v1", "secrets"),
    "service": ("api/v1", "services"),
    "nodes": ("api/v1", "nodes"),
    "pvc": ("api/v1", "persistentvolumeclaims"),
    "workload": ("apis/kueue.x-k8s.io/v1beta1", "workloads"),
    "lease": ("apis/coordination.k8s.io/v1", "leases"),
    "deployment": ("apis/apps/v1", "deployments"),
    "networkpolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "poddisruptionbudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "events.events.k8s.io": ("apis/events.k8s.io/v1", "events"),
}
"""API group and plural of each kind that `Kubectl.get` reads, by what tests call it."""


def _tls(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    """Return the TLS context; Python loads a client certificate from a file only."""
    if "certificate-authority" in cluster:
        return ssl.create_default_context(cafile=cluster["certificate-authority"])
    tls = ssl.create_default_context(cadata=_decoded(cluster["certificate-authority-data"]))
    with tempfile.NamedTemporaryFile("w") as pair:
        keys = ("client-certificate-data", "client-key-data")
        pair.write("".join(_decoded(user[key]) for key in keys))
        pair.flush()
        tls.load_cert_chain(pair.name)
    return tls


def _dry_run(dry_run: bool) -> str:
    return "&dryRun=All" if dry_run else ""


def _decoded(data: str) -> str:
    return base64.b64decode(data).decode()


PROGRAM = "import sys; from fluxtrain_operator.kubectl import run; sys.exit(run())"
PLUGIN = f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n'


class Plugin:
    """Calls ``kubectl fluxtrain`` with the kubeconfig of an API server."""

    def __init__(self, kubectl: Kubectl, folder: Path, namespace: str) -> None:
        self.kubectl, self.namespace, self._folder = kubectl, namespace, folder
        (folder / "kubectl").symlink_to(binaries.path("kubectl"))
        (folder / "kubectl-fluxtrain").write_text(PLUGIN)
        (folder / "kubectl-fluxtrain").chmod(0o755)

    def __call__(
        self, *arguments: str, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PATH": f"{self._folder}{os.pathsep}{os.environ['PATH']}",
            "KUBECONFIG": str(kubeconfig or self.kubectl.kubeconfig),
            "NO_PROXY": NO_PROXY + ",127.0.0.1",
        }
        command = ["kubectl", "fluxtrain", *arguments]
        return subprocess.run(
            [str(self._folder / command[0]), *command[1:]],
            env=env,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def said(self, *arguments: str) -> str:
        """Return the output of a command that succeeds."""
        done = self(*arguments, f"--namespace={self.namespace}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def error(self, *arguments: str, exit_code: int = 1, **options: Any) -> str:
        """Return the message of a command that fails with ``exit_code``, without a traceback."""
        done = self(*arguments, **options)
        assert done.returncode == exit_code, done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        return done.stderr
