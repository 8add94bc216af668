"""``fluxtrain mlperf review PATH ...``: the rules of the benchmark that MLCommons' tools do not check."""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import Commands, described, path
from fluxtrain.cli.mlperf_package import add_ruleset
from fluxtrain.errors import EXIT_ERROR, EXIT_OK


def add(subcommands: Commands) -> None:
    """Add the command's parser to ``fluxtrain mlperf``."""
    text = "review logs, runs or a package by the rules' text"
    review = subcommands.add_parser("review", help=text, description=described(__doc__))
    text = "log, output folder of a run, or folder of a package; several runs are one result"
    review.add_argument("paths", type=path, nargs="+", metavar="PATH", help=text)
    add_ruleset(review)
    review.set_defaults(action=action)


def action(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 only if there are none."""
    from fluxtrain.mlperf.compliance import require_ruleset
    from fluxtrain.mlperf.explain import counted
    from fluxtrain.mlperf.review import RULES, read_results, render, review, split

    require_ruleset(arguments.ruleset)
    results = read_results(arguments.paths, arguments.ruleset)
    findings, waived = split(review(results), results)
    logs = counted(sum(len(result.runs) for result in results), "log")
    if findings:
        print(f"FAILED: {counted(len(findings), 'finding')} in {logs}")
        print(render(findings))
    else:
        print(f"PASSED: {len(RULES)} rules, {logs}, ruleset {arguments.ruleset}")
    if waived:
        print(f"waived by the submitter: {counted(len(waived), 'finding')}")
        print(render(waived))
    return EXIT_ERROR if findings else EXIT_OK
