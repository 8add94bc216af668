"""``--nodes``, ``--rendezvous`` and ``--node-rank``: several nodes of a run, without Kubernetes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from fluxtrain.errors import ConfigError
from fluxtrain.launch.nodes import Nodes
from fluxtrain.rendezvous.messages import MAX_NODES

_SLURM_RANK, _SLURM_TASKS = "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"
_LARGEST_PORT = 65535
_MAX_SECONDS = 86_400.0
_TIMEOUT = 600.0


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "several nodes without Kubernetes", "the same command on each of them: docs/slurm.md"
    )
    text = "number of nodes; MIN:MAX: continue as long as MIN are left"
    group.add_argument("--nodes", metavar="N|MIN:MAX", help=text)
    text = "where they meet: the node with this address, node rank 0 if ranks are given, serves it"
    group.add_argument("--rendezvous", metavar="HOST:PORT", help=text)
    text = "rank of this node, from 0 (default: $SLURM_NODEID, else by host name)"
    group.add_argument("--node-rank", metavar="R", help=text)
    text = f"wait for the rendezvous, and for enough nodes, for this long (default: {_TIMEOUT:g})"
    group.add_argument("--rendezvous-timeout", metavar="SECONDS", help=text)


def parse_nodes(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Nodes | None:
    """Return the nodes that ``arguments`` describe, None for a run on this machine alone.

    Raises ConfigError for an option that is wrong, or that lacks another one.
    """
    given = (arguments.node_rank, arguments.rendezvous_timeout)
    if arguments.nodes is None and arguments.rendezvous is None:
        for option, value in zip(("--node-rank", "--rendezvous-timeout"), given, strict=True):
            if value is not None:
                raise ConfigError(option, value, "needs --nodes and --rendezvous")
        return None
    if arguments.rendezvous is None:
        text = "needs --rendezvous=HOST:PORT, the same on all nodes: where they meet"
        raise ConfigError("--nodes", arguments.nodes, text)
    if arguments.nodes is None:
        raise ConfigError("--rendezvous", arguments.rendezvous, "needs --nodes=N")
    fewest, wanted = _nodes(arguments.nodes)
    host, port = _endpoint(arguments.rendezvous)
    rank = _rank(arguments.node_rank, wanted, environment)
    return Nodes(fewest, wanted, host, port, rank, _seconds(arguments.rendezvous_timeout))


def _nodes(text: str) -> tuple[int, int]:
    fewest, colon, most = text.partition(":")
    numbers = [fewest, most if colon else fewest]
    if all(_is_number(number) for number in numbers):
        low, high = map(int, numbers)
        if 1 <= low <= high <= MAX_NODES:
            return low, high
    allowed = f"must be a number from 1 to {MAX_NODES}, or MIN:MAX such as 3:4"
    raise ConfigError("--nodes", text, allowed)


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or ":" in host or not _is_number(port) or not 1 <= int(port) <= _LARGEST_PORT:
        allowed = f"must be HOST:PORT, with a name or an IPv4 address and a port from 1 to {_LARGEST_PORT}"
        raise ConfigError("--rendezvous", text, allowed)
    return host, int(port)


def _rank(text: str | None, wanted: int, environment: Mapping[str, str]) -> int | None:
    source = "--node-rank"
    if text is None and environment.get(_SLURM_RANK):
        text, source = environment[_SLURM_RANK], f"${_SLURM_RANK}"
        tasks = environment.get(_SLURM_TASKS, "1").partition("(")[0]
        if tasks != "1":
            raise ConfigError(
                f"${_SLURM_TASKS}", tasks, "one task per node: srun --ntasks-per-node=1"
            )
    if text is None:
        return None
    if not _is_number(text) or int(text) >= wanted:
        allowed = (
            f"must be from 0 to {wanted - 1}, as --nodes is {wanted}" if wanted > 1 else "must be 0"
        )
        raise ConfigError(source, text, allowed)
    return int(text)


def _seconds(text: str | None) -> float:
    if text is None:
        return _TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _MAX_SECONDS:
        raise ConfigError(
            "--rendezvous-timeout", text, f"must be from 1 to {_MAX_SECONDS:g} seconds"
        )
    return seconds


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
