"""``fluxtrain agent``: train on one node of a cluster; the command of the operator's pods."""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxtrain.cli.arguments import Commands, add_command, path
from fluxtrain.contract.launch import TERMINATION_LOG


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "agent", action, help="train on one node of a cluster")
    parser.add_argument("--termination-log", type=path, default=Path(TERMINATION_LOG))


def action(arguments: argparse.Namespace) -> int:
    """Train on this node; torchrun's ``PET_*`` variables name the rendezvous."""
    from fluxtrain.launch.agent import main

    return main(arguments.termination_log)
