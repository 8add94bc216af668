"""SHA256SUMS: the digests of a release's files, as `sha256sum --check` reads them; its error."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path


class ReleaseError(Exception):
    """What is wrong with a release, in one line."""


NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)")


def sha256(path: Path) -> str:
    """Return the digest of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(files: list[Path]) -> Path:
    """Write the digests of ``files`` beside them."""
    path = files[0].parent / NAME
    path.write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))
    return path


def read(folder: Path) -> dict[str, str]:
    """Return the digest of each file that SHA256SUMS of ``folder`` names."""
    found = dict[str, str]()
    for number, line in enumerate((folder / NAME).read_text().splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ReleaseError(f"{NAME} line {number}: not a digest and the name of a file")
        found[match[2]] = match[1]
    return found
