"""Builds the operator's image twice, in two stores, and compares the digests.

The base is the one of the tests' cluster, made by debootstrap: no registry is needed. Debian, as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from supply_chain.locks import ROOT, lock_path
from supply_chain.release import Build, write_release

_STORE = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}


def reproduce(build: Build, version: str) -> int:
    """Print the digests of two builds of the operator's image; return 1 if they differ."""
    from cluster.nodes import images
    from cluster.programs import packages  # needs Debian's programs

    packages.ensure()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        _download(folder / "wheels")
        write_release(ROOT, folder / "release", version, build)
        digests = set[str]()
        for name, umask in (("a", 0o022), ("another/place", 0o077)):
            previous = os.umask(umask)
            context = folder / name / "context"
            shutil.copytree(folder / "release", context / "dist")
            shutil.copytree(ROOT / "images", context / "images", copy_function=shutil.copyfile)
            os.umask(previous)
            digest = _digest(folder, context, images.base(), build)
            print(f"build {len(digests) + 1}: {digest}", flush=True)
            digests.add(digest)
    return 0 if len(digests) == 1 else 1


def _digest(folder: Path, context: Path, base: Path, build: Build) -> str:
    """Build the image of ``context`` in a new store; return the digest of its manifest."""
    store = context.parent / "store"
    buildah = ["buildah", f"--root={store}", f"--runroot={store}-run"]

    def run(*arguments: str | Path) -> None:
        command = [*buildah, *map(str, arguments)]
        subprocess.run(command, env={**os.environ, **_STORE}, check=True, stdout=subprocess.DEVNULL)

    run("pull", "--quiet", f"oci-archive:{base}")
    run(
        *("build", "--quiet", "--no-cache", f"--timestamp={build.seconds}", "--tag=operator"),
        *("--build-arg=BASE=localhost/fluxtrain/python:1", f"--build-arg=REVISION={build.commit}"),
        *("--build-arg=PIP_OPTIONS=--no-index --find-links=/wheels",),
        *(f"--volume={folder / 'wheels'}:/wheels:ro",),
        *("--file", context / "images" / "operator.Dockerfile", context),
    )
    digest = context.parent / "digest"
    run("push", "--quiet", f"--digestfile={digest}", "operator", f"oci:{context.parent / 'image'}")
    run("rmi", "--all", "--force")
    return digest.read_text()


def _download(wheels: Path) -> None:
    """Fetch the files of the lock: the builds are offline."""
    command = [
        *(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"),
        *("--only-binary=:all:", "--require-hashes", "--requirement", str(lock_path("operator"))),
        *("--dest", str(wheels)),
    ]
    subprocess.run(command, check=True)
