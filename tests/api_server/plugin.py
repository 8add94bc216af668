"""Calls of ``kubectl fluxtrain`` as kubectl starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster import binaries
from cluster.kubectl import NO_PROXY
from tests.api_server.client import Kubectl

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
