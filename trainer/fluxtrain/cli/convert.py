"""``fluxtrain convert SOURCE TARGET --to LAYOUT``: convert encoded samples to another layout."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from fluxtrain.cli.arguments import Commands, add_command, described, path
from fluxtrain.cli.parser import whole_number
from fluxtrain.contract.run.data import Layout
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "convert encoded samples to another layout"
    parser = add_command(commands, "convert", action, help=text, description=described(__doc__))
    parser.epilog = (
        "Only the layout shards keeps captions; arrow, parquet and webdataset drop them."
    )
    layouts = get_args(Layout)
    parser.add_argument("source", type=path, metavar="SOURCE", help="folder of encoded samples")
    text = "folder to write; must not exist"
    parser.add_argument("target", type=path, metavar="TARGET", help=text)
    text = "layout of SOURCE (default: detected)"
    parser.add_argument("--from", dest="layout", choices=layouts, help=text)
    parser.add_argument("--to", required=True, choices=layouts, help="layout of TARGET (required)")
    text = "samples per file (default: 1024)"
    parser.add_argument("--shard-size", type=whole_number, default=1024, help=text)


def action(arguments: argparse.Namespace) -> int:
    """Convert, verify and print the number of samples."""
    if not 1 <= arguments.shard_size <= 1_000_000:
        raise ConfigError("--shard-size", arguments.shard_size, "must be between 1 and 1000000")
    from tqdm import tqdm

    from fluxtrain.data.layouts.convert import convert

    with tqdm(unit="sample", desc="write and compare", disable=not sys.stderr.isatty()) as bar:
        count = convert(
            arguments.source,
            arguments.target,
            arguments.to,
            arguments.layout,
            arguments.shard_size,
            lambda done: (bar.update(done), None)[1],
        )
    print(f"{arguments.target}: {count:,} samples as {arguments.to}, each compared after writing")
    return EXIT_OK
