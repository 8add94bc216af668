"""``fluxtrain rendezvous``: serve the rendezvous store of a job; the command of the rendezvous pod."""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import Commands, add_command
from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain.errors import EXIT_OK


def add(commands: Commands) -> None:
    """Add the command's parser."""
    text = "serve the rendezvous store of a job's agents"
    parser = add_command(commands, "rendezvous", action, help=text)
    parser.add_argument("--port", type=int, default=RENDEZVOUS_PORT)


def action(arguments: argparse.Namespace) -> int:
    """Serve the rendezvous store until SIGTERM or SIGINT."""
    from fluxtrain.launch.rendezvous import serve_store

    serve_store(arguments.port)
    return EXIT_OK
