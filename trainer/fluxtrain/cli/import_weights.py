"""``fluxtrain import``: convert published weights to the single file that a run starts from."""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import path
from fluxtrain.cli.export import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser; the action is that of ``fluxtrain export``."""
    parser = commands.add_parser(
        "import",
        allow_abbrev=False,
        help="convert published weights for training",
        description="Convert published weights to the single file that spec.run.initial_weights names.",
    )
    parser.add_argument(
        "source", type=path, metavar="SOURCE", help="BFL's file or a diffusers folder"
    )
    parser.set_defaults(to="bfl")
    add_output(parser)
