"""The images of this checkout in the nodes of the running cluster, and a small job that they can train.

Images are built as for a registry, on the base image with Python. That has no torch: the job mounts the
packages of this environment, which both Pythons' equal minor versions allow.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import yaml

from cluster.console import timed
from cluster.errors import ClusterError, MachineError
from cluster.kubectl import Kubectl, Manifest
from cluster.layout import CACHE, FOLDER, KUBECONFIG, STATE
from cluster.nodes import images, volumes

ROOT = FOLDER.parent
PACKAGES = "packages"
"""The claim of the packages, in the namespace default."""
_REPOSITORY = "docker.io/fluxtrain"
"""That of the chart's default images."""


def load(kubectl: Kubectl) -> Path:
    """Build and load both images, and create the claim; return the file of a job.

    Raises MachineError if ``kubectl`` reaches another cluster, ClusterError if a build fails.
    """
    if kubectl.kubeconfig != KUBECONFIG:
        raise MachineError(
            f"{kubectl.kubeconfig} is another cluster: push the images (docs/cluster.md)"
        )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory() as temporary:
        context = Path(temporary)
        write_context(context)
        archives = []
        for what, (volume, options) in mounted().items():
            with timed(f"built the {what} image"):
                name = f"{_REPOSITORY}/{what}:{version}"
                arguments = {
                    "BASE": images.BASE_IMAGE,
                    "VERSION": version,
                    "PIP_OPTIONS": options,
                }
                file = context / "images" / f"{what}.Dockerfile"
                archives.append(images.build(name, file, context, arguments, [volume]))
        with timed("loaded both"):
            images.load(archives)
    kubectl.apply(*volumes.site_packages(PACKAGES, "default"), namespace="default")
    file = STATE / "job.yaml"
    file.write_text(yaml.safe_dump(job("small"), sort_keys=False))
    return file


def job(name: str) -> Manifest:
    """Return a job of one node, or two, that trains a small model on synthetic data."""
    mount = {"name": PACKAGES, "mountPath": volumes.SITE_PACKAGES, "readOnly": True}
    claim = {"name": PACKAGES, "persistentVolumeClaim": {"claimName": PACKAGES}}
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodes": {"min": 1, "max": 2},
            "run": {"preset": "micro", "schedule": {"steps": 10_000}},
            "podTemplate": {
                "spec": {
                    "volumes": [claim],
                    "containers": [{"name": "trainer", "volumeMounts": [mount]}],
                }
            },
        },
    }


def write_context(folder: Path) -> None:
    """Write what the Dockerfiles copy: the wheel, and the images' lock files."""
    _pip("wheel", "--no-deps", "--wheel-dir", folder / "dist", ROOT)
    shutil.copytree(ROOT / "images", folder / "images")
    shutil.copy(ROOT / ".dockerignore", folder)


def mounted() -> dict[str, tuple[str, str]]:
    """Return, for each image, what its build mounts, and pip's options: builds are offline.

    pip keeps the trainer's packages, torch included, as in AMD's image.
    """
    return {
        "operator": (f"{_operator_wheels()}:/wheels:ro", "--no-index --find-links=/wheels"),
        "trainer": (
            f"{sysconfig.get_path('purelib')}:{volumes.SITE_PACKAGES}:O",
            "--no-index",
        ),
    }


def _operator_wheels() -> Path:
    """Return a folder with the wheels of the operator's dependencies, cached."""
    lock = ROOT / "images" / "operator-requirements.lock"
    key = hashlib.sha256(lock.read_bytes() + sys.version.encode())
    folder = CACHE / "wheels" / f"operator-{key.hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            to = "--only-binary=:all:", "--dest", f"{temporary}/wheels"
            _pip("download", *to, "--require-hashes", "--requirement", lock)
            Path(temporary, "wheels").rename(folder)
    return folder


def _pip(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ClusterError(f"pip {arguments[0]}: {done.stderr}")
