"""The supply chain's commands: python -m supply_chain COMMAND [ARGUMENT…].

lock                    write the images' locks
sbom [FOLDER]           write the lists of packages
audit                   compare the packages with known advisories
release [FOLDER]        write the files of a release; BUILDER and SOURCE of the environment are URIs
sign FOLDER KEY         sign them by a private key in a PEM file
verify FOLDER KEY       check them by the public key
reproduce               build the operator image twice; exit code 1 if the digests differ
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fluxtrain import __version__
from supply_chain.audit import audit
from supply_chain.checksums import ReleaseError
from supply_chain.locks import ROOT, write_locks
from supply_chain.release import build_of, sign_release, verify_release, write_release
from supply_chain.reproduce import reproduce
from supply_chain.sbom import BASES, write


def main(command: str = "", folder: str = "dist", key: str = "") -> int:
    """Run ``command``; ``folder`` is where documents are written."""
    if command == "lock":
        write_locks()
    elif command == "sbom":
        print(*write(Path(folder), __version__), BASES, sep="\n")
    elif command == "audit":
        return audit()
    elif command == "release":
        build = build_of(ROOT, os.environ.get("BUILDER", ""), os.environ.get("SOURCE", ""))
        print(*write_release(ROOT, Path(folder), __version__, build), sep="\n")
    elif command == "reproduce":
        return reproduce(build_of(ROOT), __version__)
    elif command == "sign" and key:
        print(*sign_release(Path(folder), Path(key)), sep="\n")
    elif command == "verify" and key:
        print(*verify_release(Path(folder), Path(key)), sep="\n")
    elif command in ("sign", "verify"):
        raise ReleaseError("name a key: make sign KEY=FILE, make verify PUBLIC_KEY=FILE")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except ReleaseError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
