"""Compares the packages of both images with known advisories, by pip-audit; offline it says so."""

from __future__ import annotations

import json
import subprocess

from supply_chain.locks import LOCKS, lock_path
from supply_chain.tool import installed

_PIP_AUDIT = "pip-audit==2.10.1"
NOTHING = "nothing was compared"


def audit() -> int:
    """Print the advisories of both images; return 1 if there are any, 0 also without a connection."""
    try:
        python = installed(_PIP_AUDIT) / "python"
    except subprocess.CalledProcessError:
        print(f"audit: {_PIP_AUDIT} cannot be installed, or its index cannot be reached: {NOTHING}")
        return 0
    lines = list[str]()
    for image in LOCKS:
        command = [
            *(
                python,
                "-m",
                "pip_audit",
                "--requirement",
                lock_path(image),
                "--require-hashes",
                "--disable-pip",
            ),
            *("--format", "json", "--progress-spinner", "off"),
        ]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        found = advisories(run.stdout)
        if found is None:
            reason = (run.stderr.strip().splitlines() or ["no answer"])[-1][:200]
            print(f"audit of {lock_path(image).name}: {NOTHING} (pip-audit: {reason})")
            continue
        print(f"audit of {lock_path(image).name}: {coverage(run.stdout)}; {len(found)} advisories")
        lines += found
    print("\n".join(lines))
    return 1 if lines else 0


def coverage(text: str) -> str:
    """Return how many packages of pip-audit's JSON were compared: the service may not know some."""
    packages = json.loads(text)["dependencies"]
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    if len(unknown) == len(packages):
        return f"{NOTHING}, the service knows none of {len(packages)} packages"
    rest = f", the service does not know {', '.join(unknown)}" if unknown else ""
    return f"{len(packages) - len(unknown)} of {len(packages)} packages compared{rest}"


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
