"""Leader election: never two leaders, whatever happens to the API server, to the Lease or to a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient, Configuration
from tests.operator.controller.event_loop import now, run_in_virtual_time, until

from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.controller.leader_election import FencedClient, LeaderElector, LeaseTiming

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
        for replica in self._replicas:
            replica.task.cancel()
            await asyncio.gather(replica.task, return_exceptions=True)


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
