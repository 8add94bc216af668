"""``fluxtrain rendezvous``: form the generations of a job's agents; the command of the rendezvous pod."""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import Commands, add_command, path
from fluxtrain.contract.launch import METRICS_PORT, RENDEZVOUS_PORT
from fluxtrain.errors import EXIT_OK


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "serve the rendezvous of a job's agents"
    parser = add_command(commands, "rendezvous", action, help=text)
    parser.add_argument("--port", type=int, default=RENDEZVOUS_PORT)
    parser.add_argument("--members-port", type=int, default=METRICS_PORT, help="port of /members")
    parser.add_argument("--nodes", type=_nodes, required=True, help="MIN:MAX nodes that train")
    parser.add_argument("--key", type=path, required=True, help="file with the key of the job")


def action(arguments: argparse.Namespace) -> int:
    """Serve the rendezvous until SIGTERM or SIGINT."""
    from fluxtrain.rendezvous.membership import Limits
    from fluxtrain.rendezvous.service import run

    run(arguments.port, arguments.members_port, Limits(*arguments.nodes), arguments.key)
    return EXIT_OK


def _nodes(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition(":")
    if not (minimum.isdecimal() and maximum.isdecimal() and 1 <= int(minimum) <= int(maximum)):
        raise argparse.ArgumentTypeError(f"got {text!r}; must be MIN:MAX, such as 4:8")
    return int(minimum), int(maximum)
