"""``fluxtrain data pack SOURCE OUTPUT``: write pictures with their captions as WebDataset shards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from fluxtrain.cli.arguments import Commands, add_command, described, path
from fluxtrain.cli.field_help import add_field_help
from fluxtrain.cli.parser import whole_number
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.overrides import parse_overrides
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: Commands) -> None:
    """Add the command's parser to ``fluxtrain data``."""
    text = "write pictures and captions of any source as WebDataset shards"
    parser = add_command(commands, "pack", action, help=text, description=described(__doc__))
    add_field_help(parser)
    text = "as spec.run.data.images: a folder, a data set config, shards, Parquet files, or a URL"
    parser.add_argument("source", metavar="SOURCE", help=text)
    parser.add_argument("output", type=path, metavar="OUTPUT", help="folder to make")
    text = "most pictures of a shard (default: 1000); it also ends after 1 GiB"
    parser.add_argument("--shard-size", type=whole_number, default=1000, help=text)
    text = "root of relative paths of SOURCE (default: the current folder)"
    parser.add_argument("--data", type=path, default=Path(), help=text)


def action(arguments: argparse.Namespace) -> int:
    """Write the shards and print what they hold."""
    if not 1 <= arguments.shard_size <= 1_000_000:
        raise ConfigError("--shard-size", arguments.shard_size, "must be between 1 and 1000000")
    from tqdm import tqdm

    from fluxtrain.cli.data_check import run_of_source
    from fluxtrain.picture_cache.check import run_pictures
    from fluxtrain.picture_cache.pack import pack, require_packable

    run = run_of_source(arguments.source, arguments.data)
    config = resolve(merge(run, parse_overrides(arguments.overrides)))
    shown = sys.stderr.isatty()
    with TemporaryDirectory() as output:
        paths = RunPaths(Path(output), arguments.data, arguments.data)
        with (
            run_pictures(config, paths, shown) as (pictures, left_out),
            tqdm(total=len(pictures), unit="picture", disable=not shown) as bar,
        ):
            require_packable(pictures, arguments.source)
            packed = pack(pictures, arguments.output, arguments.shard_size, bar.update)
    left_out |= packed.left_out
    for name, reason in left_out.items():
        print(f"left out {name}: {reason}", file=sys.stderr)
    print(f"{arguments.output}: {packed.pictures} pictures in {packed.shards} shards")
    if repeats := {picture.repeats for picture in pictures} - {1}:
        print(f"each is used {max(repeats)} times in an epoch: set spec.run.data.repeats")
    return EXIT_OK
