"""Container images without a registry: pause, a base with Python, and what buildah builds on it."""

from __future__ import annotations

import hashlib
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cluster.commands import Arguments, run
from cluster.console import timed
from cluster.layout import CACHE, FOLDER, STATE, Node, nodes
from cluster.nodes import containerd, oci
from cluster.nodes.containerd import PAUSE_IMAGE
from cluster.nodes.volumes import SITE_PACKAGES
from cluster.programs.packages import program, search_path

BASE_IMAGE = "localhost/fluxtrain/python:1"
"""Debian's Python and the system libraries of torch's wheels; without torch (see volumes.py)."""

BASE_PACKAGES = ("python3", "python3-pip", "ca-certificates")
USER_ID = 1000

BUILD_ENV = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
"""Environment variables of buildah."""

EXCLUDED = (
    *("dev/*", "proc/*", "sys/*", "var/cache/*", "var/lib/apt/lists/*", "var/log/*"),
    *(f"usr/share/{name}/*" for name in ("doc", "info", "locale", "man")),
)

PAUSE = oci.Image(PAUSE_IMAGE, command=("/pause",))
BASE = oci.Image(
    BASE_IMAGE,
    command=("/usr/bin/python3",),
    user=str(USER_ID),
    env=("PATH=/usr/local/bin:/usr/bin:/bin", f"PYTHONPATH={SITE_PACKAGES}", "HOME=/tmp"),
)


def ensure() -> list[Path]:
    """Return the archives of pause and base; build them if they are not cached."""
    return [pause(), base()]


def pause() -> Path:
    """Return the archive of the image that holds a pod's network: one static program."""
    source = FOLDER / "pause.c"
    archive = _archive("pause", source.read_text())
    if not archive.exists():
        with timed("built the pause image"), _temporary_folder() as folder:
            (folder / "root").mkdir()
            flags: Arguments = ["-static", "-Os", "-s", "-o", folder / "root" / "pause"]
            run([program("gcc"), *flags, source])
            _pack(PAUSE, folder, archive)
    return archive


def base() -> Path:
    """Return the archive of the image with Python."""
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
    archive = _archive("base", suite, *BASE_PACKAGES, *EXCLUDED, *BASE.env)
    if not archive.exists():
        with timed("built the base image"), _temporary_folder() as folder:
            include = f"--include={','.join(BASE_PACKAGES)}"
            argv = [program("debootstrap"), "--variant=minbase", include, suite]
            run([*argv, folder / "root"], env={"PATH": search_path()}, seconds=600)
            with (folder / "root/etc/passwd").open("a") as users:
                users.write(f"trainer:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n")
            _pack(BASE, folder, archive)
    return archive


def build(
    name: str,
    dockerfile: Path,
    context: Path,
    arguments: Mapping[str, str],
    volumes: Sequence[str] = (),
) -> Path:
    """Build ``dockerfile`` on the base image with buildah; return the archive of the image ``name``.

    ``name`` is the full image name, such as localhost/fluxtrain/operator:test; ``volumes``, as
    ``folder:path:O``, are mounted during the build. Layers are cached. Raises ClusterError with buildah's
    messages if it fails.
    """
    archive = STATE / "images" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    pull_base()
    options = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    options += [f"--volume={volume}" for volume in volumes]
    argv = ["build", "--quiet", "--layers", "--tag", name, "--file", str(dockerfile), *options]
    _buildah(*argv, str(context))
    # not an OCI archive: buildah would compress it, and every node decompress it
    _buildah("push", "--quiet", name, f"docker-archive:{archive}:{name}")
    return archive


def pull_base() -> None:
    """Have the base image in the store of `buildah`."""
    _buildah("pull", "--quiet", f"oci-archive:{base()}")


def load(archives: list[Path]) -> None:
    """Import images into every node of the running cluster."""

    def load_into(node: Node) -> None:
        for archive in archives:  # in sequence: imports are serialised by a lock
            containerd.import_image(node, archive)

    with ThreadPoolExecutor() as pool:
        list(pool.map(load_into, nodes()))


def tag(name: str, other: str) -> None:
    """Give the loaded image ``name`` the name ``other`` too, in every node."""
    for node in nodes():
        containerd.ctr(node, "images", "tag", "--force", name, other)


def buildah() -> list[str]:
    """Return the command of buildah with its store in the cache; it needs `BUILD_ENV`."""
    store = [f"--root={CACHE / 'buildah'}", f"--runroot={STATE / 'buildah'}"]
    return [program("buildah"), *store]


def _buildah(*arguments: str) -> str:
    return run([*buildah(), *arguments], env=BUILD_ENV, seconds=900)


def _archive(name: str, *inputs: str) -> Path:
    key = hashlib.sha256("\0".join((platform.machine(), *inputs)).encode()).hexdigest()
    return CACHE / "images" / f"{name}-{key[:16]}.tar"


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder on the cache's disk."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        yield Path(folder)


def _pack(image: oci.Image, folder: Path, archive: Path) -> None:
    """Write the image of ``folder/root``."""
    layer = folder / "layer.tar"
    excluded = [f"--exclude=./{pattern}" for pattern in EXCLUDED]
    reproducible = ["--numeric-owner", "--sort=name", "--mtime=@0"]
    argv = ["tar", "--create", f"--file={layer}", f"--directory={folder / 'root'}"]
    run([*argv, *reproducible, *excluded, "."], seconds=300)
    archive.parent.mkdir(parents=True, exist_ok=True)
    oci.write_archive(image, layer, archive)
