"""``fluxtrain agent``: train on one node of a cluster; the operator's pods run it."""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxtrain.cli.arguments import require_no_more
from fluxtrain.contract.launch import TERMINATION_LOG


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("agent", allow_abbrev=False, help="train on one node of a cluster")
    parser.add_argument("--termination-log", type=Path, default=Path(TERMINATION_LOG))
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Train on this node; torchrun's ``PET_*`` environment names the others."""
    from fluxtrain.launch.agent import main

    require_no_more(rest)
    return main(arguments.termination_log)
