"""The lock files of both images: each package that is installed, its version and the hashes of its files."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from supply_chain.tool import installed

ROOT = Path(__file__).parents[1]
IMAGES = ("operator", "trainer")
EXTRAS = ("tensorboard", "wandb")
"""Optional packages of the trainer image."""
LOCKS = (*IMAGES, *EXTRAS)
UV = "uv==0.13.9"
_PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?:\s*;\s*(?P<marker>[^\\]*?))?\s*\\?$"
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_HEAD = """\
# Written by `make lock` from {image}-requirements.txt and constraints.txt: pip installs these files only.
"""


@dataclass(frozen=True)
class Package:
    """One pinned package."""

    name: str
    version: str
    marker: str
    """The platforms that need it; empty: all."""
    hashes: tuple[str, ...]
    """SHA-256 of the files that may be installed, one for each platform."""


def lock_path(image: str, root: Path = ROOT) -> Path:
    """Return the lock file of ``image`` in the sources ``root``."""
    return root / "images" / f"{image}-requirements.lock"


def read_lock(image: str, root: Path = ROOT) -> list[Package]:
    """Return the packages of ``image`` in the order of their names."""
    packages = list[Package]()
    hashes = list[str]()
    for line in reversed(lock_path(image, root).read_text().splitlines()):
        hashes += _HASH.findall(line)
        if pin := _PIN.match(line):
            found = tuple(sorted(hashes))
            packages.append(
                Package(pin["name"], pin["version"], (pin["marker"] or "").strip(), found)
            )
            hashes = []
    return packages[::-1]


def write_locks() -> None:
    """Resolve the requirements of all locks with uv, in the versions of constraints.txt."""
    uv = installed(UV) / "uv"
    for image in LOCKS:
        command = [
            *(uv, "pip", "compile", "--quiet", "--generate-hashes", "--universal"),
            *("--python-version", "3.11", "--no-annotate", "--no-header"),
            *("--constraint", "constraints.txt", f"images/{image}-requirements.txt"),
        ]
        text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        lock_path(image).write_text(_HEAD.format(image=image) + text)
