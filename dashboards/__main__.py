"""``python -m dashboards`` writes the dashboards into the chart; ``--check`` only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dashboards.job_page import JOB
from dashboards.operator_page import OPERATOR

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "fluxtrain-operator"


def carried() -> dict[Path, str]:
    """Return the chart's generated files by their paths."""
    found = {}
    for dashboard in (JOB, OPERATOR):
        name = dashboard.uid.removeprefix("fluxtrain-")
        text = json.dumps(dashboard.to_json(), indent=1) + "\n"
        found[CHART / "files" / "dashboards" / f"{name}.json"] = text
    return found


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` name those that differ; 1 then."""
    stale = [
        path for path, text in carried().items() if not path.exists() or path.read_text() != text
    ]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is stale: run make chart")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(carried()[path])
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
