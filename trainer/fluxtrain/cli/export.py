"""``fluxtrain export``: write a run's weights for other programs, streamed and verified."""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxtrain.cli.arguments import require_no_more
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="write a run's weights for other programs",
        description="Write the weights of a run, a checkpoint or any known layout for other programs.",
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="run, checkpoint, file or folder"
    )
    parser.add_argument("--to", default="bfl", help="bfl (one file) or diffusers (a folder)")
    add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes weights, and its action."""
    parser.add_argument("--output", type=Path, required=True, help="file or folder to write")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Write and verify the weights; print their number and size."""
    from tqdm import tqdm

    from fluxtrain.weights.reader import open_weights
    from fluxtrain.weights.writer import DTYPES, LAYOUTS, write_weights

    require_no_more(rest)
    if arguments.to not in LAYOUTS:
        raise ConfigError("--to", arguments.to, f"must be one of {', '.join(LAYOUTS)}")
    if arguments.dtype not in DTYPES:
        raise ConfigError("--dtype", arguments.dtype, f"must be one of {', '.join(DTYPES)}")
    weights, dtype = open_weights(arguments.source), DTYPES[arguments.dtype]
    with tqdm(desc=str(arguments.output), unit="B", unit_scale=True, mininterval=1) as bar:
        written = write_weights(weights, arguments.output, arguments.to, dtype, tick=bar.update)
    num = written // dtype.itemsize
    print(f"{arguments.output}: {num:,} parameters, {written:,} bytes, read again and compared")
    return EXIT_OK
