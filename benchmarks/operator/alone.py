"""Our operator among very many jobs, on an API server that only keeps objects: no root, no cluster.

So that the operator is what limits, and neither a scheduler nor etcd. The same three questions as in
`benchmarks.operator.scale`: pods per second from the first to the last, an idle minute, a restart. And a
fourth: the leader is killed while another replica stands by.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.operator import crowd
from benchmarks.operator.fake_api_server import FakeApiServer, serving
from benchmarks.operator.part import Part
from benchmarks.operator.turn import cpu_seconds, peak_bytes
from benchmarks.table import print_table
from cluster.free_ports import free_port

PARTS = 8
SETTLE_SECONDS, IDLE_SECONDS = 60, 60
KUBELET_SECONDS = 0.5
"""From a pod's creation to its running."""


class Busy(FakeApiServer):
    """Runs every pod, and notes when it was created."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[float] = []
        self.num_running = 0

    def put(self, plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        made = super().put(plural, manifest)
        if plural == "pods" and "status" not in manifest:
            self.made.append(monotonic())
            node = f"node-{len(self.made) % 1000}"
            asyncio.get_running_loop().call_later(KUBELET_SECONDS, self._run, made, node)
        return made

    def _run(self, pod: dict[str, Any], node: str) -> None:
        self.num_running += 1
        self.put("pods", crowd.running(pod, node))


async def measure(options: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Return the rows of the table."""
    server, rows = Busy(), list[list[str]]()

    def note(what: str, value: float) -> None:
        rows.append([what, f"{value:.3g}" if value < 10 else f"{value:.1f}"])
        print(f"{rows[-1][0]}: {rows[-1][1]}", file=sys.stderr, flush=True)

    def note_all(values: Mapping[str, float]) -> None:
        for what, value in values.items():
            note(what, value)

    num_all, port = options.jobs * (options.pods + 1), free_port()
    for index in range(options.nodes):
        server.put("nodes", crowd.node(f"node-{index}"))
    async with serving(server, folder) as kubeconfig:
        process = await _start(kubeconfig, port)
        part = Part(port, "creation")
        await _until(lambda: bool(server.of("leases").objects))
        began = monotonic()
        for index in range(options.jobs):
            server.put("fluxtrainings", crowd.job(f"job-{index}", options.pods))
            await asyncio.sleep(0)
        await _until(lambda: server.num_running >= num_all)
        size = num_all // PARTS
        edges = [began, *(server.made[size * part - 1] for part in range(1, PARTS + 1))]
        note("all pods created, s", server.made[-1] - began)
        note("pods created per second", num_all / (server.made[-1] - began))
        note("the same, slowest eighth", min(size / (b - a) for a, b in pairwise(edges)))
        note(
            "CPU of the operator until all run, ms per pod",
            1000 * cpu_seconds(process.pid) / num_all,
        )
        note_all(part.reconciles())
        await asyncio.sleep(SETTLE_SECONDS)
        before, part = cpu_seconds(process.pid), Part(port, "idle")
        await asyncio.sleep(IDLE_SECONDS)
        note_all({**part.requests(options.jobs), **part.reconciles()})
        note("CPU of an idle minute, s", cpu_seconds(process.pid) - before)
        note("peak resident memory, MiB", peak_bytes(process.pid) / 2**20)
        process.kill()
        await process.wait()
        lost, pods = (crowd.NAMESPACE, f"job-{options.jobs - 1}-0"), server.of("pods").objects
        server.remove("pods", *lost)
        server.oldest, num_made = server.version, len(server.made)
        server.of("leases").objects.clear()
        server.requests.clear()
        starting = monotonic()
        process = await _start(kubeconfig, port)
        part = Part(port, "restart")
        await _until(lambda: lost in pods)
        replaced, cpu = monotonic(), cpu_seconds(process.pid)
        note("restart: from its start to the Lease, s", _writes_of_lease(server)[0] - starting)
        note(
            "restart: from the Lease to the lost pod's successor, s", _since_lease(server, replaced)
        )
        note("restart: CPU of the operator until then, s", cpu)
        await asyncio.sleep(SETTLE_SECONDS)
        note("restart: CPU of the next minute, s", cpu_seconds(process.pid) - cpu)
        note("restart: longest interval of two renewals, s", _longest_interval(server))
        note_all(part.reconciles())
        note("restart: peak resident memory, MiB", peak_bytes(process.pid) / 2**20)
        note("restart: pods created", len(server.made) - num_made)
        watches = len(server.watching)
        standby = await _start(kubeconfig)
        await _until(lambda: len(server.watching) >= 2 * watches)
        await asyncio.sleep(IDLE_SECONDS)
        note("standby: peak resident memory, MiB", peak_bytes(standby.pid) / 2**20)
        process.kill()
        await process.wait()
        cpu, num_made = cpu_seconds(standby.pid), len(server.made)
        server.remove("pods", *lost)
        server.requests.clear()
        _release_lease(server)
        await _until(lambda: lost in pods)
        replaced = monotonic()
        note(
            "standby: from the Lease to the lost pod's successor, s", _since_lease(server, replaced)
        )
        note("standby: CPU from the leader's end until then, s", cpu_seconds(standby.pid) - cpu)
        await asyncio.sleep(SETTLE_SECONDS)
        note("standby: longest interval of two renewals, s", _longest_interval(server))
        note("standby: peak resident memory as the leader, MiB", peak_bytes(standby.pid) / 2**20)
        note("standby: pods created", len(server.made) - num_made)
        process = standby
        stopping = monotonic()
        process.terminate()
        await process.wait()
        note("stopped after, s", monotonic() - stopping)
    return rows


def _writes_of_lease(server: FakeApiServer) -> list[float]:
    """Return the times at which an operator wrote the Lease of its replicas, not a claim of jobs."""
    claimed = f"/{crowd.NAMESPACE}/"
    writes = (r for r in server.requests if r.method != "GET" and "/leases" in r.path)
    return [write.at for write in writes if claimed not in write.path]


def _since_lease(server: FakeApiServer, now: float) -> float:
    """Return the seconds from the first write of the Lease to ``now``."""
    return now - _writes_of_lease(server)[0]


def _longest_interval(server: FakeApiServer) -> float:
    return max(later - sooner for sooner, later in pairwise(_writes_of_lease(server)))


def _release_lease(server: FakeApiServer) -> None:
    """Clear the holder, as a leader does that was asked to stop; a killed one's Lease expires after 15 s."""
    leases = server.of("leases").objects.items()
    (lease,) = (lease for (namespace, _), lease in leases if namespace != crowd.NAMESPACE)
    server.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})


async def _start(kubeconfig: Path, port: int = 0) -> asyncio.subprocess.Process:
    argv = ["-m", "fluxtrain_operator", f"--image={crowd.IMAGE}", "--address=127.0.0.1"]
    argv.append(f"--port={port}")
    env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    return await asyncio.create_subprocess_exec(sys.executable, *argv, env=env)


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.02)


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(prog="benchmarks.operator.alone", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=8, help="training pods of each job")
    parser.add_argument("--nodes", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(options, Path(folder)))
    print_table(
        f"{options.jobs} jobs x {options.pods} pods and a rendezvous each, {options.nodes} nodes,"
        " an API server that only keeps objects",
        ["", "fluxtrain"],
        rows,
    )


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
