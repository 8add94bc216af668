"""All commands of ``fluxtrain``: their parser, and the call of the one that is asked for."""

from __future__ import annotations

import argparse
from typing import Any

from fluxtrain import __version__
from fluxtrain.cli import data, import_config, mlperf, pods, prepare, run, sample, weights
from fluxtrain.cli.arguments import Parser
from fluxtrain.errors import ConfigError


def run_command(arguments: list[str] | None) -> int:
    """Run the command in ``arguments`` (default: sys.argv) and return its exit code."""
    parsed, rest = make_parser().parse_known_args(arguments)
    if rest and not parsed.takes_overrides:
        raise ConfigError("arguments", " ".join(rest), "no such option")
    parsed.overrides = rest
    return int(parsed.action(parsed))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="fluxtrain", allow_abbrev=False, description="Train FLUX.1 from one FluxTraining file."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(takes_overrides=False)
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # in the order of use; the commands that are run in pods come last
    user = (
        run.add_init,
        run.add,
        prepare.add_fetch,
        prepare.add,
        data.add_data,
        data.add_convert,
        run.add_plan,
        sample.add,
        sample.add_gallery,
        weights.add_export,
        weights.add_import,
        import_config.add,
        import_config.add_from_env,
        weights.add,
        weights.add_push,
        mlperf.add_mlperf,
    )
    for add in (*user, pods.add_fetch_models, pods.add_agent, pods.add_rendezvous, pods.add_stacks):
        add(commands)
    return parser
