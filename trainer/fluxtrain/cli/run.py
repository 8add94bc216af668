"""``fluxtrain run FILE``: train on this machine, or go on where the same command stopped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fluxtrain.cli.files import add_file, add_places, configured
from fluxtrain.contract.launch import Places
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "run", allow_abbrev=False, help="train from a FluxTraining file", description=__doc__
    )
    add_file(parser)
    add_places(parser)
    parser.add_argument("--output", type=Path, help="folder of the run (default: runs/NAME)")
    parser.add_argument(
        "--processes", type=int, help="trainer processes (default: the GPUs, or one)"
    )
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Check everything that can be checked, then run; return the exit code."""
    job, config = configured(arguments.file, rest, loud=True)
    from fluxtrain import runner  # imports torch: only once the file is known to be good
    from fluxtrain.cli.summary import say_where_to_look

    processes = arguments.processes
    if processes is not None and not 1 <= processes <= 1024:
        raise ConfigError("--processes", processes, "must be between 1 and 1024")
    processes = processes or runner.default_processes()
    places = Places(
        output=(arguments.output or Path("runs") / job.metadata.name).resolve(),
        data=arguments.data.resolve(),
        models=arguments.models.resolve(),
    )
    if (state := runner.finished(config, places.output)) is not None:
        print(f"{places.output}: this run is over ({state.status} at step {state.step}).")
        say_where_to_look(places.output, config)
        return EXIT_OK
    code, message = runner.run(config, places, processes)
    if code != EXIT_OK:
        print(f"fluxtrain: {message}", file=sys.stderr)
        return code
    say_where_to_look(places.output, config)
    return EXIT_OK
