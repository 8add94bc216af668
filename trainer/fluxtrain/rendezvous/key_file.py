"""The key of a run whose nodes share a file system: a file in its output that only its owner can read.

The rendezvous and the agents sign their messages with it. It is kept when the run ends: nodes that are left
understand a rendezvous that is started again.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path

from fluxtrain.errors import StorageError

KEY_FILE = ".rendezvous_key"
_POLL_SECONDS = 0.2
_BYTES = 32


def create_key(path: Path) -> bytes:
    """Return the key in ``path``, which is created if it does not exist; only one process may do so.

    Raises StorageError if that fails, or if another user could read it.
    """
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(_BYTES).encode())
            partial.replace(path)
        except OSError as error:
            raise StorageError(f"{path}: cannot be created ({error.strerror})") from None
    return _read(path)


def wait_for_key(path: Path, seconds: float) -> bytes:
    """Return the key in ``path``, once the node with the rendezvous has created it.

    Raises StorageError if there is none after ``seconds``, or if another user could read it.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            text = "the node with the rendezvous has not created it; is the folder the same on all nodes?"
            raise StorageError(f"{path}: absent for {seconds:g} s: {text}")
        time.sleep(_POLL_SECONDS)
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            state, key = os.fstat(descriptor), file.read(2 * _BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from None
    mode = stat.S_IMODE(state.st_mode)
    if state.st_uid != os.geteuid() or mode & 0o077:
        owner = "you" if state.st_uid == os.geteuid() else f"user {state.st_uid}"
        text = f"belongs to {owner} with mode {mode:04o}; must be yours with mode 0600: remove it"
        raise StorageError(f"{path}: {text}")
    if len(key) != 2 * _BYTES:
        raise StorageError(f"{path}: is no key of a rendezvous: remove it")
    return key
