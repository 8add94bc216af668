"""``fluxtrain agent``: train on one node of a cluster; the command of the operator's pods."""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxtrain.cli.arguments import path, reject_unknown
from fluxtrain.contract.launch import TERMINATION_LOG


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("agent", allow_abbrev=False, help="train on one node of a cluster")
    parser.add_argument("--termination-log", type=path, default=Path(TERMINATION_LOG))
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Train on this node; torchrun's ``PET_*`` variables name the rendezvous."""
    from fluxtrain.launch.agent import main

    reject_unknown(rest)
    return main(arguments.termination_log)
