"""``fluxtrain run FILE``: train on this machine, or go on where the same command stopped."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fluxtrain.cli import reference_environment
from fluxtrain.cli.arguments import add_file, add_paths, configured
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.resource.fluxtraining import FluxTraining
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "run", allow_abbrev=False, help="train from a FluxTraining file", description=__doc__
    )
    add_file(parser)
    add_paths(parser)
    parser.add_argument(
        "--output", type=Path, help="folder of the run (default: $LOGDIR/NAME, else runs/NAME)"
    )
    parser.add_argument(
        "--processes", type=int, help="trainer processes (default: the GPUs, or one)"
    )
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Check everything that can be checked, then run; return the exit code."""
    job, config = configured(arguments.file, rest, loud=True)
    from fluxtrain.cli.summary import say_where_to_look
    from fluxtrain.launch import (
        torchrun as runner,  # imports torch: only once the file is known to be good
    )

    processes = arguments.processes
    if processes is not None and not 1 <= processes <= 1024:
        raise ConfigError("--processes", processes, "must be between 1 and 1024")
    processes = processes or runner.default_processes()
    _say_if_without_gpus(job)
    paths = _paths(arguments, job.metadata.name)
    if (words := _over(config, paths)) is not None:
        print(words)
    else:
        code, message = runner.run(config, paths, processes)
        if code != EXIT_OK:
            print(f"fluxtrain: {message}", file=sys.stderr)
            return code
    if config.task == "train":
        say_where_to_look(paths.output, config)
    return EXIT_OK


def _say_if_without_gpus(job: FluxTraining) -> None:
    from fluxtrain.gpus import num_visible

    wanted = job.spec.gpus_per_node
    if wanted and not num_visible():
        text = f"spec.gpusPerNode is {wanted}, but torch sees no GPU here: this runs on the CPU"
        print(f"fluxtrain: {text}", file=sys.stderr)


def _paths(arguments: argparse.Namespace, job: str) -> RunPaths:
    """Return where the run reads and writes, and say so: variables of the environment have a part in it."""
    chosen = {kind: reference_environment.root(kind, os.environ) for kind in ("data", "models")}
    chosen["output"] = reference_environment.output(job, os.environ)
    for kind, default in chosen.items():
        given = getattr(arguments, kind)
        if given is not None and str(given) != default.value:
            chosen[kind] = reference_environment.Chosen(str(given), f"--{kind}")
    os.environ.update(reference_environment.hugging_face(os.environ))
    print(" · ".join(f"{kind} {value}" for kind, value in chosen.items()), file=sys.stderr)
    where = {kind: Path(value.value).resolve() for kind, value in chosen.items()}
    return RunPaths(output=where["output"], data=where["data"], models=where["models"])


def _over(config: RunConfig, paths: RunPaths) -> str | None:
    """Return what to say of a run that has nothing left to do, None of one that has."""
    from fluxtrain.launch import torchrun as runner
    from fluxtrain.precompute import open_targets

    if config.task == "preprocess":
        made = all(t.is_finished for t in open_targets(config, paths.data, paths.models))
        return "preprocess: everything is there already" if made else None
    if (state := runner.finished(config, paths.output)) is None:
        return None
    return f"{paths.output}: this run is over ({state.status} at step {state.step})."
