"""`python -m cluster up|down|prepare|status|fake`: what make calls; messages go to standard error."""

from __future__ import annotations

import argparse
import sys

from cluster import fake_nodes, lifecycle
from cluster.errors import ClusterError
from cluster.progress import part, say


def main() -> int:
    """Return the exit code: 0, 1 where something failed, 2 where the machine lacks something."""
    arguments = _parser().parse_args()
    try:
        _carry_out(arguments)
    except ClusterError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def _carry_out(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "up":
            with part("all"):
                kubeconfig = lifecycle.up(arguments.nodes)
            print(f"export KUBECONFIG={kubeconfig}")
        case "down":
            with part("stopped"):
                lifecycle.down()
        case "prepare":
            with part("prepared"):
                lifecycle.prepare()
        case "fake":
            with part(f"{arguments.count} fake nodes"):
                fake_nodes.start(arguments.count)
        case _:
            for name, alive in lifecycle.status().items():
                print(f"{'runs' if alive else 'DEAD'}  {name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster, or find the one that runs")
    up.add_argument("--nodes", type=int, default=2, help="how many (default 2)")
    commands.add_parser("prepare", help="build what a start needs, and start nothing")
    commands.add_parser("down", help="stop it; nothing is left")
    commands.add_parser("status", help="list its programs")
    fake = commands.add_parser("fake", help="add fake nodes")
    fake.add_argument("count", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
