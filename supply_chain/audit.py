"""Compares the packages of both images with known advisories, by pip-audit; offline it says so."""

from __future__ import annotations

import json
import subprocess
import sys

from supply_chain.locks import LOCKS, lock_path
from supply_chain.tool import installed

_PIP_AUDIT = "pip-audit==2.10.1"
UNREACHABLE = "the advisory service cannot be reached: nothing was compared"


def audit() -> int:
    """Print the advisories of both images; return 1 if there are any, 0 also without a connection."""
    try:
        tool = installed(_PIP_AUDIT) / "pip-audit"
    except subprocess.CalledProcessError:
        print(f"audit: {_PIP_AUDIT} cannot be installed, or {UNREACHABLE}")
        return 0
    lines = list[str]()
    for image in LOCKS:
        command = [
            *(tool, "--requirement", lock_path(image), "--require-hashes", "--disable-pip"),
            *("--format", "json", "--progress-spinner", "off"),
        ]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        found = advisories(run.stdout)
        if found is None:
            print((run.stderr.strip().splitlines() or [""])[-1][:200], file=sys.stderr)
            print(f"audit of {lock_path(image).name}: {UNREACHABLE}")
            continue
        print(f"audit of {lock_path(image).name}: {len(found)} advisories")
        lines += found
    print("\n".join(lines))
    return 1 if lines else 0


def advisories(text: str) -> list[str] | None:
    """Return a line for each advisory in pip-audit's JSON, None if ``text`` is no answer."""
    try:
        packages = json.loads(text)["dependencies"]
        return [
            f"{package['name']} {package['version']}: {each['id']}, mended in "
            f"{', '.join(each['fix_versions']) or 'no version'}"
            for package in packages
            for each in package.get("vulns", [])
        ]
    except (ValueError, KeyError, TypeError):
        return None
