"""``fluxtrain export``: write a run's weights in a published layout, and verify them."""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import (
    Commands,
    add_adapters,
    add_command,
    add_output,
    add_paths,
    path,
    strength_of,
)
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "write a run's weights in a published layout"
    long = "Write the weights of a run, a checkpoint or a published model in a published layout."
    parser = add_command(commands, "export", action, help=text, description=long)
    text = "run, checkpoint, weights file or diffusers folder"
    parser.add_argument("source", type=path, metavar="SOURCE", help=text)
    text = "bfl (one file, default) or diffusers (a folder)"
    parser.add_argument("--to", default="bfl", help=text)
    add_adapters(parser)
    add_paths(parser, ("models",))
    add_target(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes weights."""
    add_output(parser, "file or folder to write (required)")
    text = "bfloat16 (default), float16 or float32"
    parser.add_argument("--dtype", default="bfloat16", help=text)


def action(arguments: argparse.Namespace) -> int:
    """Write and verify the weights, and print their number and size."""
    from tqdm import tqdm

    from fluxtrain.adapter.clip import left_out
    from fluxtrain.adapter.merge import MergedWeights
    from fluxtrain.adapter.opening import open_adapter, open_model
    from fluxtrain.weights.writer import DTYPES, LAYOUTS, write_weights

    if arguments.to not in LAYOUTS:
        raise ConfigError("--to", arguments.to, f"must be one of {', '.join(LAYOUTS)}")
    if arguments.dtype not in DTYPES:
        raise ConfigError("--dtype", arguments.dtype, f"must be one of {', '.join(DTYPES)}")
    strength = strength_of(arguments)
    weights, dtype = open_model(arguments.source, arguments.models), DTYPES[arguments.dtype]
    if arguments.adapter:
        added = [(open_adapter(each), strength) for each in arguments.adapter]
        weights = MergedWeights(weights, added)
    if text := left_out(weights):
        print(text)
    with tqdm(desc=str(arguments.output), unit="B", unit_scale=True, mininterval=1) as bar:
        written = write_weights(
            weights, arguments.output, arguments.to, dtype, report_bytes=bar.update
        )
    num = written // dtype.itemsize
    print(f"{arguments.output}: {num:,} parameters, {written:,} bytes, read again and compared")
    return EXIT_OK
