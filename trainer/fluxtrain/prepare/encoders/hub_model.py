"""Files of a model on the Hugging Face Hub, at one commit, verified by the sizes and hashes that it tells.

The Hub's own client downloads and resumes; it reads ``HF_TOKEN``, ``HF_HOME`` and ``HF_ENDPOINT``.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from fluxtrain.errors import DataError
from fluxtrain.prepare.download.hub import hub_errors

_CHUNK = 1 << 20


@dataclass(frozen=True)
class HubFile:
    """A file of the model: its path, size in bytes, and either the SHA-256 or git's hash of its content."""

    path: str
    size: int | None
    sha256: str | None
    git_sha1: str | None

    def require_content(self, path: Path) -> None:
        """Raise DataError unless ``path`` has the size and hash that the Hub tells."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            raise DataError(f"{path}: {size} bytes, on the Hub {self.size}")
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(usedforsecurity=False)
        if not self.sha256:
            digest.update(f"blob {size}\0".encode())  # as git hashes files
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
        expected = self.sha256 or self.git_sha1
        if expected is not None and digest.hexdigest() != expected:
            raise DataError(f"{path}: its hash is {digest.hexdigest()}, on the Hub {expected}")


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub, at one commit."""

    name: str
    commit: str
    files: tuple[HubFile, ...]
    scratch: Path
    """Where downloads grow; they resume there."""

    def copy(self, folder: str, patterns: tuple[str, ...], target: Path) -> None:
        """Download the files directly in ``folder`` that match one of ``patterns`` to ``target``.

        Raises DownloadError or DataError.
        """
        from huggingface_hub import hf_hub_download

        for file in self.files:
            path = PurePosixPath(file.path)
            parent = "" if str(path.parent) == "." else str(path.parent)
            if parent != folder or not any(fnmatch(path.name, pattern) for pattern in patterns):
                continue
            with hub_errors(self.name):
                local = Path(
                    hf_hub_download(
                        self.name, file.path, revision=self.commit, local_dir=self.scratch
                    )
                )
            file.require_content(local)
            os.link(local, target / path.name)


def open_hub_model(name: str, revision: str, scratch: Path) -> HubModel:
    """Return the model ``ORG/NAME`` at the current commit of ``revision``; it is downloaded to ``scratch``.

    Raises DownloadError if the Hub cannot be reached, DataError if it has no such model for this token.
    """
    with hub_errors(name):
        from huggingface_hub import HfApi

        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    files = []
    for each in info.siblings or ():
        lfs = each.lfs
        sha256 = None if lfs is None else lfs.sha256
        files.append(HubFile(each.rfilename, each.size, sha256, each.blob_id))
    return HubModel(name, info.sha or revision, tuple(files), scratch)
