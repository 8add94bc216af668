"""``fluxtrain``: the command line interface."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

from fluxtrain import __version__
from fluxtrain.cli.arguments import Parser
from fluxtrain.errors import EXIT_STOPPED, ConfigError, FluxtrainError


def main(arguments: list[str] | None = None) -> int:
    """Run the command in ``arguments`` (default: sys.argv) and return its exit code."""
    is_run = (sys.argv[1:] if arguments is None else arguments)[:1] == ["run"]
    # A run that is stopped before its launcher has a handler made no step. The kernel drops signals without a
    # handler for a container's first process.
    if os.getpid() == 1 or is_run:
        signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(EXIT_STOPPED))
    try:
        parsed, rest = _parser().parse_known_args(arguments)
        if rest and not parsed.takes_overrides:
            raise ConfigError("arguments", " ".join(rest), "no such option")
        parsed.overrides = rest
        return int(parsed.action(parsed))
    except FluxtrainError as error:
        print(f"fluxtrain: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    from fluxtrain.cli import data, import_config, mlperf, pods, prepare, run, sample, weights

    parser = Parser(
        prog="fluxtrain", allow_abbrev=False, description="Train FLUX.1 from one FluxTraining file."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(takes_overrides=False)
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # in the order of use; the commands that are run in pods come last
    user = (
        run.add,
        prepare.add,
        data.add_data,
        data.add_convert,
        run.add_plan,
        sample.add,
        weights.add_export,
        weights.add_import,
        import_config.add,
        weights.add,
        mlperf.add_mlperf,
    )
    for add in (*user, pods.add_agent, pods.add_rendezvous, pods.add_stacks):
        add(commands)
    return parser
