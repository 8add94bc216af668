"""``fluxtrain rendezvous``: serve the rendezvous store of a job; the command of the rendezvous pod."""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import reject_unknown
from fluxtrain.contract.launch import RENDEZVOUS_PORT
from fluxtrain.errors import EXIT_OK


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "rendezvous", allow_abbrev=False, help="serve the rendezvous store of a job's agents"
    )
    parser.add_argument("--port", type=int, default=RENDEZVOUS_PORT)
    parser.set_defaults(action=action)


def action(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Serve the rendezvous store until SIGTERM or SIGINT."""
    from fluxtrain.launch.rendezvous import serve_store

    reject_unknown(rest)
    serve_store(arguments.port)
    return EXIT_OK
