"""The software that this process runs: versions of packages, and fluxtrain's sources by their digest."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fluxtrain import __version__
from fluxtrain.contract.launch import ENV_REVISION

SOURCE = Path(__file__).parents[1]
"""The folder of fluxtrain's sources."""
_UNKNOWN = "unknown"
"""The revision of an image that was built without one."""
_GIT_SECONDS = 10.0
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLE = "KUBERNETES_SERVICE_HOST"


def software_facts() -> dict[str, str]:
    """Return the versions of Python and fluxtrain, commit and digest of its sources, if in a container."""
    in_container = _CONTAINER_VARIABLE in os.environ or any(map(os.path.exists, _CONTAINER_FILES))
    return {
        "python": platform.python_version(),
        "fluxtrain": __version__,
        "revision": revision(SOURCE, os.environ),
        "source_sha256": source_digest(SOURCE),
        "container": "yes" if in_container else "no",
    }


def source_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files of ``folder``, without compiled ones."""
    digest = hashlib.sha256()
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for path in sorted(path for path in paths if is_source(path)):
        content = (folder / path).read_bytes()
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def is_source(path: Path) -> bool:
    """Return whether the relative ``path`` is of a source file: neither compiled nor hidden."""
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return not hidden and path.suffix != ".pyc"


def revision(folder: Path, environ: Mapping[str, str]) -> str:
    """Return the commit of the sources: the image's, or that of the checkout; empty if nobody knows it.

    ``+changes`` follows if files of the checkout differ from the commit.
    """
    if (given := environ.get(ENV_REVISION, _UNKNOWN)) != _UNKNOWN:
        return given
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit or not _git(folder, "ls-files", "--", str(folder / "__init__.py")):
        return ""  # no checkout, or of another project that only contains the installed package
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--", ".") else commit


def _git(folder: Path, *arguments: str) -> str:
    """Return git's output, empty if it fails or is not installed."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
