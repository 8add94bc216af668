"""``fluxtrain run FILE``: run a task on this machine, such as training; the same command resumes it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fluxtrain.cli import reference_environment
from fluxtrain.cli.arguments import (
    Commands,
    add_command,
    add_file,
    add_paths,
    described,
    load_config,
    path,
    report_end,
    require_processes,
    run_task,
)
from fluxtrain.cli.nodes import add_nodes, parse_nodes
from fluxtrain.cli.parser import whole_number
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.resource.fluxtraining import FluxTraining, cluster_only_fields
from fluxtrain.contract.run.closed_division import SAME_SYSTEM, TO_LEAVE, is_closed
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.torchtitan_options import refuse_variables
from fluxtrain.errors import EXIT_OK, UNSET, ConfigError
from fluxtrain.launch.nodes import Nodes, find_endpoint, serves
from fluxtrain.other_trainers.variables import refuse_different


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "train from a FluxTraining file"
    parser = add_command(commands, "run", action, help=text, description=described(__doc__))
    add_file(parser)
    add_paths(parser)
    text = "folder of the run (default: $LOGDIR/NAME, else runs/NAME)"
    parser.add_argument("--output", type=path, help=text)
    text = "trainer processes on this machine (default: the GPUs, or one)"
    parser.add_argument("--processes", type=whole_number, help=text)
    add_nodes(parser)


def action(arguments: argparse.Namespace) -> int:
    """Validate the job, run it and return its exit code."""
    job, config = load_config(arguments.file, arguments.overrides)
    nodes = parse_nodes(arguments, os.environ)
    if ignored := cluster_only_fields(job):
        print(f"ignored outside a cluster: {', '.join(ignored)}", file=sys.stderr)
    require_processes(arguments.processes)
    refuse_variables(os.environ, arguments.processes)
    refuse_different(os.environ, config)
    if nodes is not None:
        _require_distributed(config)
        _require_fixed(config, nodes)
        find_endpoint(nodes)
    _warn_without_gpus(job)  # imports torch: only once the file is validated
    paths = _paths(arguments, job.metadata.name)
    if (message := _finished_message(config, paths)) is not None:
        print(message)
    elif (code := _run(arguments, job, config, paths, nodes)) != EXIT_OK:
        return code
    if config.task == "train" and (nodes is None or serves(nodes, find_endpoint(nodes))):
        from fluxtrain.cli.summary import print_summary

        print_summary(paths.output, config)
    return EXIT_OK


def _run(
    arguments: argparse.Namespace,
    job: FluxTraining,
    config: RunConfig,
    paths: RunPaths,
    nodes: Nodes | None,
) -> int:
    if nodes is None:
        return run_task(config, paths, arguments.processes)
    from fluxtrain.launch import several_nodes, torchrun

    processes = arguments.processes or torchrun.default_processes()
    restarts = job.spec.restart.max_restarts
    return report_end(*several_nodes.run(config, paths, processes, nodes, restarts))


def _require_distributed(config: RunConfig) -> None:
    if config.task == "prepare":
        raise ConfigError("--nodes", UNSET, "the task prepare runs on one node")


def _require_fixed(config: RunConfig, nodes: Nodes) -> None:
    count = nodes.min_nodes, nodes.wanted_nodes
    if is_closed(config) and count[0] < count[1]:
        text = (
            f"the closed division needs a fixed number (training rules {SAME_SYSTEM}); {TO_LEAVE}"
        )
        raise ConfigError("--nodes", "{}:{}".format(*count), text)


def _warn_without_gpus(job: FluxTraining) -> None:
    from fluxtrain.gpus import num_visible

    requested = job.spec.gpus_per_node
    if requested and not num_visible():
        text = f"spec.gpusPerNode is {requested}, but torch sees no GPU here: this runs on the CPU"
        print(f"fluxtrain: {text}", file=sys.stderr)


def _paths(arguments: argparse.Namespace, job: str) -> RunPaths:
    """Return the run's folders and print each with its source: option, environment or default."""
    settings = {kind: reference_environment.root(kind, os.environ) for kind in ("data", "models")}
    settings["output"] = reference_environment.output(job, os.environ)
    for kind, default in settings.items():
        given = getattr(arguments, kind)
        if given is not None and (kind == "output" or str(given) != default.value):
            settings[kind] = reference_environment.Setting(str(given), f"--{kind}")
    os.environ.update(reference_environment.hugging_face(os.environ))
    print(" · ".join(f"{kind} {setting}" for kind, setting in settings.items()), file=sys.stderr)
    folders = {kind: Path(setting.value).resolve() for kind, setting in settings.items()}
    return RunPaths(folders["output"], folders["data"], folders["models"])


def _finished_message(config: RunConfig, paths: RunPaths) -> str | None:
    """Return the message for a run that is already complete, None for one that is not."""
    from fluxtrain.launch import torchrun
    from fluxtrain.precompute import open_outputs

    if config.task == "preprocess":
        targets = open_outputs(config, paths.data, paths.models)
        finished = all(target.is_finished for target in targets)
        return "preprocess: everything is there already" if finished else None
    if (state := torchrun.finished_state(config, paths.output)) is None:
        return None
    return f"{paths.output}: this run is over ({state.status} at step {state.step})."
