"""``fluxtrain sample WEIGHTS``: draw prompts with a run's weights, a published file or a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fluxtrain.cli.arguments import add_paths
from fluxtrain.contract.launch import SAMPLES_FOLDER, RunPaths
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "sample", allow_abbrev=False, help="draw pictures of prompts", description=__doc__
    )
    parser.add_argument(
        "weights", type=Path, metavar="WEIGHTS", help="run, checkpoint, file or folder"
    )
    parser.add_argument(
        "--prompt", action="append", default=[], help="what to draw; may be repeated"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a file with a prompt per line"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--preset", help="settings to start from (default: by the kind of model)")
    parser.add_argument("--processes", type=int, help="processes (default: the GPUs, or one)")
    add_paths(parser)
    parser.epilog = "Any field of spec.run can be set: --sampling.num_steps=8; see docs/config.md."
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Draw; the pictures are those that the same task draws in pods."""
    from fluxtrain.launch import torchrun as runner
    from fluxtrain.weights import open_weights

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
    config = resolve(merge(run, parse_overrides(rest)))
    paths = RunPaths(
        output=arguments.output.resolve(),
        data=arguments.data.resolve(),
        models=arguments.models.resolve(),
    )
    processes = arguments.processes or runner.default_processes()
    code, message = runner.run(config, paths, processes)
    if code != EXIT_OK:
        print(f"fluxtrain: {message}", file=sys.stderr)
        return code
    print(f"{len(prompts)} pictures in {paths.output / SAMPLES_FOLDER}")
    return EXIT_OK


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", str(path), f"cannot be read ({error})") from None
