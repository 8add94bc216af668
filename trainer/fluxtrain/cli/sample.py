"""``fluxtrain sample WEIGHTS`` and ``fluxtrain gallery RUN...``: images of prompts, and the page of runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxtrain.cli.arguments import (
    add_adapters,
    add_field_help,
    add_output,
    add_paths,
    added_adapters,
    path,
    require_processes,
    run_task,
    whole_number,
)
from fluxtrain.contract.process import SAMPLES_FOLDER, RunPaths
from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.overrides import parse_overrides, refuse_variables
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, UNSET, ConfigError

_OF_THE_RUN = {
    "data": ("image_size", "latent_size", "text_length"),
    "sampling": ("num_steps", "time_shift", "cfg_scale", "guidance"),
}
"""Settings of a run that images of its weights have too."""
_MEANT = {
    **dict.fromkeys(("steps", "num_steps", "num_inference_steps"), "--sampling.num_steps=N"),
    **dict.fromkeys(("width", "height", "size"), "the size in the prompt: 'TEXT --w 768 --h 512'"),
    **dict.fromkeys(("guidance", "guidance_scale"), "--sampling.guidance=SCALE"),
    **dict.fromkeys(("lora", "lora_path", "lora_weights"), "--adapter FILE"),
}
"""Options of other tools, and what is given here."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=action)
    parser.description = "Generate images of prompts with a run's or published weights."
    text = "run, checkpoint, weights file or diffusers folder"
    parser.add_argument("weights", type=path, metavar="WEIGHTS", help=text)
    text = "prompt of an image; may be repeated"
    parser.add_argument("--prompt", action="append", default=[], help=text)
    text = (
        "file with a prompt on each line, with options as in kohya's: "
        "--w --h --d --s --l --g --n --cn --mask"
    )
    parser.add_argument("--prompts", type=path, metavar="FILE", help=text)
    text = "picture that Kontext edits, Fill fills, or Depth and Canny follow, for every --prompt"
    parser.add_argument("--control", type=path, metavar="FILE", help=text)
    text = "mask of --control, of which Fill fills the white"
    parser.add_argument("--mask", type=path, metavar="FILE", help=text)
    add_output(parser)
    add_adapters(parser)
    text = "preset to start from (default: the run's settings; dev-finetune or mlperf-schnell of a file)"
    parser.add_argument("--preset", help=text)
    parser.add_argument(
        "--processes", type=whole_number, help="processes (default: the GPUs, or one)"
    )
    add_paths(parser)
    add_field_help(parser)


def action(arguments: argparse.Namespace) -> int:
    """Run the sample task, which is the same in a cluster."""
    from fluxtrain.adapter.opening import checkpoint_of, open_model
    from fluxtrain.sample.task import set_aside
    from fluxtrain.state.run_state import read_config

    require_processes(arguments.processes)
    refuse_variables(os.environ, arguments.processes)
    for given in arguments.overrides:
        name = given.partition("=")[0]
        if meant := _MEANT.get(name.removeprefix("--").replace("-", "_")):
            raise ConfigError(name, UNSET, f"is another tool's option; give {meant}")
    if not arguments.prompt and arguments.prompts is None:
        raise ConfigError("--prompt", UNSET, "give at least one, or --prompts FILE")
    paths = RunPaths(
        arguments.output.resolve(), arguments.data.resolve(), arguments.models.resolve()
    )
    model = open_model(arguments.weights, paths.models).model
    checkpoint = checkpoint_of(arguments.weights)
    trained = None if checkpoint is None else read_config(checkpoint)
    run: dict[str, Any] = {
        **_settings(arguments.preset, trained, model.guidance_embed),
        "task": "sample",
        "adapter": None,  # a preset of LoRAs has one; their file is part of the weights
        "model": model.model_dump(mode="json") | _condition(arguments.control, trained, model),
        "initial_weights": str(arguments.weights.resolve()),
        "added_adapters": added_adapters(arguments),
        "logging": {"metrics_port": 0},
    }
    file = str(arguments.prompts.resolve()) if arguments.prompts else None
    files = {"cn": arguments.control, "mask": arguments.mask}
    options = "".join(f" --{name} {each.resolve()}" for name, each in files.items() if each)
    own = [f"{prompt}{options}" for prompt in arguments.prompt]
    prompts = {"sampling": {"prompts": own, "prompt_file": file}}
    overrides = merge(prompts, parse_overrides(arguments.overrides))
    config = resolve(merge(run, overrides))
    if before := set_aside(config, paths):
        print(f"images of before: {before}")
    if (code := run_task(config, paths, arguments.processes)) == EXIT_OK:
        print(f"images: {paths.output / SAMPLES_FOLDER}")
    return code


def _condition(
    control: Path | None, trained: Mapping[str, Any] | None, model: ModelConfig
) -> dict[str, str]:
    """Return that weights of dev's layout are Kontext's, if their run was, or they are to edit a picture."""
    was_kontext = trained is not None and trained["model"].get("condition") == "kontext"
    is_kontext = control is not None or was_kontext
    return {"condition": "kontext"} if is_kontext and model.condition == "none" else {}


def _settings(
    preset: str | None, trained: Mapping[str, Any] | None, is_dev: bool
) -> dict[str, Any]:
    """Return the preset, and the run's sizes, encoders and sampling if the weights are of a run."""
    if preset or trained is None:
        return {"preset": preset or ("dev-finetune" if is_dev else "mlperf-schnell")}
    kept = {key: trained[key] for key in ("preset", "seed", "encoders", "precision")}
    for section, fields in _OF_THE_RUN.items():
        kept[section] = {field: trained[section][field] for field in fields}
    return kept


def add_gallery(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_gallery)
    parser.description = "Write one page: curves, newest samples and settings of runs side by side."
    text = "output folder of a run, finished or not"
    parser.add_argument("runs", type=path, nargs="+", metavar="RUN", help=text)
    text = "file to write (default: gallery.html here)"
    parser.add_argument("--output", type=path, default=Path("gallery.html"), help=text)


def _gallery(arguments: argparse.Namespace) -> int:
    from fluxtrain.report.gallery import compare_runs

    compare_runs(arguments.runs, arguments.output)
    print(f"page: {arguments.output}")
    return EXIT_OK
