"""``fluxtrain plan FILE``: estimate the memory, FLOPs, time and disk space of a job."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from fluxtrain.cli import reference_environment
from fluxtrain.cli.arguments import (
    Commands,
    add_command,
    add_file,
    described,
    load_config,
    path,
)
from fluxtrain.cli.parser import number
from fluxtrain.contract.resource.resources import amount
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import require_replicas
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, ConfigError


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "estimate memory, FLOPs, time and disk space"
    parser = add_command(commands, "plan", action, help=text, description=described(__doc__))
    add_file(parser)
    text = "root of relative paths, where pictures are counted (default: as of fluxtrain run)"
    parser.add_argument("--data", type=path, help=text)
    parser.add_argument("--gpu", help="GPU model (default: MI300X)")
    text = "assumed fraction of the dense peak (default: 0.3, of the fp8 peak 0.2)"
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--mfu", type=number, help=text)
    text = "benchmark.json of the benchmark task, for the speed that it measured"
    speed.add_argument("--measured", type=path, metavar="FILE", help=text)
    text = (
        "take one step on fake tensors, with as many ranks, and compare; fails if the plan is wrong"
    )
    parser.add_argument("--verify", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")


def action(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    from fluxtrain.plan import MeasuredSpeeds, make_plan, plan_pictures, render

    job, config = load_config(arguments.file, arguments.overrides, quiet=arguments.json)
    if config.task != "train":
        raise ConfigError("spec.run.task", config.task, "must be train: other tasks have no plan")
    require_replicas(config, job.spec.rank_counts)
    size = job.spec.nodes.max, job.spec.gpus_per_node
    if arguments.verify:
        _require_no_speed(arguments)
        return _verify(config, *size, arguments.gpu, as_json=arguments.json)
    limit = job.spec.resources.limits.memory
    root = arguments.data or Path(reference_environment.root("data", os.environ).value)
    plan = make_plan(
        config,
        *size,
        arguments.gpu,
        arguments.mfu,
        fewest_nodes=job.spec.nodes.min,
        memory_limit=None if limit is None else int(amount(limit)),
        measured=MeasuredSpeeds(arguments.measured) if arguments.measured else None,
        pictures=plan_pictures(config, root),
    )
    print(json.dumps(plan.model_dump(), indent=2) if arguments.json else render(plan))
    return EXIT_OK


def _require_no_speed(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if ``arguments`` ask for a speed too, which is not verified."""
    for option in ("mfu", "measured"):
        if (value := getattr(arguments, option)) is not None:
            text = "must be left out with --verify, which compares memory and traffic, not speed"
            raise ConfigError(f"--{option}", str(value), text)


def _verify(
    config: RunConfig, num_nodes: int, gpus_per_node: int, gpu: str | None, as_json: bool
) -> int:
    from fluxtrain.plan import assumed_gpu
    from fluxtrain.verify import render, verify

    comparison = verify(config, num_nodes, max(gpus_per_node, 1), assumed_gpu(gpu, gpus_per_node))
    print(comparison.model_dump_json(indent=2) if as_json else render(comparison))
    return EXIT_OK if comparison.holds else EXIT_ERROR
