"""A secret in a folder that a program's source names, for a program that runs outside a pod."""

from __future__ import annotations

import base64
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.kubectl import kubectl

FOLDER = Path("/tmp/k8s-webhook-server")
"""Where controller-runtime's programs look for the certificate of their webhooks, in `serving-certs`."""


@dataclass
class MountedSecret:
    """The secret ``name``, which the program fills with its certificate and then expects as files.

    A kubelet would mount it. Here ``update`` writes the files, and the program has a mount namespace of its
    own, since the folder is the same for all.
    """

    namespace: str
    name: str

    def create(self) -> None:
        """Create the secret without data, and the folder."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": self.name}}
        kubectl.apply(secret, namespace=self.namespace)
        FOLDER.mkdir(exist_ok=True)

    def mounted(self, argv: list[str]) -> list[str]:
        """Return the command that runs ``argv`` with the folder mounted."""
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        shell = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "sh"]
        return [*shell, str(self._folder), str(FOLDER), *argv]

    def update(self) -> None:
        """Write the secret's data to the folder once there is some."""
        secret = kubectl.get("secret", self.name, f"--namespace={self.namespace}")
        served = self._folder / "serving-certs"
        if "tls.crt" in secret.get("data", {}) and not served.exists():
            new = self._folder / "new"
            new.mkdir()
            for name, value in secret["data"].items():
                (new / name).write_bytes(base64.b64decode(value))
            new.rename(served)  # atomically, as a kubelet does

    def remove(self) -> None:
        """Remove the folders; the secret goes with its namespace."""
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)
        if FOLDER.is_dir() and not any(FOLDER.iterdir()):
            FOLDER.rmdir()
