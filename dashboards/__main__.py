"""``python -m dashboards`` writes dashboards and README into the chart, ``… draw`` draws one as a PNG."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from dashboards.chart_readme import CHART, readme
from dashboards.job_page import JOB
from dashboards.operator_page import OPERATOR

ROOT = Path(__file__).resolve().parents[1]
_POINTS = 400


def generated() -> dict[Path, str]:
    """Return the chart's generated files by their paths."""
    files = {CHART / "README.md": readme()}
    for dashboard in (JOB, OPERATOR):
        name = dashboard.uid.removeprefix("fluxtrain-")
        text = json.dumps(dashboard.to_json(), indent=1) + "\n"
        files[CHART / "files" / "dashboards" / f"{name}.json"] = text
    return files


def write(check: bool) -> int:
    """Write the files; with ``check`` only print those that differ and return 1."""
    stale = [
        path for path, text in generated().items() if not path.exists() or path.read_text() != text
    ]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run make chart")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(generated()[path])
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and check else 0


def draw_job(arguments: argparse.Namespace) -> int:
    """Draw the job dashboard of the last minutes."""
    from dashboards.draw import (
        Span,
        draw,  # a second of imports, not needed to write the files
    )

    now, seconds = time.time(), 60 * arguments.minutes
    span = Span(now - seconds, now, max(1.0, seconds / _POINTS))
    values = {
        "$namespace": arguments.namespace,
        "$job": arguments.job,
        "$__range": f"{int(seconds)}s",
        "$__rate_interval": arguments.rate_interval,
    }
    titles = arguments.panels.split(",") if arguments.panels else ()
    if unknown := set(titles) - {panel.title for panel in JOB.panels}:
        sys.exit(f"--panels: {', '.join(sorted(unknown))}: no panel of the job dashboard")
    for title in draw(JOB, arguments.prometheus, values, span, arguments.output, titles):
        print(f"no data: {title}")
    print(f"wrote {arguments.output}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("draw", help="the job dashboard as a PNG")
    command.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its URL")
    command.add_argument("--namespace", default="default")
    command.add_argument("--job", required=True)
    command.add_argument("--minutes", type=float, default=60.0, help="until now")
    command.add_argument("--rate-interval", default="1m", help="four times the scrape interval")
    command.add_argument("--panels", default="", help="titles of some, such as Loss,Nodes")
    command.add_argument("--output", type=Path, default=Path("dashboard_job.png"))
    options = parser.parse_args(arguments)
    return draw_job(options) if options.command else write(options.check)


if __name__ == "__main__":
    sys.exit(main())
