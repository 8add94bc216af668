"""``fluxtrain import``: convert published weights to the single file that a run starts from."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.cli.arguments import Commands, add_command, path
from fluxtrain.cli.export import action, add_target


def add(commands: Commands) -> None:
    """Add the command's parser; the action is that of ``fluxtrain export``."""
    text = "convert published weights for training"
    long = "Convert published weights to the single file that spec.run.initial_weights names."
    parser = add_command(commands, "import", action, help=text, description=long)
    text = "BFL's file or a diffusers folder"
    parser.add_argument("source", type=path, metavar="SOURCE", help=text)
    parser.set_defaults(to="bfl", adapter=[], strength=None, models=Path())
    add_target(parser)
