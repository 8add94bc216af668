"""``fluxtrain rendezvous``: serve the rendezvous store of one job; the operator's pods run it."""

from __future__ import annotations

import argparse

from fluxtrain.cli.arguments import require_no_more
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
    """Serve the rendezvous store until a signal asks to stop."""
    from fluxtrain.launch.rendezvous import hold_store

    require_no_more(rest)
    hold_store(arguments.port)
    return EXIT_OK
