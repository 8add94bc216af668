"""``fluxtrain agent`` and ``fluxtrain rendezvous``: what the operator's pods run; nobody types them."""

from __future__ import annotations

import argparse
from pathlib import Path

from fluxtrain.contract.launch import RENDEZVOUS_PORT, TERMINATION_LOG
from fluxtrain.errors import EXIT_OK, ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands' parsers."""
    agent = commands.add_parser("agent", allow_abbrev=False, help="train on one node of a cluster")
    agent.add_argument("--termination-log", type=Path, default=Path(TERMINATION_LOG))
    agent.set_defaults(action=run_agent)
    store = commands.add_parser(
        "rendezvous", allow_abbrev=False, help="hold the store where the agents of a job meet"
    )
    store.add_argument("--port", type=int, default=RENDEZVOUS_PORT)
    store.set_defaults(action=run_rendezvous)


def run_agent(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Train on this node; torchrun's ``PET_*`` environment says with whom."""
    from fluxtrain.agent import main

    _refuse(rest)
    return main(arguments.termination_log)


def run_rendezvous(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Hold the rendezvous store until asked to stop."""
    from fluxtrain.rendezvous import hold_store

    _refuse(rest)
    hold_store(arguments.port)
    return EXIT_OK


def _refuse(rest: list[str]) -> None:
    if rest:
        raise ConfigError("arguments", " ".join(rest), "no such option")
