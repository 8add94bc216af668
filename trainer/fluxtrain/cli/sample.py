"""``fluxtrain sample WEIGHTS``: generate images of prompts with a run's or published weights."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from fluxtrain.cli.arguments import (
    Commands,
    add_command,
    add_output,
    add_paths,
    described,
    path,
    require_processes,
    run_task,
)
from fluxtrain.cli.field_help import add_field_help
from fluxtrain.contract.launch import SAMPLES_FOLDER, RunPaths
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.contract.run.torchtitan_options import refuse_variables
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "generate images of prompts"
    parser = add_command(commands, "sample", action, help=text, description=described(__doc__))
    text = "run, checkpoint, weights file or diffusers folder"
    parser.add_argument("weights", type=path, metavar="WEIGHTS", help=text)
    text = "prompt of an image; may be repeated"
    parser.add_argument("--prompt", action="append", default=[], help=text)
    text = "file with one prompt per line"
    parser.add_argument("--prompts", type=path, metavar="FILE", help=text)
    add_output(parser)
    text = "preset to start from (default: dev-finetune or mlperf-schnell, by the model)"
    parser.add_argument("--preset", help=text)
    parser.add_argument("--processes", type=int, help="processes (default: the GPUs, or one)")
    add_paths(parser)
    add_field_help(parser)


def action(arguments: argparse.Namespace) -> int:
    """Run the sample task, which is the same in a cluster."""
    from fluxtrain.weights import open_weights

    require_processes(arguments.processes)
    refuse_variables(os.environ, arguments.processes)
    prompts = [*arguments.prompt, *_lines(arguments.prompts)]
    if not prompts:
        raise ConfigError("--prompt", None, "give at least one, or --prompts FILE")
    model = open_weights(arguments.weights).model
    run: dict[str, Any] = {
        "preset": arguments.preset
        or ("dev-finetune" if model.guidance_embed else "mlperf-schnell"),
        "task": "sample",
        "model": model.model_dump(mode="json"),
        "initial_weights": str(arguments.weights.resolve()),
        "sampling": {"prompts": prompts},
        "logging": {"metrics_port": 0},
    }
    config = resolve(merge(run, parse_overrides(arguments.overrides)))
    paths = RunPaths(
        arguments.output.resolve(), arguments.data.resolve(), arguments.models.resolve()
    )
    if (code := run_task(config, paths, arguments.processes)) == EXIT_OK:
        print(f"{len(prompts)} images in {paths.output / SAMPLES_FOLDER}")
    return code


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        return [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", str(file), f"cannot be read ({error})") from None
