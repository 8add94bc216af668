"""Empty packages in the place of those of a peer whose own imports would need its whole program."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType


def empty_package(name: str, packages: Path) -> ModuleType:
    """Return package ``name`` without its own code; modules below it are found in the folder ``packages``."""
    package = ModuleType(name)
    package.__path__ = [str(packages / name.replace(".", "/"))]
    return package
