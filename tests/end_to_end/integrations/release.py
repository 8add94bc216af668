"""A release in a registry, its images in all nodes, and Helm, which installs the chart with them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.commands import run
from cluster.kubectl import NO_PROXY
from cluster.layout import CACHE, nodes
from cluster.nodes import containerd, images, volumes
from cluster.programs import binaries
from tests.chart.release.registry import VERSION, push_chart, push_image
from tests.paths import ROOT

CHART = ROOT / "charts" / "fluxtrain-operator"
NEXT_TAG = "next"


@dataclass(frozen=True)
class Helm:
    """Helm with one kubeconfig and its own home folder."""

    kubeconfig: Path
    home: Path
    program: Path | None = None
    """That of the cluster unless given."""

    def __call__(self, *arguments: str | Path, seconds: float = 180) -> str:
        """Return what ``helm ARGUMENTS`` prints; ClusterError with its message if it fails."""
        homes = {f"HELM_{kind}_HOME": str(self.home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        env = {"KUBECONFIG": str(self.kubeconfig), "NO_PROXY": NO_PROXY, **homes}
        return run([self.program or binaries.path("helm"), *arguments], env=env, seconds=seconds)


def publish(registry: str, context: Path) -> None:
    """Push the chart and both images to ``registry``; pull the images into all nodes, the operator's twice.

    Nodes have no resolver of registries without TLS, so that containerd is told to pull.
    """
    push_chart(registry, context)
    _pip("wheel", "--no-deps", "--wheel-dir", context / "dist", ROOT)
    shutil.copytree(ROOT / "images", context / "images")
    shutil.copy(ROOT / ".dockerignore", context)
    # the test's base image has torch and the rest in a volume: pip keeps them, as in AMD's image
    mounted = {
        "operator": (f"{_operator_wheels()}:/wheels:ro", " --find-links=/wheels"),
        "trainer": (f"{sysconfig.get_path('purelib')}:{volumes.SITE_PACKAGES}:O", ""),
    }
    for what, (volume, wheels) in mounted.items():
        options = f"--volume={volume} --build-arg='PIP_OPTIONS=--no-index{wheels}'"
        push_image(what, registry, context, options)
        name = f"{registry}/fluxtrain/{what}:{VERSION}"
        for node in nodes():
            containerd.ctr(node, "images", "pull", "--plain-http", name)
    operator = f"{registry}/fluxtrain/operator"
    images.tag(f"{operator}:{VERSION}", f"{operator}:{NEXT_TAG}")


def _operator_wheels() -> Path:
    """Return a folder with the wheels of the operator's dependencies, cached, since builds are offline."""
    lock = ROOT / "images" / "operator-requirements.lock"
    key = hashlib.sha256(lock.read_bytes() + sys.version.encode())
    folder = CACHE / "wheels" / f"operator-{key.hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            requirements = ["--require-hashes", "--requirement", lock]
            _pip("download", "--only-binary=:all:", "--dest", f"{temporary}/wheels", *requirements)
            Path(temporary, "wheels").rename(folder)
    return folder


def _pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=True,
        capture_output=True,
        text=True,
    )
