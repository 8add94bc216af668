"""Simulates a job of 64 nodes with 8 GPUs for 30 days with the operator's own planner; prints its goodput.

    python -m benchmarks.operator.month [--days 30] [--seeds 3] [--start SECONDS …]

Faults come at the rate that Meta published for 1,024 GPUs (one in 7.9 hours), in proportion to the number of
GPUs. Half of them end a process, the others a node. Beside it: a system that restarts every pod from storage
once Kubernetes reports a node as lost, on the same faults.

Times of recovery are parameters, printed as well. Each month is simulated with assumed ones and with those
that `make faults` measured, in docs/faults.md: of a small model on a small cluster, so they bound what is
lost from below. ``--start`` adds months with other times from the detection to the first step.
"""

from __future__ import annotations

import argparse
import heapq
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import MembersReport, Progress
from fluxtrain_operator.planner.guard import Delete
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.planner.plan import load, plan

HOUR, DAY = 3600.0, 86_400.0
NUM_NODES, NUM_SPARES, GPUS = 64, 2, 8
FAULTS_PER_GPU_SECOND = 1 / (7.9 * HOUR * 1024)
NODE_SHARE = 0.5
"""Of the faults that end a node."""
REPAIR_SECONDS = 4 * HOUR
SAMPLES_PER_STEP, SAMPLES_PER_SECOND = 2048, 4096.0


@dataclass(frozen=True)
class Recovery:
    """How a system recovers, in seconds."""

    name: str
    detect_process: float
    detect_node: float
    """From the loss of a node until the others stop."""
    replace: float
    """From then until a replacement pod runs; training waits for it if it is not elastic."""
    start: float
    """From then to the first step: process start, compilation from a cache, loading."""
    lost: float
    """Between two saved states: half of it is lost on average."""
    is_elastic: bool


OURS = Recovery("fluxtrain, memory", 1, 10, 60, 120, 20, is_elastic=True)
_FAULTS = Path(__file__).parents[2] / "docs" / "faults.md"
_PROCESS_ROW, _NODE_ROW = "rank-killed", "power-off"
_NUMBER = re.compile(r"\d+(\.\d+)?")


def measured(text: str) -> Recovery:
    """Return the recovery by the rows ``rank-killed`` and ``power-off`` of docs/faults.md.

    A lost step counts as one of the simulated job. A pod's replacement takes at most the whole pause.
    """
    process, node = _row(text, _PROCESS_ROW), _row(text, _NODE_ROW)
    lost = max(process["lost"], node["lost"]) * SAMPLES_PER_STEP / SAMPLES_PER_SECOND
    starts = process["pause"] - process["detected"], node["pause"] - node["replaced"]
    return Recovery(
        "fluxtrain, measured",
        detect_process=process["detected"],
        detect_node=node["replaced"],
        replace=node["pause"],
        start=max(starts),
        lost=2 * lost,
        is_elastic=True,
    )


def _row(text: str, name: str) -> dict[str, float]:
    """Return the numbers of the row ``name`` that begin a cell, by column."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    header = next(row for row in rows if row[0] == "fault")
    (row,) = (row for row in rows if row[0].startswith(f"`{name}`: "))
    cells = zip(header, row, strict=True)
    return {column: float(n[0]) for column, cell in cells if (n := _NUMBER.match(cell))}


OURS_STORAGE = Recovery("fluxtrain, storage", 1, 10, 60, 150, 600, is_elastic=True)
PEER = Recovery("restart from storage", 5, 340, 90, 150, 600, is_elastic=False)
"""340 s: 40 until a node is not ready, 300 until its pods are evicted, Kubernetes' defaults."""


@dataclass
class Training:
    """Progress of the ranks, and where the time went."""

    recovery: Recovery
    ready_at: float = 0.0
    """When the present world makes its first step."""
    updated: float = 0.0
    size: int = NUM_NODES
    done: float = 0.0
    """Seconds of work at full size, each counted once."""
    lost: Counter[str] = field(default_factory=Counter)

    def advance(self, now: float) -> None:
        """Work until ``now``."""
        begin = max(self.updated, min(self.ready_at, now))
        self.lost["restart"] += begin - self.updated
        worked = (now - begin) * self.size / NUM_NODES
        self.lost["fewer nodes"] += now - begin - worked
        self.done += worked
        self.updated = now

    def interrupt(self, now: float, seconds: float, size: int, repeats: bool = True) -> None:
        """Lose the work since the last saved state, and step again ``seconds`` later on ``size`` nodes."""
        self.advance(now)
        if repeats:
            repeated = min(self.done, self.recovery.lost / 2)
            self.done -= repeated
            self.lost["repeated steps"] += repeated
        self.ready_at, self.size = max(self.ready_at, now + seconds), size


class Month:
    """The cluster, the job and the planner; times are seconds from the start."""

    def __init__(self, days: float, seed: int, recovery: Recovery = OURS) -> None:
        """Start with all nodes ready and no pod; the planner's job recovers as ``recovery`` tells."""
        self.end, self.chance = days * DAY, random.Random(seed)
        self.now, self.epoch, self.numbers = 0.0, 1_800_000_000.0, count()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes = {f"node-{n}": NodeView(f"node-{n}") for n in range(NUM_NODES + NUM_SPARES)}
        self.down = set[str]()
        self.pods = dict[str, Pod]()
        self.applied = dict[tuple[str, str], str]()
        self.ours = Training(recovery)
        self.others = [Training(OURS_STORAGE), Training(PEER)]
        self.happened = Counter[str]()
        self.job = load(_manifest(), "example.org/trainer:1")
        self.wake = 0.0

    def run(self) -> None:
        """Simulate to the end."""
        self.at(0.0, self.reconcile)
        self.at(self._next_fault(), self.fault)
        while self.queue and self.queue[0][0] < self.end:
            self.now, _, act = heapq.heappop(self.queue)
            act()
        for training in [self.ours, *self.others]:
            training.advance(self.end)

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Call ``act`` at ``time``."""
        heapq.heappush(self.queue, (time, next(self.numbers), act))

    # --- faults

    def _next_fault(self) -> float:
        return self.now + self.chance.expovariate(FAULTS_PER_GPU_SECOND * NUM_NODES * GPUS)

    def fault(self) -> None:
        """End a process or a node that trains."""
        self.at(self._next_fault(), self.fault)
        is_node, place = self.chance.random() < NODE_SHARE, self.chance.random()
        training = [pod for pod in self._world() if pod.node]
        if not training:
            return
        node = training[int(place * len(training))].node  # the same faults whatever the recovery
        self.happened["nodes" if is_node else "processes"] += 1
        for each in [self.ours, *self.others]:
            _recover(each, self.now, is_node, is_planned=each is self.ours)
        if is_node:
            self._power_off(node)

    def _power_off(self, node: str) -> None:
        self.down.add(node)
        self.at(self.now + self.ours.recovery.detect_node, self.reconcile)
        self.at(self.now + 40, lambda: self._set_ready(node, ready=False))
        self.at(self.now + REPAIR_SECONDS, lambda: self._repair(node))

    def _repair(self, node: str) -> None:
        self.down.discard(node)
        for name, pod in list(self.pods.items()):
            if pod.node == node and (pod.deleting or pod.running):
                del self.pods[name]
        self._set_ready(node, ready=True)

    def _set_ready(self, node: str, ready: bool) -> None:
        self.nodes[node] = NodeView(node, ready=ready, since=self.epoch + self.now)
        self.reconcile()

    # --- the operator

    def reconcile(self) -> None:
        """Plan and act as the operator does."""
        result = plan(self.job, self._observed(), self.epoch + self.now)
        training = self.job.training.model_copy(update={"status": result.status})
        self.job = replace(self.job, training=training)
        for act in result.delete:
            self._delete(act)
        for manifest in result.create:
            self._create(manifest)
        if result.requeue_after is not None and self.wake <= self.now:
            self.wake = self.now + max(result.requeue_after, 60.0)
            self.at(self.wake, self.reconcile)

    def _observed(self) -> Observed:
        training = [pod for pod in self.pods.values() if pod.name != names.rendezvous("job")]
        steps = self.now > self.ours.ready_at
        self.ours.advance(self.now)
        progress = None
        if steps and self._world():
            status = ProgressStatus(
                step=int(self.ours.done * SAMPLES_PER_SECOND / SAMPLES_PER_STEP) + 1,
                samplesPerSecond=SAMPLES_PER_SECOND,
                lastStepTime=stamp(self.epoch + self.now),
            )
            progress = Progress(status, num_nodes=len(self._world()))
        alive = frozenset(pod.uid for pod in self._world())
        lost = frozenset(pod.uid for pod in training if pod.running and pod.node in self.down)
        return Observed(
            pods=tuple(sorted(training, key=lambda pod: pod.index)),
            rendezvous=self.pods.get(names.rendezvous("job")),
            progress=progress,
            any_progress=progress,
            heard=MembersReport(alive, lost),
            nodes=self.nodes,
            applied=self.applied,
        )

    def _world(self) -> list[Pod]:
        """Return the pods whose trainers run."""
        return [
            pod
            for pod in self.pods.values()
            if pod.running and pod.node not in self.down and pod.name != names.rendezvous("job")
        ]

    def _delete(self, act: Delete) -> None:
        pod = self.pods.get(act.name)
        if act.kind != "Pod" or pod is None:
            return
        self.happened[f"pods deleted on {'lost' if pod.node in self.down else 'good'} nodes"] += 1
        if pod.node in self.down and act.grace_seconds != 0:
            self.pods[act.name] = replace(pod, deleting=True, deletion_deadline=None)
        else:
            del self.pods[act.name]

    def _create(self, manifest: Manifest) -> None:
        notes = manifest["metadata"]["annotations"]
        if manifest["kind"] != "Pod":
            key = manifest["kind"], manifest["metadata"]["name"]
            self.applied[key] = notes.get(names.ANNOTATION_APPLIED, "")
            return
        manifest["metadata"]["uid"] = f"uid-{next(self.numbers)}"
        pod = Pod.from_object(manifest)
        self.pods[pod.name] = pod
        wait = self.ours.recovery.replace if self.now else 1.0
        self.at(self.now + wait, lambda: self._start(pod))

    def _start(self, pod: Pod) -> None:
        """Run ``pod`` on a free node, or try again a minute later."""
        if self.pods.get(pod.name) != pod:
            return
        used = {other.node for other in self.pods.values() if other.name != names.rendezvous("job")}
        free = [n for n, v in self.nodes.items() if v.ready and n not in self.down | used]
        if not free:
            self.at(self.now + 60, lambda: self._start(pod))
            return
        started = self.epoch + self.now
        self.pods[pod.name] = replace(
            pod, node=free[0], phase="Running", ready=True, created=started, started=started
        )
        size = len(self._world())
        if pod.name != names.rendezvous("job") and self.now > 60 and size > self.ours.size:
            self.happened["nodes joined"] += 1
            self.ours.interrupt(self.now, self.ours.recovery.start, size, repeats=False)
        self.reconcile()


def _recover(training: Training, now: float, is_node: bool, is_planned: bool) -> None:
    """Recover from a fault; the pods of a job that ``is_planned`` come back as the planner decides."""
    recovery = training.recovery
    detect = recovery.detect_node if is_node else recovery.detect_process
    wait = recovery.replace if is_node and not recovery.is_elastic else 0.0
    shrinks = is_node and recovery.is_elastic
    size = training.size - 1 if shrinks and is_planned else training.size
    training.interrupt(now, detect + wait + recovery.start, size)
    if shrinks and not is_planned:  # the others have spare nodes at all times
        training.interrupt(now, detect + 2 * recovery.start, size, repeats=False)


def _manifest() -> Manifest:
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": "job", "namespace": "ns", "uid": "uid", "generation": 1},
        "spec": {
            "nodes": {"min": NUM_NODES - 8, "max": NUM_NODES},
            "gpusPerNode": GPUS,
            "run": {
                "preset": "mlperf-schnell",
                "schedule": {"global_batch_size": SAMPLES_PER_STEP},
                "logging": {"mlperf": {"division": "open"}},  # a closed run is not elastic
            },
        },
    }


def main() -> None:
    """Print the goodput of each system, its losses by cause, and what the planner did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start", type=float, nargs="*", default=[], metavar="SECONDS")
    arguments = parser.parse_args()
    ours = [OURS, measured(_FAULTS.read_text(encoding="utf-8"))]
    ours += [replace(OURS, name=f"start in {start:g} s", start=start) for start in arguments.start]
    for each in (*ours, OURS_STORAGE, PEER):
        print(each)
    for seed in range(arguments.seeds):
        months = [Month(arguments.days, seed, recovery) for recovery in ours]
        for month in months:
            month.run()
        _print_seed(seed, months)


def _print_seed(seed: int, months: list[Month]) -> None:
    first = months[0]
    status = first.job.status
    print(f"\nseed {seed}: {dict(first.happened)}")
    print(f"  phase {status.phase}, attempt {status.attempt}, restarts {status.restarts}")
    for training in [*(month.ours for month in months), *first.others]:
        causes = ", ".join(
            f"{cause} {seconds / first.end:.2%}" for cause, seconds in training.lost.items()
        )
        name = training.recovery.name
        print(f"  {name:22s} goodput {training.done / first.end:.2%} ({causes})")


if __name__ == "__main__":
    main()
