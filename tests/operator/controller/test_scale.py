"""The operator's process among many jobs: its effort grows with their number, and no faster."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.operator.controller import crowd
from tests.operator.controller.fake_api_server import FakeApiServer, serving

NUM_PODS = 8
PATIENCE_SECONDS = 120
LEASE = ("default", "fluxtrain-operator")


@asynccontextmanager
async def operator(
    server: FakeApiServer, folder: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an operator that leads."""
    argv = ["-m", "fluxtrain_operator", f"--image={crowd.IMAGE}", "--address=127.0.0.1"]
    async with serving(server, folder) as kubeconfig:
        env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, "--port=0", env=env)
        try:
            await until(lambda: LEASE in server.of("leases").objects, process)
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def until(holds: object, process: asyncio.subprocess.Process) -> None:
    assert callable(holds)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            assert process.returncode is None, "the operator has ended"
            await asyncio.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def effort(num_jobs: int, folder: Path) -> float:
    """Return the CPU seconds from the Lease to the replacement of a pod that went before."""
    server = FakeApiServer()
    crowd.fill(server, num_jobs, NUM_PODS, num_nodes=num_jobs)
    lost = f"job-{num_jobs - 1}-{NUM_PODS - 1}"
    server.remove("pods", crowd.NAMESPACE, lost)
    server.oldest = server.version
    folder.mkdir()

    async def main() -> float:
        async with operator(server, folder) as process:
            begun = cpu_seconds(process.pid)
            pods = server.of("pods").objects
            await until(lambda: (crowd.NAMESPACE, lost) in pods, process)
            used = cpu_seconds(process.pid) - begun
        made = [r for r in server.requests if r.method == "POST" and r.path.endswith("/pods")]
        assert len(made) == 1, "no other pod was taken for lost"
        asked = {r.path for r in server.requests if r.method in ("GET", "PATCH")}
        assert len(asked) < 20, "nothing is asked for each job"
        return used

    return asyncio.run(main())


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads CPU time from Linux's /proc"
)
def test_a_new_leader_finds_a_lost_pod_among_many_at_a_cost_that_is_linear(tmp_path: Path) -> None:
    """Four times the jobs: four times the effort. With what is quadratic it would be sixteen times."""
    few, many = effort(60, tmp_path / "few"), effort(240, tmp_path / "many")
    assert many < 7 * few, f"{few:.1f} s for 480 pods, {many:.1f} s for 1,920"


@pytest.mark.parametrize("hidden", ["pods", ""])
def test_a_leader_that_is_stopped_lets_go_of_the_lease(tmp_path: Path, hidden: str) -> None:
    """While it waits for its lists, and while it leads."""

    async def main() -> None:
        server = FakeApiServer()
        crowd.fill(server, 3, NUM_PODS, num_nodes=3)
        server.hidden = hidden
        async with operator(server, tmp_path) as process:
            awaited = "/api/v1/pods" if hidden else "/apis/fluxtrain.dev/v1alpha1/fluxtrainings"
            await until(lambda: any(r.path == awaited for r in server.requests), process)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await process.wait() == 0
            lease = server.of("leases").objects[LEASE]
            assert lease["spec"]["holderIdentity"] == ""

    asyncio.run(main())
