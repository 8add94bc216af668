"""The images of `images/`, built and loaded, and Helm, which installs the chart with them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.commands import run
from cluster.kubectl import NO_PROXY
from cluster.layout import CACHE
from cluster.nodes import images, volumes
from cluster.programs import binaries
from tests.paths import ROOT

CHART = ROOT / "charts" / "fluxtrain-operator"
OPERATOR, TRAINER = "localhost/fluxtrain/operator", "localhost/fluxtrain/trainer"
TAG, NEXT_TAG = "helm", "helm-next"


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


def build_and_load(context: Path) -> None:
    """Build operator and trainer and load them into all nodes, the operator under two tags."""
    _pip("wheel", "--no-deps", "--wheel-dir", context / "dist", ROOT)
    shutil.copytree(ROOT / "images", context / "images")
    shutil.copy(ROOT / ".dockerignore", context)
    operator = {"PIP_OPTIONS": "--no-index --find-links=/wheels"}
    wheels = [f"{_operator_wheels()}:/wheels:ro"]
    # the test's base image has torch and the rest in a volume: pip keeps them, as in AMD's image
    packages = [f"{sysconfig.get_path('purelib')}:{volumes.SITE_PACKAGES}:O"]
    archives = [
        _build("operator", f"{OPERATOR}:{TAG}", context, operator, wheels),
        _build("trainer", f"{TRAINER}:{TAG}", context, {"PIP_OPTIONS": "--no-index"}, packages),
    ]
    images.load(archives)
    images.tag(f"{OPERATOR}:{TAG}", f"{OPERATOR}:{NEXT_TAG}")


def _build(
    what: str, name: str, context: Path, arguments: dict[str, str], mounted: Sequence[str]
) -> Path:
    dockerfile = ROOT / "images" / f"{what}.Dockerfile"
    base = {"BASE": images.BASE_IMAGE}
    return images.build(name, dockerfile, context, {**base, **arguments}, mounted)


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
