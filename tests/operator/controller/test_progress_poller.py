"""Progress is polled independently of reconciles: rank 0 alone once it is found, no job delays another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.operator import jobs
from tests.operator.controller.event_loop import run_in_virtual_time, until
from tests.operator.jobs import KEY, make_training

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.base.reports import Progress, RankProgress
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.pollers import FetchProgress, ProgressPoller

PORT = 9464


def make_pod(
    index: int, phase: str = "Running", uid: str | None = None, job: str = "job"
) -> dict[str, Any]:
    uid = uid or (f"uid-{index}" if job == "job" else f"uid-{job}-{index}")
    pod = jobs.make_pod(f"{job}-{index}", uid=uid, job=job)
    return {**pod, "status": {"phase": phase, "podIP": f"10.0.0.{index}"}}


def make_cache(*pods: dict[str, Any]) -> Cache:
    """Return a cache with ``pods`` and their jobs."""
    cache = Cache()
    for name in {"job", *(pod["metadata"]["labels"][names.LABEL_JOB] for pod in pods)}:
        cache.set_job(make_training(name=name))
    for pod in pods:
        cache.set_pod(pod)
    return cache


def step(number: int) -> Progress:
    return Progress(ProgressStatus(step=number))


@dataclass
class Trainers:
    """Pods of which only the one at the address ``rank_0`` responds."""

    rank_0: str = "10.0.0.1"
    progress: Progress | None = field(default_factory=lambda: step(1))
    requests: list[str] = field(default_factory=list)

    async def fetch(self, address: str, port: int) -> Progress | None:
        assert port == PORT
        self.requests.append(address)
        await asyncio.sleep(0)
        return self.progress if address == self.rank_0 else None


class Polling:
    """A poller of ``pods``, the trainers in them, and the jobs reported as changed."""

    def __init__(self, pods: Iterable[dict[str, Any]], seconds: float = 0.02) -> None:
        self.trainers, self.cache = Trainers(), make_cache(*pods)
        self.fetch: FetchProgress = self.trainers.fetch
        self.changed: list[Key] = []
        self.poller = ProgressPoller(
            self.cache, lambda *args: self.fetch(*args), self.changed.append, seconds
        )

    def start(self, *names: str, port: int = PORT) -> None:
        for name in names or ("job",):
            self.poller.start(("ns", name), port)

    @property
    def rank_0(self) -> Progress | None:
        return self.poller.rank_0(KEY)


Scenario = Callable[[Polling], Awaitable[None]]


def run(polling: Polling, scenario: Scenario) -> None:
    async def main() -> None:
        try:
            async with asyncio.timeout(20):
                await scenario(polling)
        finally:
            await polling.poller.close()

    run_in_virtual_time(main())


def scenario(
    *pods: dict[str, Any], seconds: float = 0.02
) -> Callable[[Scenario], Callable[[], None]]:
    """Return a decorator: the test runs the function with a poller of ``pods``, by default three."""
    pods = pods or tuple(map(make_pod, range(3)))
    return lambda function: lambda: run(Polling(pods, seconds), function)


@scenario()
async def test_all_pods_are_polled_until_rank_0_is_found_and_then_only_that_one(p: Polling) -> None:
    p.start()
    assert p.rank_0 is None
    await until(lambda: bool(p.changed))
    assert sorted(p.trainers.requests) == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    assert p.rank_0 == step(1)
    p.trainers.requests.clear()
    await until(lambda: len(p.trainers.requests) >= 3)
    assert set(p.trainers.requests) == {"10.0.0.1"}


@scenario()
async def test_only_changed_progress_is_reported_and_rank_0_may_move_to_another_pod(
    p: Polling,
) -> None:
    p.start()
    await until(lambda: len(p.trainers.requests) >= 10)
    assert p.changed == [KEY]
    p.trainers.progress = step(2)
    await until(lambda: len(p.changed) >= 2)
    assert p.rank_0 == step(2)
    p.trainers.rank_0, p.trainers.progress = "10.0.0.2", step(5)
    await until(lambda: p.rank_0 == step(5))
    num_changes, p.trainers.progress = len(p.changed), None
    await until(lambda: len(p.changed) > num_changes)
    assert p.rank_0 is None


@scenario()
async def test_while_rank_0_is_done_the_other_ranks_show_whether_there_is_progress(
    p: Polling,
) -> None:
    progress = {
        "10.0.0.1": replace(step(9), phase="finish"),
        "10.0.0.2": replace(
            step(9), phase="sample", rank=4, ranks=(RankProgress(4, "sample", step=9),)
        ),
    }

    async def fetch(address: str, port: int) -> Progress | None:
        return progress.get(address)

    p.fetch = fetch
    p.start()
    await until(lambda: p.rank_0 is not None and len(p.rank_0.ranks) == 1)
    assert p.rank_0 is not None
    assert (p.rank_0.phase, p.rank_0.ranks[0].rank) == ("finish", 4)
    progress["10.0.0.1"] = replace(step(9), phase="step")
    await until(lambda: p.rank_0 is not None and p.rank_0.phase == "step")


@scenario()
async def test_while_rank_0_makes_no_progress_all_ranks_are_polled(p: Polling) -> None:
    def silent(rank: int, seconds: float) -> Progress:
        present = RankProgress(rank, "step", step=9, seconds_since_progress=seconds)
        return replace(step(9), phase="step", rank=rank, ranks=(present,))

    progress = {"10.0.0.1": silent(0, 5), "10.0.0.2": silent(4, 90)}
    requests = list[str]()

    async def fetch(address: str, port: int) -> Progress | None:
        requests.append(address)
        return progress.get(address)

    p.fetch = fetch
    p.start()
    await until(lambda: p.rank_0 is not None and len(requests) >= 10)
    assert p.rank_0 is not None
    assert [r.rank for r in p.rank_0.ranks][:1] == [0]
    assert requests[5:].count("10.0.0.2") == 0
    progress["10.0.0.1"] = silent(0, 30)
    await until(lambda: p.rank_0 is not None and len(p.rank_0.ranks) == 2)
    assert [(r.rank, r.pod) for r in p.rank_0.ranks] == [(0, "uid-1"), (4, "uid-2")]
    assert 30 <= (p.rank_0.seconds_since_progress or 0) < 31


def make_service() -> dict[str, Any]:
    pod = jobs.make_pod(names.rendezvous("job"), uid="uid-9")
    pod["metadata"]["labels"][names.LABEL_COMPONENT] = names.RENDEZVOUS
    return {**pod, "status": {"phase": "Running", "podIP": "10.0.0.9"}}


def reported(*numbers: int, silent: float = 90, frozen: bool = True) -> Progress:
    """Return what the agents of the pods 1 and 2, with four ranks each, report of these ranks."""
    entries = [
        {
            "rank": number,
            "pod": f"uid-{1 + number // 4}",
            "phase": "step",
            "secondsSinceProgress": silent,
            "frozen": frozen,
        }
        for number in numbers
    ]
    progress = Progress.from_agents({"ranks": entries})
    assert progress is not None
    return progress


def answers(p: Polling, **by_address: Progress) -> dict[str, Progress]:
    """Let the pods at addresses such as 10_0_0_1 answer; return their answers, which may be changed."""
    progress = {address.strip("_").replace("_", "."): each for address, each in by_address.items()}

    async def fetch(address: str, port: int) -> Progress | None:
        p.trainers.requests.append(address)
        return progress.get(address)

    p.fetch = fetch
    return progress


@scenario(*map(make_pod, (1, 2)), make_service())
async def test_if_no_trainer_responds_the_ranks_are_those_that_agents_report(p: Polling) -> None:
    progress = answers(p, _10_0_0_9=reported(0, 5))
    p.start()
    await until(lambda: p.poller.lowest_rank(KEY) is not None)
    for _ in range(5):  # polls
        await asyncio.sleep(0.02)
        found = p.poller.lowest_rank(KEY)
        assert found is not None
        assert [(r.rank, r.pod, r.frozen) for r in found.ranks] == [
            (0, "uid-1", True),
            (5, "uid-2", True),
        ]
    assert p.rank_0 is None, "nothing of the run is known"
    assert p.poller._num_silent == 3, "the trainers are silent nevertheless"
    progress["10.0.0.1"] = step(8)
    await until(lambda: p.rank_0 is not None)
    del progress["10.0.0.1"], progress["10.0.0.9"]
    await until(lambda: p.poller.lowest_rank(KEY) is None)


@scenario(*map(make_pod, (1, 2)), make_service())
async def test_agents_report_the_ranks_of_which_no_trainer_responds(p: Polling) -> None:
    own = RankProgress(4, "step", step=9, seconds_since_progress=30, pod="any")
    other = replace(step(9), phase="step", rank=4, ranks=(own,))
    answers(p, _10_0_0_2=other, _10_0_0_9=reported(0, 4, 5))
    p.start()
    await until(lambda: p.poller.lowest_rank(KEY) is not None)
    found = p.poller.lowest_rank(KEY)
    assert found is not None
    assert (found.rank, found.by_agents, found.status.step) == (4, False, 9)
    assert [(r.rank, r.step, r.pod, r.frozen) for r in found.ranks] == [
        (0, 0, "uid-1", True),
        (4, 9, "uid-2", False),  # its own answer
        (5, 0, "uid-2", True),
    ]


@scenario(*map(make_pod, (1, 2)), make_service())
async def test_agents_are_not_asked_while_rank_0_makes_progress(p: Polling) -> None:
    answers(p, _10_0_0_1=step(7), _10_0_0_9=reported(0))
    p.start()
    await until(lambda: len(p.trainers.requests) >= 8)
    assert set(p.trainers.requests[3:]) == {"10.0.0.1"}


@pytest.mark.parametrize(
    "pods",
    [(make_pod(2), make_service()), (make_pod(1), make_pod(9))],
    ids=["of a pod that is gone", "by a pod of trainers"],
)
def test_reports_of_other_pods_are_not_believed(pods: tuple[dict[str, Any], ...]) -> None:
    async def poll(p: Polling) -> None:
        answers(p, _10_0_0_9=reported(0))
        p.start()
        await until(lambda: len(p.trainers.requests) >= 6)
        assert p.poller.lowest_rank(KEY) is None

    run(Polling(pods), poll)


@scenario(seconds=100)
async def test_the_progress_of_a_pod_that_no_longer_runs_is_dropped(p: Polling) -> None:
    p.start()
    await until(lambda: bool(p.changed))
    p.cache.set_pod(make_pod(1, phase="Failed"))
    assert p.rank_0 is None
    p.cache.set_pod(make_pod(1, uid="same-name"))
    assert p.rank_0 is None


@scenario(seconds=100)
async def test_a_job_with_progress_is_polled_at_once_when_pods_come_or_go(p: Polling) -> None:
    p.start()
    await until(lambda: bool(p.changed))
    p.trainers.progress = step(2)
    p.start()
    await asyncio.sleep(0.05)
    assert p.rank_0 == step(1), "the same pods are polled at the next interval"
    p.cache.set_pod(make_pod(2), deleted=True)
    p.start()
    await until(lambda: p.rank_0 == step(2))


@scenario()
async def test_a_stopped_job_is_not_polled_and_its_progress_is_dropped(p: Polling) -> None:
    p.start()
    await until(lambda: bool(p.changed))
    p.poller.stop(KEY)
    p.poller.stop(KEY)
    assert len(p.poller) == 0
    assert p.rank_0 is None
    p.trainers.requests.clear()
    await asyncio.sleep(0.1)
    assert p.trainers.requests == []


@scenario(make_pod(1), make_pod(1, job="stuck"))
async def test_a_job_whose_trainers_hang_delays_no_other(p: Polling) -> None:
    never = asyncio.Event()

    async def fetch(address: str, port: int) -> Progress | None:
        if port != PORT:
            await never.wait()
        return await p.trainers.fetch(address, PORT)

    p.fetch = fetch
    p.start("stuck", port=1)
    p.start()
    await until(lambda: bool(p.changed))
    assert p.changed == [KEY]


@scenario()
async def test_a_changed_port_is_used_from_then_on(p: Polling) -> None:
    ports: list[int] = []

    async def fetch(address: str, port: int) -> Progress | None:
        ports.append(port)
        return None

    p.fetch = fetch
    for port in (1, 2):
        p.start(port=port)
        await until(lambda port=port: port in ports)
    assert len(p.poller) == 1


def test_polling_resumes_after_an_unexpected_error(caplog: pytest.LogCaptureFixture) -> None:
    async def resume(p: Polling) -> None:
        async def fetch(address: str, port: int) -> Progress | None:
            p.fetch = p.trainers.fetch
            raise RuntimeError("a bug")

        p.fetch = fetch
        while not p.changed:
            p.start()
            await asyncio.sleep(0.01)

    run(Polling([make_pod(1)]), resume)
    assert "a bug" in caplog.text


@scenario()
async def test_a_pod_that_the_job_does_not_control_is_not_polled(p: Polling) -> None:
    p.trainers.rank_0 = "10.0.0.9"
    foreign = make_pod(9)
    foreign["metadata"]["ownerReferences"] = []
    p.cache.set_pod(foreign)
    p.start()
    await until(lambda: len(p.trainers.requests) >= 6)
    assert "10.0.0.9" not in p.trainers.requests
    assert p.rank_0 is None


@pytest.mark.parametrize(("num_jobs", "is_frequent"), [(1, True), (40, False)])
def test_very_many_pods_without_a_response_are_polled_less_often(
    num_jobs: int, is_frequent: bool
) -> None:
    """25 pods a second, over all jobs; those that respond are polled at the usual interval."""
    silent = [f"silent-{index}" for index in range(num_jobs)]

    async def measure(p: Polling) -> None:
        p.start("job", *silent)
        await until(lambda: p.trainers.requests.count("10.0.0.1") >= 20)
        rounds = p.trainers.requests.count("10.0.0.0") / num_jobs
        assert (rounds > 5) is is_frequent
        for name in silent:
            p.poller.stop(("ns", name))
        assert not p.poller._num_silent

    run(Polling([make_pod(1), *(make_pod(0, uid=name, job=name) for name in silent)]), measure)
