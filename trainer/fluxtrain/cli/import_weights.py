"""``fluxtrain import``: write published weights as the one file that a run starts from."""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxtrain.cli.export import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser; the action is that of ``fluxtrain export``."""
    parser = commands.add_parser(
        "import",
        allow_abbrev=False,
        help="convert published weights for training",
        description="Write published weights as the one file that spec.run.initial_weights names.",
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="BFL's file or diffusers' folder"
    )
    parser.set_defaults(to="bfl")
    add_output(parser)
