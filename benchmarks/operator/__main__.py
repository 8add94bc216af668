"""The rate at which an operator creates pods: ours, Kubeflow's training-operator and its Trainer, in turn.

The cluster is real, its nodes are fake (KWOK): pods are scheduled but not run. Needs root; starts a cluster
if there is none, and removes everything it created.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import cluster
from benchmarks.operator.contender import Contender, Fluxtrain, TrainingOperator
from benchmarks.operator.kubeflow_trainer import KubeflowTrainer
from benchmarks.operator.scale import Measured, scale
from benchmarks.operator.turn import Turn, take_turn
from benchmarks.table import print_table, spread
from cluster import ClusterError, processes
from cluster.console import log
from cluster.kubectl import kubectl
from cluster.layout import KUBECONFIG
from cluster.nodes import fake_gpus, fake_nodes
from cluster.programs import binaries

NAMESPACE = "bench-operator"
SCALE_GPUS = 96
"""GPUs of a fake node for ours alone: heartbeats of 1,000 nodes of eight would need a larger machine."""
PEER_MODULES = ("training-operator", "trainer", "jobset")
NOTES = """\
  Counted are training pods: ours has one more in each job, for the rendezvous, theirs a service for each.
  Each has its default flags, but for the scheme and the namespace that training-operator looks after; it then
  sends 20 requests per second for pods and services. Trainer creates a JobSet for each job, whose controller,
  counted with it, creates a Job, whose pods Kubernetes' job controller creates, 20 requests per second. Its
  validating webhooks are left out. Requests are those about jobs, without watches and without the election
  that only ours holds, and without those of Kubernetes' own controllers. The API server's flow control
  exempts all (system:masters).
  If the cores are busy, the limit is the cluster on them, not the operator."""


@contextmanager
def _prepared(options: argparse.Namespace, contenders: Sequence[Contender]) -> Iterator[None]:
    """Provide cluster, CRDs and programs; afterwards remove what did not exist before."""
    if os.environ.get("KUBECONFIG", str(KUBECONFIG)) != str(KUBECONFIG):
        raise ClusterError("KUBECONFIG names another cluster; unset it: this needs the clone's own")
    created = not KUBECONFIG.exists()
    if created:
        cluster.up()
    try:
        for module in PEER_MODULES if options.rounds else ():
            binaries.link(binaries.build(module))
        with _crds(contenders if options.rounds else contenders[:1]):
            yield
    finally:
        if created:
            cluster.down()


@contextmanager
def _fake_nodes(count: int, num_gpus: int) -> Iterator[None]:
    """Provide fake nodes; afterwards remove them, unless there were some before, which keep their GPUs."""
    existed = processes.is_running(fake_nodes.PROCESS)
    try:
        fake_nodes.start(count, num_gpus)
        yield
    finally:
        if not existed and processes.is_running(fake_nodes.PROCESS):
            fake_nodes.stop()


@contextmanager
def _crds(contenders: Sequence[Contender]) -> Iterator[None]:
    """Install the contenders' CRDs; afterwards delete those that did not exist before."""
    created = []
    try:
        for file in (file for contender in contenders for file in contender.crds()):
            flag = f"--filename={file}"
            if not kubectl("get", "--ignore-not-found", flag):
                created.append(flag)
            kubectl("apply", "--server-side", "--force-conflicts", flag)
        kubectl.wait_for_crds()
        yield
    finally:
        for flag in created:
            kubectl("delete", flag, "--timeout=120s", seconds=130)


def _take_turns(
    contenders: Sequence[Contender], turns: Mapping[str, list[Turn]], options: argparse.Namespace
) -> None:
    for number in range(options.rounds):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            log(f"round {number + 1} of {options.rounds}: {contender.title}")
            turn = take_turn(contender, options)
            log(", ".join(f"{measure} {value:.1f}" for measure, value in turn.items()))
            turns[contender.title].append(turn)


def _report(turns: Mapping[str, list[Turn]], options: argparse.Namespace) -> None:
    ours, *others = turns.values()
    rows = []
    for measure in ours[0]:
        columns = [[turn[measure] for turn in each] for each in (ours, *others)]
        own = median(columns[0])
        ratios = [f"{median(each) / own:.2f}" if own else "-" for each in columns[1:]]
        rows.append([measure, *(spread(each, 1, 1) for each in columns), *ratios])
    print_table(
        f"{options.jobs} jobs x {options.pods} pods on {options.nodes} fake nodes,"
        f" {len(ours)} rounds in turn: median (least-most)",
        ["", *turns, *(f"{title} / ours" for title in list(turns)[1:])],
        rows,
    )
    print(NOTES)


def _report_scale(measured: Measured, options: argparse.Namespace) -> None:
    print_table(
        f"fluxtrain alone: {options.scale_jobs} jobs x {options.pods} pods"
        f" on {options.scale_nodes} fake nodes",
        ["", "fluxtrain"],
        [[measure, f"{value:.1f}"] for measure, value in measured.items()],
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.operator", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--pods", type=int, default=8, help="training pods of each job")
    parser.add_argument("--nodes", type=int, default=400, help="fake nodes, of eight GPUs each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the pods of a turn")
    parser.add_argument("--scale-jobs", type=int, default=1000, help="of ours alone; 0: none")
    parser.add_argument("--scale-nodes", type=int, default=100, help="of 96 GPUs each")
    parser.add_argument("--scale-timeout", type=float, default=900)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run all operators in turn and print one table; return 1 on failure."""
    options = _parse(arguments)
    contenders = [each(NAMESPACE) for each in (Fluxtrain, TrainingOperator, KubeflowTrainer)]
    turns: dict[str, list[Turn]] = {contender.title: [] for contender in contenders}
    try:
        with _prepared(options, contenders):
            if options.scale_jobs:
                log("ours alone")
                with _fake_nodes(options.scale_nodes, SCALE_GPUS):
                    _report_scale(scale(Fluxtrain(NAMESPACE), options), options)
            if options.rounds:
                with _fake_nodes(options.nodes, fake_gpus.NUM_GPUS):
                    _take_turns(contenders, turns, options)
    except ClusterError as error:
        log(f"error: {error}")
        return error.exit_code
    finally:
        if all(turns.values()):  # also of an interrupted run
            _report(turns, options)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
