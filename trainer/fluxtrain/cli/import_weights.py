"""``fluxtrain import``: convert published weights to the single file that a run starts from."""

from __future__ import annotations

from fluxtrain.cli.arguments import Commands, add_command, path
from fluxtrain.cli.export import action, add_output


def add(commands: Commands) -> None:
    """Add the command's parser; the action is that of ``fluxtrain export``."""
    parser = add_command(
        commands,
        "import",
        action,
        help="convert published weights for training",
        description="Convert published weights to the single file that spec.run.initial_weights names.",
    )
    parser.add_argument(
        "source", type=path, metavar="SOURCE", help="BFL's file or a diffusers folder"
    )
    parser.set_defaults(to="bfl")
    add_output(parser)
