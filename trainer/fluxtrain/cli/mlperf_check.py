"""``fluxtrain mlperf check LOG``: MLCommons' compliance checker, explained, and the rules beyond it."""

from __future__ import annotations

import argparse

from fluxtrain.cli import mlperf_campaign as campaign
from fluxtrain.cli import mlperf_package as package
from fluxtrain.cli import mlperf_review as review
from fluxtrain.cli import mlperf_verify as verify
from fluxtrain.cli.arguments import Commands, described, path
from fluxtrain.errors import EXIT_ERROR, EXIT_OK


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "check an MLPerf log or create a submission"
    parser = commands.add_parser("mlperf", allow_abbrev=False, help=text)
    subcommands = parser.add_subparsers(dest="mlperf_command", required=True, metavar="COMMAND")
    text = "run MLCommons' compliance checker on a log"
    check = subcommands.add_parser("check", help=text, description=described(__doc__))
    check.add_argument("log", type=path, metavar="LOG", help="mlperf.log of a run")
    package.add_ruleset(check)
    check.set_defaults(action=action)
    review.add(subcommands)
    verify.add(subcommands)
    campaign.add(subcommands)
    package.add(subcommands)


def action(arguments: argparse.Namespace) -> int:
    """Print both results; return 0 only if the checker reports SUCCESS and no rule finds anything."""
    from fluxtrain.mlperf import check, render
    from fluxtrain.mlperf import review as rules
    from fluxtrain.mlperf.explain import counted

    result = check(arguments.log, arguments.ruleset)
    print(render(result))
    ((run,),) = (each.runs for each in rules.read_results([arguments.log]))
    findings = list(rules.rule_findings(run))
    if findings:
        print(f"review: {counted(len(findings), 'finding')}")
        print(rules.render(findings))
    return EXIT_OK if result.success and not findings else EXIT_ERROR
