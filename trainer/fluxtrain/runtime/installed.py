"""The packages that are installed for this interpreter; as a program, a comparison with a list of them.

Needs the standard library only, because it runs before anything is installed:
``python3 installed.py requirements.txt`` ends with 1, and names what differs, unless all are there.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_METADATA = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[A-Za-z0-9.!+_]+)\.(?:dist|egg)-info")
_MAX_SHOWN = 5


def packages() -> dict[str, str]:
    """Return the version of each installed package by its name, as pip normalises it.

    Only the names of metadata folders are read, which takes milliseconds.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        if folder and os.path.isdir(folder):
            for name in sorted(os.listdir(folder)):
                if match := _METADATA.fullmatch(name):
                    found.setdefault(normalised(match["name"]), match["version"])
    return dict(sorted(found.items()))


def normalised(name: str) -> str:
    """Return the ``name`` of a package as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(listed: str, installed: dict[str, str]) -> list[str]:
    """Return a line for each ``NAME==VERSION`` of the lines ``listed`` that is not ``installed``."""
    found = []
    for line in listed.splitlines():
        name, _, version = line.partition("==")
        if version and installed.get(normalised(name)) != version:
            found.append(f"{name}: needs {version}, has {installed.get(normalised(name), 'none')}")
    return found


def main(path: str) -> int:
    """Print how the installed packages differ from the list at ``path``; return 1 if they do."""
    found = differences(Path(path).read_text(encoding="utf-8"), packages())
    for text in found[:_MAX_SHOWN]:
        print(text)
    if len(found) > _MAX_SHOWN:
        print(f"... and {len(found) - _MAX_SHOWN} more")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
