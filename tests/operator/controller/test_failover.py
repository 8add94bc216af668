"""Operator processes that lead, stand by, stop and fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from benchmarks import crowd
from benchmarks.fake_api_server import FakeApiServer, serving
from tests.operator.controller.operator_process import (
    LEASE,
    exit_code,
    holder,
    leader,
    replica,
    until,
)

NUM_JOBS, NUM_PODS = 3, 4
PODS, JOBS = "/api/v1/pods", "/apis/fluxtrain.dev/v1alpha1/fluxtrainings"
WATCHES = 7  # jobs, pods, nodes and four kinds of supporting objects


def filled() -> FakeApiServer:
    server = FakeApiServer()
    crowd.fill(server, NUM_JOBS, NUM_PODS, num_nodes=NUM_JOBS)
    server.oldest = server.version
    return server


Scenario = Callable[[FakeApiServer, BaseProcess, BaseProcess], Awaitable[None]]


def with_standby(folder: Path, scenario: Scenario) -> None:
    """Run ``scenario`` with a leader and a replica that stands by."""

    async def main() -> None:
        server = filled()
        async with serving(server, folder) as kubeconfig, replica(kubeconfig) as first:
            await until(lambda: bool(holder(server)), first)
            async with replica(kubeconfig) as second:
                await until(lambda: len(server.watching) == 2 * WATCHES, second)
                await scenario(server, first, second)

    asyncio.run(main())


def test_a_new_leader_replaces_a_lost_pod_without_listing_anything(tmp_path: Path) -> None:
    async def scenario(server: FakeApiServer, first: BaseProcess, second: BaseProcess) -> None:
        lost, pods = (crowd.NAMESPACE, "job-1-0"), server.of("pods").objects
        before = holder(server)
        first.kill()
        first.join()
        server.requests.clear()
        server.remove("pods", *lost)
        lease = server.of("leases").objects[LEASE]
        server.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        await until(lambda: lost in pods, second)
        assert holder(server) not in ("", before)
        lists = [r.path for r in server.requests if r.method == "GET" and not r.watch]
        assert not {PODS, JOBS, "/api/v1/nodes"} & set(lists)
        created = [r.path for r in server.requests if r.method == "POST" and "/pods" in r.path]
        assert len(created) == 1, "no other pod was considered lost"

    with_standby(tmp_path, scenario)


def test_a_replica_that_stands_by_writes_nothing_and_stops_at_once(tmp_path: Path) -> None:
    async def scenario(server: FakeApiServer, first: BaseProcess, second: BaseProcess) -> None:
        leads = holder(server)
        first.kill()
        first.join()
        server.requests.clear()
        server.remove("pods", crowd.NAMESPACE, "job-1-0")
        await asyncio.sleep(1)
        second.terminate()
        assert await exit_code(second) == 0
        assert {r.method for r in server.requests} <= {"GET"}
        assert holder(server) == leads

    with_standby(tmp_path, scenario)


def test_a_replica_without_a_complete_cache_does_not_compete_for_the_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = filled()
        server.hidden = "pods"
        async with serving(server, tmp_path) as kubeconfig, replica(kubeconfig) as process:
            await until(lambda: sum(map(bool, server.watching)) == WATCHES - 1, process)
            assert not any("leases" in r.path for r in server.requests)
            process.terminate()
            assert await exit_code(process) == 0

    asyncio.run(scenario())


def test_a_stopped_leader_releases_the_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = filled()
        async with leader(server, tmp_path) as process:
            await until(lambda: len(server.watching) == WATCHES, process)
            process.terminate()
            assert await exit_code(process) == 0
            assert holder(server) == ""

    asyncio.run(scenario())


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.3])
def test_a_leader_that_is_stopped_among_its_first_reconciles_releases_the_lease(
    tmp_path: Path, seconds: float
) -> None:
    async def scenario() -> None:
        server = filled()
        async with leader(server, tmp_path) as process:
            await asyncio.sleep(seconds)
            process.terminate()
            assert await exit_code(process) == 0
            assert holder(server) == ""

    asyncio.run(scenario())


def test_a_leader_that_loses_the_lease_exits_with_1(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = filled()
        async with leader(server, tmp_path) as process:
            lease = server.of("leases").objects[LEASE]
            server.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "other"}})
            assert await exit_code(process) == 1
            assert holder(server) == "other"

    asyncio.run(scenario())
