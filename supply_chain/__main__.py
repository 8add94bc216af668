"""Run one of the commands: python -m supply_chain lock|sbom|audit [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from fluxtrain import __version__
from supply_chain.audit import audit
from supply_chain.locks import write_locks
from supply_chain.sbom import write


def main(command: str, folder: str = "dist") -> int:
    """Run ``command``; ``folder`` is where documents are written."""
    if command == "lock":
        write_locks()
    elif command == "sbom":
        for path in write(Path(folder), __version__):
            print(path)
    elif command == "audit":
        return audit()
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
