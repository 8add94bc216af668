"""The folder in memory for snapshots: created for a run on this machine, emptied when the launcher ends."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""


@contextmanager
def local_volume(output: Path, parent: Path = SHARED_MEMORY) -> Iterator[Path | None]:
    """Create the folder in ``parent`` for the run in ``output``, which is locked; remove it at the end.

    What a killed launcher left there is removed first. Yields None, after one line of text, if the folder
    cannot be created.
    """
    digest = hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]
    folder = parent / f"fluxtrain-{os.getuid()}-{digest}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)  # fails if another user has created it
    except OSError as error:
        text = f"no snapshots in memory: {folder} cannot be created ({error.strerror})"
        print(f"fluxtrain: {text}", file=sys.stderr)
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def emptied(volume: Path | None) -> Iterator[None]:
    """Remove the contents of ``volume``, the mount of a pod, at the end."""
    try:
        yield
    finally:
        for path in volume.iterdir() if volume is not None and volume.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)
