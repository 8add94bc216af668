"""Leader election: never two leaders, whatever happens to the API server, to the Lease or to a process.

Operator processes that start, lead, stand by, stop and fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.operator import crowd
from benchmarks.operator.fake_api_server import FakeApiServer, serving
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import kube_config
from tests.first_process import catches, first_process
from tests.operator.controller.event_loop import (
    in_virtual_time,
    now,
    run_in_virtual_time,
    synchronous,
    until,
)
from tests.operator.controller.operator_process import LEASE, exit_code, holder, leader, replica
from tests.operator.controller.operator_process import until as until_process

from fluxtrain_operator.__main__ import main
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.controller.leader_election import (
    FencedClient,
    LeaderElector,
    LeaseTiming,
    NamespaceClaims,
)

pytestmark = pytest.mark.slow

FAST = LeaseTiming(lease_duration=1, renew_deadline=0.5, retry_period=0.05, request_timeout=0.2)
_RESPONSE_SECONDS = 0.005
OTHER = {"holderIdentity": "other", "leaseDurationSeconds": 1, "renewTime": "2026-01-01T00:00:00Z"}


class LeaseServer:
    """An API server with one Lease and resource versions, which can fail or hang."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.requests: list[str] = []
        self.hangs_for: set[str] = set()
        self.fails = False

    @property
    def holder(self) -> str:
        return str(self.lease["spec"].get("holderIdentity", "")) if self.lease else ""

    def put(self, spec: dict[str, Any] | None, **metadata: Any) -> None:
        """Write the Lease as another client would; None deletes it."""
        self.version += 1
        version = {"name": "lease", "resourceVersion": str(self.version), **metadata}
        self.lease = None if spec is None else {"metadata": version, "spec": spec}

    async def respond(self, replica: str, method: str, body: Any) -> tuple[int, Any]:
        """Return the HTTP status and the object of a response."""
        await asyncio.sleep(10 if replica in self.hangs_for else _RESPONSE_SECONDS)
        self.requests.append(f"{replica} {method}")
        if self.fails:
            return 503, {"message": "etcd has no leader"}
        if "spec" in (body or {}):
            version = self.lease and self.lease["metadata"]["resourceVersion"]
            if version != (None if method == "POST" else body["metadata"]["resourceVersion"]):
                return 404 if version is None else 409, {}
            self.put(body["spec"])
        return 404 if self.lease is None else 200, self.lease or {}


class Response:
    """What the client reads of a response."""

    def __init__(self, status: int, values: Any) -> None:
        self.status, self.data, self.reason = status, json.dumps(values).encode(), ""
        self.headers: dict[str, str] = {}

    async def read(self) -> bytes:
        return self.data


class Connection:
    """Sends the requests of a client to ``server`` without a network."""

    def __init__(self, server: LeaseServer, replica: str) -> None:
        self._server, self._replica = server, replica

    async def request(
        self, method: str, url: str, *, body: Any, _request_timeout: float | None, **_: Any
    ) -> Response:
        async with asyncio.timeout(_request_timeout):
            return Response(*await self._server.respond(self._replica, method, body))

    async def close(self) -> None: ...


class Replica:
    """The elector of one process; ``log`` records when it starts and stops to lead."""

    def __init__(self, name: str, server: LeaseServer, log: list[str]) -> None:
        self.api = ApiClient(Configuration())
        self.api.rest_client = Connection(server, name)
        self.clock_offset = 0.0
        self.name, self.log, self.done = name, log, asyncio.Event()
        self.elector = LeaderElector(
            self.api,
            "ns",
            "lease",
            name,
            timing=FAST,
            clock=lambda: now() + self.clock_offset,
        )
        self.task = asyncio.create_task(self.elector.run(self.work))

    async def work(self) -> None:
        self.log.append(f"{self.name} leads")
        try:
            await self.done.wait()
        finally:
            self.log.append(f"{self.name} stops")


class Election:
    """Replicas that compete for the Lease of ``server``, and their common log."""

    def __init__(self) -> None:
        self.server, self.log = LeaseServer(), list[str]()
        self._replicas: list[Replica] = []

    def start(self, name: str) -> Replica:
        self._replicas.append(Replica(name, self.server, self.log))
        return self._replicas[-1]

    async def close(self) -> None:
        for each in self._replicas:
            each.task.cancel()
            await asyncio.gather(each.task, return_exceptions=True)


def scenario(function: Callable[[Election], Awaitable[None]]) -> Callable[[], None]:
    """Return a test that runs ``function`` with an election."""

    async def main() -> None:
        async with asyncio.timeout(30):
            election = Election()
            try:
                await function(election)
            finally:
                await election.close()

    return lambda: run_in_virtual_time(main())


@scenario
async def test_one_replica_leads_and_hands_over_when_it_stops(election: Election) -> None:
    replicas = [election.start(name) for name in "abc"]
    for count in range(3):
        await until(lambda n=count: len(election.log) == 2 * n + 1)
        await asyncio.sleep(3 * FAST.retry_period)
        (leader,) = [r for r in replicas if r.elector.is_leader]
        leader.done.set()
        await leader.task
    assert election.server.holder == ""
    assert election.server.lease is not None
    assert election.server.lease["spec"]["leaseTransitions"] == 2
    for started, stopped in zip(election.log[::2], election.log[1::2], strict=True):
        assert (started[1:], stopped) == (" leads", f"{started[0]} stops")


@scenario
async def test_a_lease_is_taken_only_after_its_holder_has_not_renewed_it_for_its_duration(
    election: Election,
) -> None:
    election.server.put(OTHER)
    election.start("a")
    for second in range(1, 30):  # the holder renews it, by a clock far behind ours
        await asyncio.sleep(0.06)
        election.server.put({**OTHER, "renewTime": f"2026-01-01T00:00:{second:02}Z"})
    assert election.log == []
    num_requests = len(election.server.requests)
    await until(lambda: election.log == ["a leads"])
    assert len(election.server.requests) > num_requests + 5, "it read the Lease often before"


@scenario
async def test_a_leader_without_responses_stops_before_another_starts(election: Election) -> None:
    first = election.start("a")
    await until(lambda: bool(election.log))
    election.start("b")
    election.server.hangs_for.add("a")
    await first.task
    assert election.server.holder == first.elector.identity, "it could not release the Lease"
    await until(lambda: len(election.log) == 3)
    assert election.log[:3] == ["a leads", "a stops", "b leads"]


@scenario
async def test_an_api_server_that_fails_for_a_short_time_costs_nobody_the_lease(
    election: Election,
) -> None:
    election.server.fails = True
    replica = election.start("a")
    await until(lambda: len(election.server.requests) > 3)
    election.server.fails = False
    await until(lambda: election.log == ["a leads"])
    election.server.fails = True
    num_requests = len(election.server.requests)
    await until(lambda: len(election.server.requests) > num_requests + 3)
    election.server.fails = False
    await asyncio.sleep(1.2 * FAST.lease_duration)
    assert election.log == ["a leads"]
    assert replica.elector.is_leader


@scenario
async def test_a_leader_that_was_frozen_stops_without_a_request(election: Election) -> None:
    replica = election.start("a")
    await until(lambda: bool(election.log))
    num_requests = len(election.server.requests)
    replica.clock_offset = 100.0  # as after SIGSTOP, or after a suspended machine
    assert not replica.elector.is_leader
    await replica.task
    assert election.log == ["a leads", "a stops"]
    assert [r for r in election.server.requests[num_requests:] if r != "a PUT"] == []
    assert len(election.server.requests) <= num_requests + 1, "at most a renewal sent before"


@scenario
async def test_only_the_leader_may_send_writes(election: Election) -> None:
    replica = election.start("a")
    api = FencedClient(replica.elector)
    api.rest_client = Connection(election.server, "work")
    await until(lambda: bool(election.log))
    await api.call_api("POST", "/anything", {}, {"metadata": {}})
    replica.clock_offset = 100.0
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        with pytest.raises(ApiError, match="is not the leader"):
            await api.call_api(method, "/anything", {}, {})
    await api.call_api("GET", "/anything", {})
    sent = [request for request in election.server.requests if request.startswith("work")]
    assert sent == ["work POST", "work GET"]


@scenario
async def test_an_annotated_or_deleted_lease_is_kept_and_one_that_another_takes_is_lost(
    election: Election,
) -> None:
    replica = election.start("a")
    await until(lambda: bool(election.log))
    assert election.server.lease is not None
    election.server.put(election.server.lease["spec"], annotations={"why": "debugging"})
    await asyncio.sleep(4 * FAST.retry_period)
    assert replica.elector.is_leader
    election.server.put(None)
    await until(lambda: election.server.lease is not None)
    assert replica.elector.is_leader
    election.server.put(OTHER)
    await replica.task
    assert election.server.holder == "other", "another replica's Lease is not released"
    assert election.log == ["a leads", "a stops"]


@scenario
async def test_of_two_processes_with_the_same_name_one_leads(election: Election) -> None:
    replicas = [election.start("same"), election.start("same")]
    await asyncio.sleep(2 * FAST.lease_duration)
    assert sum(replica.elector.is_leader for replica in replicas) == 1
    assert election.log == ["same leads"]


@scenario
async def test_an_error_of_the_work_is_raised_and_the_lease_released(election: Election) -> None:
    replica = election.start("a")
    replica.task.cancel()

    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await replica.elector.run(fail)
    assert election.server.holder == ""
    assert election.server.lease is not None


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
            await until_process(lambda: bool(holder(server)), first)
            async with replica(kubeconfig) as second:
                await until_process(lambda: len(server.watching) == 2 * WATCHES, second)
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
        await until_process(lambda: lost in pods, second)
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


@synchronous
async def test_a_replica_without_a_complete_cache_does_not_compete_for_the_lease(
    tmp_path: Path,
) -> None:
    server = filled()
    server.hidden = "pods"
    async with serving(server, tmp_path) as kubeconfig, replica(kubeconfig) as process:
        await until_process(lambda: sum(map(bool, server.watching)) == WATCHES - 1, process)
        assert not any("leases" in r.path for r in server.requests)
        process.terminate()
        assert await exit_code(process) == 0


@synchronous
async def test_a_stopped_leader_releases_the_lease(tmp_path: Path) -> None:
    server = filled()
    async with leader(server, tmp_path) as process:
        await until_process(lambda: len(server.watching) == WATCHES, process)
        process.terminate()
        assert await exit_code(process) == 0
        assert holder(server) == ""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.3])
@synchronous
async def test_a_leader_that_is_stopped_among_its_first_reconciles_releases_the_lease(
    tmp_path: Path, seconds: float
) -> None:
    server = filled()
    async with leader(server, tmp_path) as process:
        await asyncio.sleep(seconds)
        process.terminate()
        assert await exit_code(process) == 0
        assert holder(server) == ""


@synchronous
async def test_a_leader_that_loses_the_lease_exits_with_1(tmp_path: Path) -> None:
    server = filled()
    async with leader(server, tmp_path) as process:
        lease = server.of("leases").objects[LEASE]
        server.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "other"}})
        assert await exit_code(process) == 1
        assert holder(server) == "other"


START_SECONDS = 20
COMMAND = [sys.executable, "-m", "fluxtrain_operator", "--image=example.org/trainer:1"]
SLOW = "open('{fifo}').read()\n"
"""A module whose import never ends."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a first process")
def test_the_first_process_of_a_container_handles_sigterm_during_its_imports(
    tmp_path: Path,
) -> None:
    """Otherwise a pod that is deleted while it starts remains for its whole grace period."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "kopf.py").write_text(SLOW.format(fifo=tmp_path / "fifo"))
    with first_process(COMMAND, {"PYTHONPATH": str(tmp_path)}) as (process, pid):
        deadline = time.monotonic() + START_SECONDS
        while not catches(pid, signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(timeout=START_SECONDS) == 0


def test_missing_cluster_credentials_are_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    monkeypatch.setattr(sys, "argv", [*COMMAND[2:], "--address=127.0.0.1", "--port=0"])
    monkeypatch.setattr(sys, "setrecursionlimit", lambda limit: None)
    assert main() == 2
    record = caplog.records[-1]
    assert record.getMessage().startswith("no cluster credentials")
    assert record.exc_info is None


def claims(server: LeaseServer, holder: str) -> NamespaceClaims:
    api = ApiClient(Configuration())
    api.rest_client = Connection(server, holder)
    return NamespaceClaims(api, holder, timing=FAST, clock=now)


@in_virtual_time
async def test_of_two_releases_one_has_a_namespace_until_it_is_gone() -> None:
    server = LeaseServer()
    first, second = claims(server, "a/operator"), claims(server, "b/operator")
    assert await asyncio.gather(*(first.try_claim("team") for _ in range(100))) == [0.0] * 100
    assert server.requests == ["a/operator GET", "a/operator POST"], "one try for all jobs"
    renewing = asyncio.create_task(first.renew(lambda: {"team"}))
    for _ in range(100):
        left = await second.try_claim("team")
        assert 0 < left <= FAST.retry_period
        await asyncio.sleep(left)
    assert (first.num_others, second.num_others, server.holder) == (0, 1, "a/operator")
    assert await claims(server, "a/operator").try_claim("team") == 0, "another replica"
    renewing.cancel()
    while left := await second.try_claim("team"):
        await asyncio.sleep(left)
    assert (second.num_others, server.holder) == (0, "b/operator")
    assert await first.try_claim("team") > 0
    assert first.num_others == 1


@in_virtual_time
async def test_a_namespace_without_an_answer_is_tried_again_soon() -> None:
    server = LeaseServer()
    server.fails = True
    release = claims(server, "a/operator")
    left = await release.try_claim("team")
    assert (release.num_others, left) == (0, 5.0)
    server.fails = False
    assert 0 < await release.try_claim("team") <= left
    await asyncio.sleep(left)
    assert await release.try_claim("team") == 0
