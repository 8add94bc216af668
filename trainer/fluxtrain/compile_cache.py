"""What torch.compile has made, kept in the output of a job: a pod that replaces another does not repeat it.

There is one file for each kind of machine and each GPU of a node, as code names its GPU. Its name has the
versions of all that the code depends on; torch looks entries up by its own source, the graph and its options
besides.

Torch unpickles entries. So a file is signed with the key of the job, and one without that signature is not
used. `fluxtrain run` has no such key, and torch's cache in the folder for temporary files.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fluxtrain.contract.launch import COMPILED_FOLDER, ENV_RENDEZVOUS_KEY
from fluxtrain.files import atomic_write_by_several

_SIGNATURE_BYTES = hashlib.sha256().digest_size
_MAX_BYTES = 1 << 30


class CompileCache:
    """The file of one rank's device."""

    def __init__(self, output: Path, device: torch.device, key: bytes) -> None:
        """Name the file in ``output``; nothing is read. ``key`` is the job's."""
        self.path = output / COMPILED_FOLDER / f"{_machine(device)}-{device.index or 0}.bin"
        self._key = key

    @staticmethod
    def of(
        output: Path, device: torch.device, environment: Mapping[str, str]
    ) -> CompileCache | None:
        """Return the file of a job in ``output``, None if ``environment`` names no key of a job."""
        if ENV_RENDEZVOUS_KEY not in environment:
            return None
        return CompileCache(output, device, Path(environment[ENV_RENDEZVOUS_KEY]).read_bytes())

    def load(self) -> bool:
        """Give the entries of the file to torch; return whether it has the signature of the job."""
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                content = file.read(_MAX_BYTES)
        except OSError:
            return False  # there is none yet
        signature, entries = content[:_SIGNATURE_BYTES], content[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(entries)):
            text = "not signed by this job, or damaged: not used"
            print(f"fluxtrain: {self.path}: {text}", file=sys.stderr, flush=True)
            return False
        return torch.compiler.load_cache_artifacts(entries) is not None

    def save(self) -> None:
        """Write what this process has compiled; nothing if the storage does not take it."""
        made = torch.compiler.save_cache_artifacts()
        if made is None or len(made[0]) > _MAX_BYTES - _SIGNATURE_BYTES:
            return
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            with atomic_write_by_several(self.path) as partial:
                partial.write_bytes(self._sign(made[0]) + made[0])

    def _sign(self, entries: bytes) -> bytes:
        return hmac.digest(self._key, self.path.name.encode() + entries, "sha256")


def _machine(device: torch.device) -> str:
    """Return a digest of the versions and the hardware that code depends on."""
    facts = [
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        torch.version.hip,
        _version("triton"),
        _version("fluxtrain"),
        platform.python_version(),
        *platform.libc_ver(),
        platform.machine(),
        device.type,
    ]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts += [properties.name, getattr(properties, "gcnArchName", None)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
