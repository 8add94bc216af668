"""The election: never two leaders, whatever happens to the API server, to the Lease or to a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from fluxtrain_operator.controller.leader_election import Election, FencedClient, Terms, uptime
from fluxtrain_operator.errors import ApiError

QUICK = Terms(lease=1, renew=0.5, retry=0.05, request=0.2)
OTHER = {"holderIdentity": "other", "leaseDurationSeconds": 1, "renewTime": "2026-01-01T00:00:00Z"}


class Leases:
    """The part of an API server that an election meets: one Lease, versions, and bad days."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.requests: list[str] = []
        self.silent_for: set[str] = set()
        self.broken = False

    @property
    def holder(self) -> str:
        return str(self.lease["spec"].get("holderIdentity", "")) if self.lease else ""

    def put(self, spec: dict[str, Any] | None, **metadata: Any) -> None:
        """Write the Lease as somebody else would; None deletes it."""
        self.version += 1
        version = {"name": "lease", "resourceVersion": str(self.version), **metadata}
        self.lease = None if spec is None else {"metadata": version, "spec": spec}

    async def answer(self, request: web.Request) -> web.Response:
        replica = request.headers["User-Agent"]
        if replica in self.silent_for:
            await asyncio.sleep(10)
        self.requests.append(f"{replica} {request.method}")
        if self.broken:
            return web.json_response({"message": "etcd has no leader"}, status=503)
        if not request.can_read_body:
            return _found(self.lease)
        body, new = await request.json(), request.method == "POST"
        known = self.lease and self.lease["metadata"]["resourceVersion"]
        if known != (None if new else body["metadata"]["resourceVersion"]):
            return web.json_response({}, status=404 if known is None else 409)
        self.put(body["spec"])
        return _found(self.lease)


def _found(lease: dict[str, Any] | None) -> web.Response:
    return web.json_response(lease or {}, status=404 if lease is None else 200)


class Replica:
    """One process's election, and what it noted while it led."""

    def __init__(self, name: str, host: str, notes: list[str]) -> None:
        configuration = Configuration(host=host)
        self.api = ApiClient(configuration)
        self.api.user_agent = name
        self.late = 0.0
        self.name, self.notes, self.done = name, notes, asyncio.Event()
        self.election = Election(
            self.api, "ns", "lease", name, terms=QUICK, clock=lambda: uptime() + self.late
        )
        self.task = asyncio.create_task(self.election.lead(self.work))

    async def work(self) -> None:
        self.notes.append(f"{self.name} leads")
        try:
            await self.done.wait()
        finally:
            self.notes.append(f"{self.name} ends")


Scenario = Callable[[Leases, Callable[[str], Replica], list[str]], Awaitable[None]]


def play(scenario: Scenario) -> list[str]:
    """Return what the replicas of a scenario noted."""
    notes: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(30), serving() as (leases, host):
            replicas: list[Replica] = []

            def hire(name: str) -> Replica:
                replicas.append(Replica(name, host, notes))
                return replicas[-1]

            try:
                await scenario(leases, hire, notes)
            finally:
                for replica in replicas:
                    replica.task.cancel()
                    await asyncio.gather(replica.task, return_exceptions=True)
                    await replica.api.close()

    asyncio.run(main())
    return notes


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Leases, str]]:
    leases, app = Leases(), web.Application()
    app.router.add_route("*", "/{path:.*}", leases.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield leases, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_one_leads_and_whoever_stops_hands_over() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        replicas = [hire(name) for name in "abc"]
        for count in range(3):
            await until(lambda n=count: len(notes) == 2 * n + 1)
            await asyncio.sleep(3 * QUICK.retry)
            (leader,) = [r for r in replicas if r.election.holds]
            leader.done.set()
            await leader.task
        assert leases.holder == ""
        assert leases.lease is not None
        assert leases.lease["spec"]["leaseTransitions"] == 2

    notes = play(scenario)
    for led, ended in zip(notes[::2], notes[1::2], strict=True):
        assert (led[1:], ended) == (" leads", f"{led[0]} ends")


def test_a_lease_is_anybodys_only_when_its_holder_has_been_silent_for_its_whole_length() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        leases.put(OTHER)
        hire("a")
        for second in range(
            1, 30
        ):  # renewed by its holder all the time, by a clock far behind ours
            await asyncio.sleep(0.06)
            leases.put({**OTHER, "renewTime": f"2026-01-01T00:00:{second:02}Z"})
        assert notes == []
        asked = len(leases.requests)
        await until(lambda: notes == ["a leads"])
        assert len(leases.requests) > asked + 5, "it looked often before it took the Lease"

    play(scenario)


def test_a_leader_that_hears_nothing_stops_before_another_begins() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        first = hire("a")
        await until(lambda: bool(notes))
        hire("b")
        leases.silent_for.add("a")
        await first.task
        assert leases.holder == first.election.identity, "its name is still there"
        await until(lambda: len(notes) == 3)

    assert play(scenario)[:3] == ["a leads", "a ends", "b leads"]


def test_an_api_server_that_fails_for_a_while_costs_nobody_the_lease() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        leases.broken = True
        replica = hire("a")
        await until(lambda: len(leases.requests) > 3)
        leases.broken = False
        await until(replica_leads := lambda: notes == ["a leads"])
        leases.broken = True
        asked = len(leases.requests)
        await until(lambda: len(leases.requests) > asked + 3)
        leases.broken = False
        await asyncio.sleep(1.2 * QUICK.lease)
        assert replica_leads()
        assert replica.election.holds

    play(scenario)


def test_a_frozen_leader_knows_without_asking_that_it_leads_no_longer() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        replica = hire("a")
        await until(lambda: bool(notes))
        asked = len(leases.requests)
        replica.late = 100.0  # what a process sees that was stopped, or whose machine was
        assert not replica.election.holds
        await replica.task
        assert notes == ["a leads", "a ends"]
        assert [r for r in leases.requests[asked:] if r != "a PUT"] == []
        assert len(leases.requests) <= asked + 1, "no more than a renewal that was on its way"

    play(scenario)


def test_only_the_holder_of_the_lease_may_send_changes() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        replica = hire("a")
        Configuration.set_default(replica.api.configuration)
        async with FencedClient(replica.election) as api:
            api.user_agent = "work"
            url = f"{replica.api.configuration.host}/anything"
            await until(lambda: bool(notes))
            await api.call_api("POST", url, {"User-Agent": "work"}, {"metadata": {}})
            replica.late = 100.0
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                with pytest.raises(ApiError, match="does not lead any more"):
                    await api.call_api(method, url, {"User-Agent": "work"}, {})
            await api.call_api("GET", url, {"User-Agent": "work"})
        assert [r for r in leases.requests if r.startswith("work")] == ["work POST", "work GET"]

    try:
        play(scenario)
    finally:
        Configuration.set_default(None)


def test_a_lease_that_somebody_annotates_is_kept_and_one_that_somebody_takes_is_lost() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        replica = hire("a")
        await until(lambda: bool(notes))
        assert leases.lease is not None
        leases.put(leases.lease["spec"], annotations={"why": "debugging"})
        await asyncio.sleep(4 * QUICK.retry)
        assert replica.election.holds
        leases.put(None)
        await until(lambda: leases.lease is not None)
        assert replica.election.holds
        leases.put(OTHER)
        await replica.task
        assert leases.holder == "other", "a Lease that is not ours is not let go of"

    assert play(scenario) == ["a leads", "a ends"]


def test_two_processes_of_one_name_do_not_both_lead() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        pair = [hire("same"), hire("same")]
        await asyncio.sleep(2 * QUICK.lease)
        assert sum(replica.election.holds for replica in pair) == 1
        assert notes == ["same leads"]

    play(scenario)


def test_a_failure_of_the_work_is_told_and_the_lease_let_go_of() -> None:
    async def scenario(leases: Leases, hire: Callable[[str], Replica], notes: list[str]) -> None:
        replica = hire("a")
        replica.task.cancel()

        async def fail() -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await replica.election.lead(fail)
        assert leases.holder == ""
        assert leases.lease is not None

    play(scenario)
