"""Talk to an API server through kubectl."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import binaries
from cluster.commands import Arguments, run
from cluster.errors import ClusterError
from cluster.places import BRIDGE_ADDRESS, KUBECONFIG

Manifest = dict[str, Any]

NO_PROXY = f"{os.environ.get('NO_PROXY', '')},{BRIDGE_ADDRESS}"
"""A machine's proxy has no way to our bridge, and may be needed for the person's own cluster."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with one kubeconfig."""

    kubeconfig: Path = KUBECONFIG

    def __call__(self, *arguments: str, stdin: str | None = None, seconds: float = 60) -> str:
        """Return what ``kubectl ARGUMENTS`` prints.

        Raises ClusterError with the API server's own words where it refuses.
        """
        env = {"KUBECONFIG": str(self.kubeconfig), "NO_PROXY": NO_PROXY}
        argv: Arguments = [binaries.path("kubectl"), *arguments]
        return run(argv, stdin=stdin, env=env, seconds=seconds)

    def get(self, *arguments: str) -> Manifest:
        """Return an object, or a list of objects."""
        found: Manifest = json.loads(self("get", *arguments, "--output=json"))
        return found

    def apply(self, *manifests: Manifest, namespace: str = "default") -> None:
        """Create or change ``manifests``."""
        self._send("apply", manifests, namespace)

    def create(self, *manifests: Manifest, namespace: str = "default") -> None:
        """Create ``manifests``, status included where the kind allows it."""
        self._send("create", manifests, namespace)

    def answers(self, path: str = "/readyz") -> bool:
        """Tell whether the API server answers at ``path``."""
        try:
            self("get", f"--raw={path}", "--request-timeout=3s", seconds=10)
        except ClusterError:
            return False
        return True

    def _send(self, verb: str, manifests: Sequence[Manifest], namespace: str) -> None:
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self(verb, f"--namespace={namespace}", "--filename=-", stdin=listed, seconds=300)


kubectl = Kubectl()
"""Talks to the cluster of this clone."""
