"""The command line `python -m cluster up|images|down|prepare|status|fake`; messages go to standard error."""

from __future__ import annotations

import argparse
import sys

from cluster import lifecycle
from cluster.console import log, timed
from cluster.errors import ClusterError
from cluster.kubectl import Kubectl
from cluster.layout import BIN
from cluster.nodes import checkout, fake_nodes


def main() -> int:
    """Return the exit code: 0, 1 if something failed, 2 if the machine lacks something."""
    arguments = _parser().parse_args()
    try:
        _run_command(arguments)
    except ClusterError as error:
        log(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        log("interrupted")
        return 130
    return 0


def _run_command(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "up":
            with timed("all"):
                kubeconfig = lifecycle.up(arguments.nodes)
            print(f"export KUBECONFIG={kubeconfig} PATH={BIN}:$PATH")
        case "images":
            job = checkout.load(Kubectl(lifecycle.up(arguments.nodes)))
            print(f"kubectl apply -f {job}  # once the operator is installed: docs/cluster.md")
        case "down":
            with timed("stopped"):
                lifecycle.down()
        case "prepare":
            with timed("prepared"):
                lifecycle.prepare()
        case "fake":
            with timed(f"{arguments.count} fake nodes"):
                fake_nodes.start(arguments.count)
        case _:
            programs = lifecycle.status()
            if not programs:
                log("no cluster of this checkout runs")
            for name, running in programs.items():
                print(f"{'runs' if running else 'DEAD'}  {name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster, or use the running one")
    load = commands.add_parser("images", help="build this checkout's images, for a small job too")
    for command in (up, load):
        command.add_argument("--nodes", type=int, default=2, help="how many (default 2)")
    commands.add_parser("prepare", help="build everything that a start needs")
    commands.add_parser("down", help="stop and remove it")
    commands.add_parser("status", help="list its programs")
    fake = commands.add_parser("fake", help="add fake nodes")
    fake.add_argument("count", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
