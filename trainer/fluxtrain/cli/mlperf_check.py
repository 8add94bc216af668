"""``fluxtrain mlperf check LOG``: ask MLCommons' compliance checker, and explain its answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxtrain.cli import mlperf_package as package
from fluxtrain.cli.arguments import require_no_more
from fluxtrain.errors import EXIT_ERROR, EXIT_OK


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "mlperf", allow_abbrev=False, help="check an MLPerf log, make a submission"
    )
    below = parser.add_subparsers(dest="mlperf_command", required=True, metavar="COMMAND")
    check = below.add_parser(
        "check", help="run MLCommons' compliance checker on a log", description=__doc__
    )
    check.add_argument("log", type=Path, metavar="LOG")
    check.add_argument("--ruleset", default="6.1.0", help="5.1.0, 6.0.0 or 6.1.0 (default: 6.1.0)")
    check.set_defaults(action=action)
    package.add(below)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Print the checker's verdict; 0 only where it says SUCCESS."""
    from fluxtrain.mlperf import check, render

    require_no_more(rest)
    verdict = check(arguments.log, arguments.ruleset)
    print(render(verdict))
    return EXIT_OK if verdict.success else EXIT_ERROR
