"""Our operator with many jobs: pods created per second, an idle minute, a restart."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from time import monotonic, sleep

from benchmarks.operator.contender import Fluxtrain
from benchmarks.operator.part import Part
from benchmarks.operator.turn import (
    Pods,
    cores,
    cpu_seconds,
    create,
    in_namespace,
    peak_bytes,
    running,
    wait_for_pods,
    watched,
)
from cluster import ClusterError, processes
from cluster.console import log, wait_until
from cluster.kubectl import kubectl

Measured = Mapping[str, float]

PARTS = 8
"""Parts of the pods, in order of creation, whose rates are printed."""
SETTLE_SECONDS = 60.0
"""After the last pod runs, until the operator has updated every status."""
IDLE_SECONDS = 60.0


def scale(contender: Fluxtrain, options: argparse.Namespace) -> Measured:
    """Create the jobs, wait a minute, kill the operator and a pod; return the measurements."""
    jobs = [contender.job(f"job-{index}", options.pods) for index in range(options.scale_jobs)]
    expected = options.scale_jobs * options.pods
    with in_namespace(contender.namespace), running(contender) as pid:
        starting = Part(contender.port, "creation")
        with watched(contender) as pods:
            began = monotonic()
            create(jobs, contender.namespace)
            wait_for_pods(pods, expected, contender, options.scale_timeout)
        creation = {
            **_rates(contender, pods, began),
            "CPU of the operator until all run, s": cpu_seconds(pid),
            **starting.reconciles(),
        }
        log(f"all pods run: {creation}")
        sleep(SETTLE_SECONDS)
        idle = _idle(pid, contender.port, options.scale_jobs)
        log(f"idle: {idle}")
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not processes.is_running(contender.process),
            "the operator is killed",
            seconds=30,
        )
        return {**creation, **idle, **_restarted(contender, f"job-{options.scale_jobs - 1}-0")}


def _rates(contender: Fluxtrain, pods: Pods, began: float) -> Measured:
    """Return pods per second of all, and of the slowest part, by creation timestamps."""
    times = sorted(_created(contender))
    size = len(times) // PARTS
    edges = [times[0], *(times[size * part - 1] for part in range(1, PARTS + 1))]
    rates = [size / max(1.0, last - first) for first, last in pairwise(edges)]
    log("pods per second, an eighth after the other: " + ", ".join(f"{r:.0f}" for r in rates))
    return {
        "all pods created, s": times[-1] - times[0],
        "pods created per second": len(times) / max(1.0, times[-1] - times[0]),
        "the same, slowest eighth": min(rates),
        "all pods running, s": max(pods.running.values()) - began,
    }


def _created(contender: Fluxtrain) -> list[float]:
    """Return the Unix times, in whole seconds, at which the training pods were created."""
    fields = '{range .items[*]}{.metadata.name} {.metadata.creationTimestamp}{"\\n"}{end}'
    where = f"--namespace={contender.namespace}"
    lines = kubectl("get", "pods", where, f"--output=jsonpath={fields}", seconds=300).splitlines()
    rows = (line.split() for line in lines)
    return [
        datetime.fromisoformat(time).timestamp()
        for name, time in rows
        if contender.is_training_pod(name)
    ]


def _idle(pid: int, port: int, num_jobs: int) -> Measured:
    part = Part(port, "idle")
    before, ticks, began = cpu_seconds(pid), cores(), monotonic()
    sleep(IDLE_SECONDS)
    used = {name: value - ticks[name] for name, value in cores().items()}
    return {
        "CPU of an idle minute, s": (cpu_seconds(pid) - before) * 60 / (monotonic() - began),
        **part.requests(num_jobs),
        **part.reconciles(),
        "cores busy with anything meanwhile, %": 100
        * (1 - used["cores", "idle"] / used["cores", "all"]),
        "peak resident memory, MiB": peak_bytes(pid) / 2**20,
    }


def _restarted(contender: Fluxtrain, lost: str) -> Measured:
    """Delete a pod while no operator runs; return how long the next operator takes to replace it."""
    where = f"--namespace={contender.namespace}"
    before = _uid(contender, lost)
    kubectl("delete", "pod", lost, where, "--now")
    began = monotonic()
    contender.start()
    part, led = Part(contender.port, "restart"), monotonic()
    wait_until(
        lambda: _uid(contender, lost) not in ("", before),
        f"{lost} is replaced",
        seconds=600,
        every=0.1,
    )
    replaced = monotonic()
    pid = processes.pid_of(contender.process)
    if pid is None:
        raise ClusterError(f"{contender.title} has ended")
    cpu = cpu_seconds(pid)
    sleep(SETTLE_SECONDS)
    return {
        "restart: from its start to the Lease, s": led - began,
        "restart: from the Lease to the lost pod's successor, s": replaced - led,
        "restart: CPU until then, s": cpu,
        "restart: CPU of the first minute after, s": cpu_seconds(pid) - cpu,
        **part.reconciles(),
        "restart: peak resident memory, MiB": peak_bytes(pid) / 2**20,
    }


def _uid(contender: Fluxtrain, pod: str) -> str:
    flags = ("--ignore-not-found", "--output=jsonpath={.metadata.uid}")
    return kubectl("get", "pod", pod, f"--namespace={contender.namespace}", *flags).strip()
