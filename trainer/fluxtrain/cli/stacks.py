"""``fluxtrain stacks``: make the ranks of this container print their stacks into its log.

``kubectl fluxtrain stacks NAME`` runs it in the pods of a job and shows the stacks.
"""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import Commands, add_command
from fluxtrain.errors import EXIT_OK


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "make the ranks of this container print their stacks into its log"
    add_command(commands, "stacks", action, help=text)


def action(arguments: argparse.Namespace) -> int:
    """Print one line for each rank that was asked, as JSON."""
    from fluxtrain.launch.stacks import ask_ranks

    for process in ask_ranks():
        print(process.to_json(), flush=True)
    return EXIT_OK
