"""One turn of one contender: create its jobs, wait until all their pods run, and measure."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep

from benchmarks.operator.contender import Contender
from cluster import ClusterError, processes
from cluster.console import wait_until
from cluster.kubectl import Manifest, kubectl
from cluster.layout import KUBECONFIG
from cluster.nodes import fake_nodes
from cluster.programs import binaries

NUM_KUBECTL = 4
QUIET_SECONDS = 3.0
"""After the last pod runs: status updates are measured too."""
CLUSTER_PARTS = {
    "CPU of API server and etcd, s": ("kube-apiserver", "etcd"),
    "CPU of scheduler, controllers, KWOK, s": (
        "kube-scheduler",
        "kube-controller-manager",
        fake_nodes.PROCESS,
    ),
}

Counters = Mapping[tuple[str, str], float]
"""Counters: metrics by name and ``le``, CPU seconds of processes, ticks of the cores."""
Turn = Mapping[str, float]
"""The measurements of one contender in one round, by row of the table."""


@dataclass
class Pods:
    """When each pod was first listed and first running, in seconds of the monotonic clock."""

    is_counted: Callable[[str], bool]
    seen: dict[str, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)

    def read(self, lines: Iterator[str]) -> None:
        """Read the output of ``kubectl get pods --watch``: NAME READY STATUS and more."""
        for line in lines:
            name, _, status, *_ = line.split()
            if self.is_counted(name):
                now = monotonic()
                self.seen.setdefault(name, now)
                if status == "Running":
                    self.running.setdefault(name, now)


def take_turn(contender: Contender, options: argparse.Namespace) -> Turn:
    """Start the operator, create the jobs, wait until all pods run, clean up."""
    jobs = [contender.job(f"job-{index}", options.pods) for index in range(options.jobs)]
    expected = options.jobs * options.pods
    with in_namespace(contender.namespace), running(contender):
        with watched(contender) as pods:
            before = _counters(contender)
            began = monotonic()
            create(jobs, contender.namespace)
            applied = monotonic() - began
            wait_for_pods(pods, expected, contender, options.timeout)
            ticks = cores()
        sleep(QUIET_SECONDS)
        after = {**_counters(contender), **ticks}
        peak = sum(map(peak_bytes, pids(contender)))
    used = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {
        "kubectl create, s": applied,
        **_times(pods, began, expected),
        **_effort(contender, used, options.jobs),
        "peak resident memory, MiB": peak / 2**20,
        **_shares(used),
    }


def _times(pods: Pods, began: float, expected: int) -> Turn:
    created = max(pods.seen.values()) - began
    return {
        "all pods created, s": created,
        "all pods running, s": max(pods.running.values()) - began,
        "pods created per second": expected / created,
    }


def _effort(contender: Contender, used: Counters, num_jobs: int) -> Turn:
    name = contender.reconcile_seconds
    buckets = {float(le): value for (metric, le), value in used.items() if metric == name}
    return {
        "reconcile p50, ms": 1000 * quantile(buckets, 0.5),
        "reconcile p99, ms": 1000 * quantile(buckets, 0.99),
        "API requests per job": used.get((contender.requests, ""), 0.0) / num_jobs,
        "CPU of the operator, s": used["cpu", contender.process],
    }


def _shares(used: Counters) -> Turn:
    """Return the CPU use of other programs, which may be the bottleneck."""
    parts = {
        title: sum(used["cpu", name] for name in names) for title, names in CLUSTER_PARTS.items()
    }
    busy = 1 - used["cores", "idle"] / used["cores", "all"]
    return {**parts, "cores busy with anything, %": 100 * busy}


def quantile(buckets: Mapping[float, float], part: float) -> float:
    """Return a quantile of a histogram from its cumulative ``buckets``, as Prometheus estimates it."""
    edges = sorted(buckets)
    rank = part * buckets[edges[-1]] if edges else 0.0
    for low, high in pairwise([0.0, *edges]):
        below = buckets.get(low, 0.0)
        if buckets[high] >= rank > below:
            inside = (rank - below) / (buckets[high] - below)
            return low if high == float("inf") else low + inside * (high - low)
    return float("nan")


def create(jobs: Sequence[Manifest], namespace: str) -> None:
    """Create ``jobs`` with several kubectl in parallel: one mostly waits for the server."""
    shares = [jobs[start::NUM_KUBECTL] for start in range(NUM_KUBECTL)]

    def create(share: Sequence[Manifest]) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": share})
        kubectl(
            "create", "--validate=false", f"--namespace={namespace}", "-f-", stdin=text, seconds=300
        )

    with ThreadPoolExecutor(NUM_KUBECTL) as pool:
        list(pool.map(create, filter(None, shares)))


def wait_for_pods(pods: Pods, expected: int, contender: Contender, seconds: float) -> None:
    def done() -> bool:
        processes.require_running(contender.process)
        return len(pods.running) >= expected

    try:
        wait_until(done, "all pods running", seconds=seconds)
    except ClusterError as error:
        count = f"{len(pods.seen)} of {expected} pods created, {len(pods.running)} running"
        raise ClusterError(f"{contender.title}: {error}; {count}") from None


@contextmanager
def in_namespace(name: str) -> Iterator[None]:
    """Create a namespace; afterwards delete it and wait until it is gone."""
    delete = ("delete", "namespace", name, "--ignore-not-found", "--timeout=600s")
    kubectl(*delete, seconds=620)  # left by a killed run
    kubectl("create", "namespace", name)
    try:
        yield
    finally:
        kubectl(*delete, seconds=620)


@contextmanager
def running(contender: Contender) -> Iterator[int]:
    """Run the operator; yield its process id."""
    contender.stop()  # left by a killed run
    try:
        contender.start()
        pid = processes.pid_of(contender.process)
        assert pid is not None
        yield pid
    finally:
        contender.stop()


@contextmanager
def watched(contender: Contender) -> Iterator[Pods]:
    """Yield the times of the namespace's pods, updated during the block."""
    pods, ended = Pods(contender.is_training_pod), threading.Event()
    watches: list[subprocess.Popen[str]] = []

    def watch() -> None:
        while not ended.is_set():  # the API server may end any watch
            watches.append(_watch(contender.namespace))
            assert watches[-1].stdout is not None
            pods.read(watches[-1].stdout)

    reader = threading.Thread(target=watch)
    reader.start()
    try:
        yield pods
    finally:
        ended.set()
        while reader.is_alive():  # it may just have started another watch
            for process in watches:
                process.terminate()
            reader.join(0.2)


def _watch(namespace: str) -> subprocess.Popen[str]:
    """Start a kubectl that prints a line for each pod of ``namespace`` and each change."""
    kubectl_path = str(binaries.path("kubectl"))
    return subprocess.Popen(
        [kubectl_path, "get", "pods", "--watch", "--no-headers", f"--namespace={namespace}"],
        env={**os.environ, **processes.NO_PROXY, "KUBECONFIG": str(KUBECONFIG)},
        stdout=subprocess.PIPE,
        text=True,
    )


def pids(contender: Contender) -> list[int]:
    """Return the process ids of the operator; ClusterError if one has ended."""
    for name in contender.process_names:
        processes.require_running(name)
    found = (processes.pid_of(name) for name in contender.process_names)
    return [pid for pid in found if pid is not None]


def _counters(contender: Contender) -> Counters:
    """Return the operator's metrics and the CPU seconds of all programs."""
    counters = contender.samples()
    counters["cpu", contender.process] = sum(map(cpu_seconds, pids(contender)))
    for name in sum(CLUSTER_PARTS.values(), ()):
        part = processes.pid_of(name)
        counters["cpu", name] = 0.0 if part is None else cpu_seconds(part)
    return {**counters, **cores()}


def cores() -> Counters:
    """Return the total and the idle ticks of all cores."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    ticks = [int(number) for number in line.split()[1:9]]
    return {("cores", "all"): sum(ticks), ("cores", "idle"): ticks[3] + ticks[4]}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak.split()[1])
