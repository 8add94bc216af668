"""Requests to an API server through kubectl."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.commands import Arguments, run
from cluster.console import wait_until
from cluster.errors import ClusterError
from cluster.layout import BRIDGE_ADDRESS, KUBECONFIG
from cluster.programs import binaries

Manifest = dict[str, Any]

NO_PROXY = f"{os.environ.get('NO_PROXY', '')},{BRIDGE_ADDRESS}"
"""A proxy cannot reach our bridge, but may be needed for another cluster."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with one kubeconfig."""

    kubeconfig: Path = KUBECONFIG

    def __call__(self, *arguments: str, stdin: str | None = None, seconds: float = 60) -> str:
        """Return the output of ``kubectl ARGUMENTS``; ClusterError with its messages if it fails."""
        env = {"KUBECONFIG": str(self.kubeconfig), "NO_PROXY": NO_PROXY}
        argv: Arguments = [binaries.path("kubectl"), *arguments]
        return run(argv, stdin=stdin, env=env, seconds=seconds)

    def get(self, *arguments: str) -> Manifest:
        """Return an object, or a list of objects."""
        result: Manifest = json.loads(self("get", *arguments, "--output=json"))
        return result

    def apply(self, *manifests: Manifest, namespace: str = "default") -> None:
        """Create or change ``manifests``."""
        self._send("apply", manifests, namespace)

    def create(self, *manifests: Manifest, namespace: str = "default") -> None:
        """Create ``manifests``, including status if the kind allows it."""
        self._send("create", manifests, namespace)

    def is_ready(self, path: str = "/readyz") -> bool:
        """Return whether the API server responds at ``path``."""
        try:
            self("get", f"--raw={path}", "--request-timeout=3s", seconds=10)
        except ClusterError:
            return False
        return True

    def wait_for_crds(self) -> None:
        """Wait until all CRDs are served; ``kubectl wait`` fails if one has no conditions yet."""
        wait_until(self._crds_are_served, "all CRDs are served", seconds=60)

    def _crds_are_served(self) -> bool:
        crds = json.loads(self("get", "crd", "--output=json"))["items"]
        return all(
            any(
                (condition["type"], condition["status"]) == ("Established", "True")
                for condition in crd.get("status", {}).get("conditions") or ()
            )
            for crd in crds
        )

    def _send(self, verb: str, manifests: Sequence[Manifest], namespace: str) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self(verb, f"--namespace={namespace}", "--filename=-", stdin=text, seconds=300)


kubectl = Kubectl()
"""kubectl for the cluster of this clone."""
