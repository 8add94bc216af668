"""The operator process with many jobs: its CPU time grows linearly with their number."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from benchmarks import crowd
from benchmarks.fake_api_server import FakeApiServer
from tests.operator.controller.operator_process import leader, until

NUM_PODS = 8


def cpu_seconds(process: BaseProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_restart(num_jobs: int, folder: Path) -> float:
    """Return the CPU seconds from the start until a pod that was lost before is recreated."""
    server = FakeApiServer()
    crowd.fill(server, num_jobs, NUM_PODS, num_nodes=num_jobs)
    lost = f"job-{num_jobs - 1}-{NUM_PODS - 1}"
    server.remove("pods", crowd.NAMESPACE, lost)
    server.oldest = server.version
    folder.mkdir()

    async def scenario() -> float:
        async with leader(server, folder) as process:
            pods = server.of("pods").objects
            await until(lambda: (crowd.NAMESPACE, lost) in pods, process)
            used = cpu_seconds(process)
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
