"""The operator process with many jobs: its CPU time grows linearly with their number."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from benchmarks import crowd
from benchmarks.fake_api_server import FakeApiServer, serving
from kubernetes.aio.config import kube_config

from fluxtrain_operator import operate  # noqa: F401  # forked processes need not import it
from fluxtrain_operator.__main__ import main

NUM_PODS = 8
TIMEOUT_SECONDS = 120
LEASE = ("default", "fluxtrain-operator")


def lead(kubeconfig: Path) -> None:
    """Run an operator in a forked process, which has imported everything already."""
    gc.freeze()
    warnings.simplefilter("ignore")
    os.environ["KUBECONFIG"] = kube_config.KUBE_CONFIG_DEFAULT_LOCATION = str(kubeconfig)
    sys.argv[1:] = [f"--image={crowd.IMAGE}", "--address=127.0.0.1", "--port=0"]
    sys.exit(main())


@asynccontextmanager
async def operator(server: FakeApiServer, folder: Path) -> AsyncIterator[BaseProcess]:
    """Yield an operator that holds the Lease."""
    async with serving(server, folder) as kubeconfig:
        process = multiprocessing.get_context("fork").Process(target=lead, args=(kubeconfig,))
        process.start()
        try:
            await until(lambda: LEASE in server.of("leases").objects, process)
            yield process
        finally:
            process.kill()
            process.join()


async def until(holds: Callable[[], bool], process: BaseProcess) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not holds():
            assert process.is_alive(), "the operator has exited"
            await asyncio.sleep(0.02)


def cpu_seconds(process: BaseProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_restart(num_jobs: int, folder: Path) -> float:
    """Return the CPU seconds from the Lease until a pod that was lost before is recreated."""
    server = FakeApiServer()
    crowd.fill(server, num_jobs, NUM_PODS, num_nodes=num_jobs)
    lost = f"job-{num_jobs - 1}-{NUM_PODS - 1}"
    server.remove("pods", crowd.NAMESPACE, lost)
    server.oldest = server.version
    folder.mkdir()

    async def scenario() -> float:
        async with operator(server, folder) as process:
            before = cpu_seconds(process)
            pods = server.of("pods").objects
            await until(lambda: (crowd.NAMESPACE, lost) in pods, process)
            used = cpu_seconds(process) - before
        created = [r for r in server.requests if r.method == "POST" and r.path.endswith("/pods")]
        assert len(created) == 1, "no other pod was considered lost"
        paths = {r.path for r in server.requests if r.method in ("GET", "PATCH")}
        assert len(paths) < 20, "no request is sent per job"
        return used

    return asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads CPU time from Linux's /proc"
)
def test_the_cpu_time_of_a_new_leader_is_linear_in_the_number_of_jobs(tmp_path: Path) -> None:
    """Four times the jobs need about four times as much; anything quadratic would need sixteen times."""
    few = measure_restart(60, tmp_path / "few")
    many = measure_restart(240, tmp_path / "many")
    assert many < 7 * few, f"{few:.1f} s for 480 pods, {many:.1f} s for 1,920"


@pytest.mark.parametrize("hidden", ["pods", ""])
def test_a_stopped_leader_releases_the_lease(tmp_path: Path, hidden: str) -> None:
    """During the first list, and while it reconciles."""

    async def scenario() -> None:
        server = FakeApiServer()
        crowd.fill(server, 3, NUM_PODS, num_nodes=3)
        server.hidden = hidden
        async with operator(server, tmp_path) as process:
            path = "/api/v1/pods" if hidden else "/apis/fluxtrain.dev/v1alpha1/fluxtrainings"
            await until(lambda: any(r.path == path for r in server.requests), process)
            process.terminate()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while process.exitcode is None:
                    await asyncio.sleep(0.02)
            assert process.exitcode == 0
            lease = server.of("leases").objects[LEASE]
            assert lease["spec"]["holderIdentity"] == ""

    asyncio.run(scenario())
