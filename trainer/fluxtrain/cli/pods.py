"""A node's command ``fluxtrain doctor``; its pods' ``fetch-models``, ``agent``, ``rendezvous``, ``stacks``.

``kubectl fluxtrain stacks NAME`` runs the last in the pods of a job: ranks print their stacks into the
log.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

from fluxtrain.cli.arguments import path
from fluxtrain.cli.prepare import fetch_missing, stoppable
from fluxtrain.contract.process import (
    ENV_CONFIG,
    ENV_MODELS,
    LOST_SECONDS,
    METRICS_PORT,
    RENDEZVOUS_PORT,
    TERMINATION_LOG,
    read_places,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import EXIT_ERROR, EXIT_OK
from fluxtrain.runtime.program import importing

_DAY = 86_400.0


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=examine_node)
    parser.description = (
        "Print what this node has, what is set and what is missing; 1 if something is missing."
    )
    text = "folder of runs, for its free space (default: runs)"
    parser.add_argument("--output", type=path, default=Path("runs"), help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def examine_node(arguments: argparse.Namespace) -> int:
    from fluxtrain.launch.doctor import examine, render

    found = examine(arguments.output, os.environ)
    as_json = [asdict(each) for each in found]
    print(json.dumps(as_json, indent=2) if arguments.json else render(found))
    return EXIT_ERROR if any(each.state == "missing" for each in found) else EXIT_OK


def add_fetch_models(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=fetch_models)
    parser.add_argument(
        "place", metavar="PLACE", help="where FLUX.1 is, as for fluxtrain fetch --from"
    )


def fetch_models(arguments: argparse.Namespace) -> int:
    """Fetch the models; of pods with one volume, one does and the others wait."""
    config = RunConfig.model_validate_json(Path(os.environ[ENV_CONFIG]).read_bytes())
    models = Path(os.environ[ENV_MODELS])
    with stoppable():
        fetch_missing(config, models, arguments.place, wait_seconds=_DAY)
    print(f"{models} has all that the run names", file=sys.stderr)
    return EXIT_OK


def add_agent(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=run_agent)
    parser.add_argument("--termination-log", type=path, default=Path(TERMINATION_LOG))


def run_agent(arguments: argparse.Namespace) -> int:
    """Train on this node; torchrun's ``PET_*`` variables name the rendezvous."""
    with importing():
        from fluxtrain.launch.agent import main

    return main(arguments.termination_log)


_MAX_LOST_SECONDS = 3600
_MAX_PORT = 65535
_MAX_NUMBER = 2**31 - 1


def add_rendezvous(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=run_rendezvous)
    parser.add_argument("--port", type=_port, default=RENDEZVOUS_PORT)
    parser.add_argument("--members-port", type=_port, default=METRICS_PORT, help="port of /members")
    parser.add_argument("--nodes", type=_nodes, required=True, help="MIN:MAX nodes that train")
    parser.add_argument(
        "--ended",
        type=_ended,
        default=(0, 0),
        metavar="ATTEMPT:GENERATION",
        help="restart the processes of this generation and those before it",
    )
    parser.add_argument(
        "--places",
        type=_places,
        default={},
        metavar="DIGEST,DIGEST;...",
        help="order ranks by the places of their nodes, such as racks: digests of the nodes' names by place",
    )
    parser.add_argument("--key", type=path, required=True, help="file with the key of the job")
    parser.add_argument(
        "--lost-seconds",
        type=_seconds,
        default=LOST_SECONDS,
        help=f"without heartbeat and step until an agent is lost (default: {LOST_SECONDS:g})",
    )


def run_rendezvous(arguments: argparse.Namespace) -> int:
    """Serve the rendezvous until SIGTERM or SIGINT."""
    from fluxtrain.rendezvous.membership import Limits
    from fluxtrain.rendezvous.service import run

    minimum, wanted = arguments.nodes
    limits = Limits(minimum, wanted, lost_seconds=arguments.lost_seconds)
    ports = arguments.port, arguments.members_port
    run(*ports, limits, arguments.key, arguments.ended, arguments.places)
    return EXIT_OK


def _nodes(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition(":")
    if not (minimum.isdecimal() and maximum.isdecimal() and 1 <= int(minimum) <= int(maximum)):
        raise argparse.ArgumentTypeError(f"got {text!r}; must be MIN:MAX, such as 4:8")
    return int(minimum), int(maximum)


def _ended(text: str) -> tuple[int, int]:
    """Return attempt and generation; an operator that does not restart in place leaves them out."""
    attempt, _, generation = text.partition(":")
    numbers = [int(part) for part in (attempt, generation) if part.isdecimal()]
    if not text:
        return 0, 0
    if len(numbers) != 2 or max(numbers) > _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be ATTEMPT:GENERATION, such as 1:3")
    return numbers[0], numbers[1]


def _places(text: str) -> dict[str, int]:
    try:
        return read_places(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; must be from 0, any free one, to {_MAX_PORT}"
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _MAX_LOST_SECONDS:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be from 1 to {_MAX_LOST_SECONDS}")
    return seconds


def add_stacks(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=show_stacks)


def show_stacks(arguments: argparse.Namespace) -> int:
    from fluxtrain.launch.stacks import ask_ranks

    for process in ask_ranks():
        print(process.to_json(), flush=True)
    return EXIT_OK
