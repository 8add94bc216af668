"""How fast an operator turns jobs into pods: ours and Kubeflow's training-operator, in turn.

The cluster is real, its nodes are fake (KWOK): pods are scheduled and pretend to run. Needs root, as
the cluster does; starts it where there is none, and removes all that it made.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import cluster
from benchmarks.operator_contender import Contender, Fluxtrain, TrainingOperator
from benchmarks.operator_scale import Measured, scale
from benchmarks.operator_turn import Turn, take_turn
from benchmarks.table import print_table, spread
from cluster import ClusterError, binaries, fake_nodes, processes
from cluster.kubectl import kubectl
from cluster.places import KUBECONFIG
from cluster.progress import say, wait_until

NAMESPACE = "bench-operator"
NOTES = """\
  Counted are training pods: ours has one more in each job, for the rendezvous, theirs a service for each.
  Theirs has its default flags, but for the scheme and the namespace that it looks after; it then sends 20
  requests per second for pods and services. Requests are those about jobs, without watches and without the
  election that only ours holds. The API server's flow control exempts both (system:masters).
  Where the cores are busy, it is the cluster on them that limits, and not the operator."""


@contextmanager
def _prepared(options: argparse.Namespace, contenders: Sequence[Contender]) -> Iterator[None]:
    """Have cluster, fake nodes, definitions and programs; undo at the end what was not there."""
    if os.environ.get("KUBECONFIG", str(KUBECONFIG)) != str(KUBECONFIG):
        raise ClusterError("KUBECONFIG names another cluster; unset it: this needs the clone's own")
    mine = not KUBECONFIG.exists()
    if mine:
        cluster.up()
    if options.rounds:
        binaries.link(binaries.build("training-operator"))
    faked = processes.alive(fake_nodes.PROCESS)
    try:
        fake_nodes.start(options.nodes)
        with _defined(contenders[: 1 + bool(options.rounds)]):
            yield
    finally:
        if mine:
            cluster.down()
        elif not faked:
            fake_nodes.stop()


@contextmanager
def _defined(contenders: Sequence[Contender]) -> Iterator[None]:
    """Have the contenders' resources defined; at the end remove those that were not."""
    made = []
    try:
        for contender in contenders:
            if not kubectl("get", "--ignore-not-found", contender.crds()):
                made.append(contender.crds())
            kubectl("apply", "--server-side", "--force-conflicts", contender.crds())
            _wait_until_served(contender.crds())
        yield
    finally:
        for crds in made:
            kubectl("delete", crds, "--timeout=120s", seconds=130)


def _wait_until_served(crds: str) -> None:
    def served() -> bool:
        conditions = kubectl.get(crds).get("status", {}).get("conditions") or []
        return any((c["type"], c["status"]) == ("Established", "True") for c in conditions)

    wait_until(served, f"{crds} is served", seconds=60)


def _report(turns: Mapping[str, list[Turn]], options: argparse.Namespace) -> None:
    ours, theirs = turns.values()
    rows = []
    for measure in ours[0]:
        mine, others = ([turn[measure] for turn in each] for each in (ours, theirs))
        ratio = median(others) / median(mine) if median(mine) else float("nan")
        rows.append([measure, spread(mine, 1, 1), spread(others, 1, 1), f"{ratio:.2f}"])
    print_table(
        f"{options.jobs} jobs x {options.pods} pods on {options.nodes} fake nodes,"
        f" {options.rounds} rounds in turn: median (least-most)",
        ["", *turns, "theirs / ours"],
        rows,
    )
    print(NOTES)


def _report_scale(found: Measured, options: argparse.Namespace) -> None:
    print_table(
        f"fluxtrain alone: {options.scale_jobs} jobs x {options.pods} pods"
        f" on {options.scale_nodes} fake nodes",
        ["", "fluxtrain"],
        [[measure, f"{value:.1f}"] for measure, value in found.items()],
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.operator", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--pods", type=int, default=8, help="training pods of each job")
    parser.add_argument("--nodes", type=int, default=400, help="fake nodes, of eight GPUs each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the pods of a turn")
    parser.add_argument("--scale-jobs", type=int, default=1000, help="of ours alone; 0: none")
    parser.add_argument("--scale-nodes", type=int, default=1000)
    parser.add_argument("--scale-timeout", type=float, default=900)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Let both take turns, and print one table; 1 where something failed."""
    options = _parse(arguments)
    contenders: list[Contender] = [Fluxtrain(NAMESPACE), TrainingOperator(NAMESPACE)]
    turns: dict[str, list[Turn]] = {contender.title: [] for contender in contenders}
    try:
        with _prepared(options, contenders):
            if options.scale_jobs:
                say("ours alone")
                fake_nodes.start(options.scale_nodes)
                _report_scale(scale(Fluxtrain(NAMESPACE), options), options)
            for number in range(options.rounds):
                for contender in contenders if number % 2 == 0 else contenders[::-1]:
                    say(f"round {number + 1} of {options.rounds}: {contender.title}")
                    turns[contender.title].append(take_turn(contender, options))
    except ClusterError as error:
        say(f"error: {error}")
        return error.exit_code
    if options.rounds:
        _report(turns, options)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
