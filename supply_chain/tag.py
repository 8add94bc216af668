"""Compare a tag with the version that the sources have: python -m supply_chain.tag TAG.

It needs the standard library alone, so a release of another version fails before anything is installed.
"""

from __future__ import annotations

import sys
import tomllib

from supply_chain.checksums import ReleaseError
from supply_chain.locks import ROOT


def check_tag(tag: str) -> None:
    """Raise ReleaseError unless ``tag`` is the version with a v."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if tag != f"v{version}":
        raise ReleaseError(
            f"the tag {tag!r} is not v{version}, the version of pyproject.toml: "
            f"tag this commit v{version}, or change the version and commit it first"
        )


if __name__ == "__main__":
    try:
        check_tag(*sys.argv[1:2] or [""])
    except ReleaseError as error:
        sys.exit(f"tag: {error}")
