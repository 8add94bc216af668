"""The images as `images/` says, built and loaded, and Helm, which installs the chart with them."""

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

from cluster import binaries, images, volumes
from cluster.commands import run
from cluster.kubectl import NO_PROXY
from cluster.places import CACHE
from tests.end_to_end.stage import ROOT

CHART = ROOT / "charts" / "fluxtrain-operator"
OPERATOR, TRAINER = "localhost/fluxtrain/operator", "localhost/fluxtrain/trainer"
TAG, NEXT_TAG = "helm", "helm-next"


@dataclass(frozen=True)
class Helm:
    """Helm with one kubeconfig and a home of its own."""

    kubeconfig: Path
    home: Path

    def __call__(self, *arguments: str | Path, seconds: float = 180) -> str:
        """Return what ``helm ARGUMENTS`` prints; ClusterError with its words where it fails."""
        homes = {f"HELM_{kind}_HOME": str(self.home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        env = {"KUBECONFIG": str(self.kubeconfig), "NO_PROXY": NO_PROXY, **homes}
        return run([binaries.path("helm"), *arguments], env=env, seconds=seconds)


def build_and_load(context: Path) -> None:
    """Build operator and trainer, the operator under two tags, and load them into all nodes."""
    _pip("wheel", "--no-deps", "--wheel-dir", context / "dist", ROOT)
    shutil.copytree(ROOT / "images", context / "images")
    for name in ("constraints.txt", ".dockerignore"):
        shutil.copy(ROOT / name, context)
    operator = {"PIP_OPTIONS": "--no-index --find-links=/wheels"}
    wheels = [f"{_operator_wheels()}:/wheels:ro"]
    # The test's base brings torch and the rest as a volume: what it has already is kept, as on AMD's.
    packages = [f"{sysconfig.get_path('purelib')}:{volumes.SITE_PACKAGES}:O"]
    archives = [
        _build("operator", f"{OPERATOR}:{TAG}", context, operator, wheels),
        _build(
            "operator", f"{OPERATOR}:{NEXT_TAG}", context, {**operator, "REVISION": "next"}, wheels
        ),
        _build("trainer", f"{TRAINER}:{TAG}", context, {"PIP_OPTIONS": "--no-index"}, packages),
    ]
    images.load(archives)


def _build(
    what: str, name: str, context: Path, arguments: dict[str, str], mounted: Sequence[str]
) -> Path:
    dockerfile = ROOT / "images" / f"{what}.Dockerfile"
    base = {"BASE": images.BASE_IMAGE}
    return images.build(name, dockerfile, context, {**base, **arguments}, mounted)


def _operator_wheels() -> Path:
    """Return a folder of wheels, all that the operator depends on; fetched once, as builds are offline."""
    listed, pinned = ROOT / "images" / "operator-requirements.txt", ROOT / "constraints.txt"
    key = hashlib.sha256(listed.read_bytes() + pinned.read_bytes() + sys.version.encode())
    folder = CACHE / "wheels" / f"operator-{key.hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            wanted = ["--requirement", listed, "--constraint", pinned]
            _pip("download", "--only-binary=:all:", "--dest", f"{made}/wheels", *wanted)
            Path(made, "wheels").rename(folder)
    return folder


def _pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=True,
        capture_output=True,
        text=True,
    )
