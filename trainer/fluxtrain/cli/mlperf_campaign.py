"""``fluxtrain mlperf campaign FILE``: print or apply the runs of a result; ``status`` reports on them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import yaml

from fluxtrain.cli.arguments import Commands, described, path
from fluxtrain.cli.mlperf_package import add_ruleset
from fluxtrain.cli.parser import whole_number
from fluxtrain.errors import EXIT_OK, ConfigError

_STATUS = Path("status")


def add(subcommands: Commands) -> None:
    """Add the command's parser to ``fluxtrain mlperf``."""
    text = "ten runs from one file, and how far they are"
    parser = subcommands.add_parser("campaign", help=text, description=described(__doc__))
    text = "a FluxTraining, as YAML; or the word status"
    parser.add_argument("file", type=path, metavar="FILE|status", help=text)
    text = "with status: logs, output folders of runs, or folders of these"
    parser.add_argument("paths", type=path, nargs="*", metavar="PATH", help=text)
    text = "runs (default: 10); of more, the consecutive ten with the median score are the result"
    parser.add_argument("--runs", type=whole_number, default=10, help=text)
    text = "runs that train at a time (default: 1: each starts after the one before)"
    parser.add_argument("--parallel", type=whole_number, default=1, help=text)
    text = "apply the FluxTrainings with kubectl instead of printing them"
    parser.add_argument("--apply", action="store_true", help=text)
    text = "with status: the FluxTrainings with these labels, such as campaign=NAME (needs kubectl)"
    parser.add_argument("--selector", help=text)
    parser.add_argument("--namespace", help="namespace of the FluxTrainings (default: kubectl's)")
    add_ruleset(parser)
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace) -> int:
    """Print or apply the campaign's jobs, or print its status; return 0."""
    if arguments.file == _STATUS:
        return _status(arguments)
    if arguments.paths or arguments.selector is not None:
        raise ConfigError(
            "arguments", str(arguments.file), "give one FILE, or the word status first"
        )
    from fluxtrain.contract.resource.document import load_job, parse_yaml, read_text
    from fluxtrain.mlperf.campaign.jobs import LABEL, campaign_jobs

    load_job(arguments.file)
    file = parse_yaml(read_text(arguments.file), str(arguments.file))
    jobs = campaign_jobs(file, arguments.runs, arguments.parallel)
    if not arguments.apply:
        yaml.safe_dump_all(jobs, sys.stdout, sort_keys=False)
        return EXIT_OK
    from fluxtrain.mlperf.kubectl import kubectl

    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs})
    print(kubectl(arguments.namespace, "apply", "--filename=-", stdin=manifest), end="")
    label = f"{LABEL}={file['metadata']['name']}"
    namespace = arguments.namespace or file["metadata"].get("namespace")
    option = f" --namespace {namespace}" if namespace else ""
    print(f"fluxtrain mlperf campaign status --selector {label}{option}")
    return EXIT_OK


def _status(arguments: argparse.Namespace) -> int:
    from fluxtrain.mlperf.campaign.observed_runs import runs_in, runs_of_jobs
    from fluxtrain.mlperf.campaign.report import report
    from fluxtrain.mlperf.compliance import require_ruleset

    require_ruleset(arguments.ruleset)
    if bool(arguments.paths) == (arguments.selector is not None):
        raise ConfigError("PATH ...", len(arguments.paths), "give either paths or --selector")
    if arguments.selector is None:
        print(report(runs_in(arguments.paths), arguments.ruleset))
        return EXIT_OK
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_of_jobs(arguments.selector, arguments.namespace, Path(folder))
        print(report(runs, arguments.ruleset))
    return EXIT_OK
