"""``fluxtrain convert SOURCE TARGET --to LAYOUT``: encoded samples from one layout to another, verified."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from fluxtrain.cli.arguments import require_no_more
from fluxtrain.contract.run.config import Layout
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "convert",
        allow_abbrev=False,
        help="encoded samples to another layout",
        description=__doc__,
        epilog="arrow, parquet and webdataset keep no captions: only the layout shards does.",
    )
    layouts = get_args(Layout)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of encoded samples")
    parser.add_argument(
        "target", type=Path, metavar="TARGET", help="folder to write, not yet there"
    )
    parser.add_argument("--from", dest="layout", choices=layouts, help="default: found out")
    parser.add_argument("--to", required=True, choices=layouts, help="what to write")
    parser.add_argument(
        "--shard-size", type=int, default=1024, help="samples per file (default: 1024)"
    )
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Convert, compare, and say what is there now."""
    require_no_more(rest)
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
