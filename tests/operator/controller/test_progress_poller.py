"""Pollers: progress independently of reconciles, and the members of jobs.

Rank 0 alone once it is found, no job delays another; silent agents, a silent service, and who does not count.
The progress in a pod's termination message counts, even if the pod is gone before a reconcile.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.operator import jobs
from tests.operator.controller.event_loop import in_virtual_time, now, run_in_virtual_time, until
from tests.operator.jobs import KEY, OWNER, make_job, make_training, run_pods
from tests.operator.object_store import Harness, ObjectStore
from tests.operator.object_store import run as run_store

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import Key, stamp
from fluxtrain_operator.base.reports import MembersReport, Progress, RankProgress
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.pollers import (
    MEMBERS_SECONDS,
    RETRY_SECONDS,
    SILENT_POLLS,
    SILENT_SECONDS,
    FetchProgress,
    MembersPoller,
    ProgressPoller,
)
from fluxtrain_operator.controller.work_queue import Pace
from fluxtrain_operator.planner.guard import Delete
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.situation import newest_report

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


NOBODY = frozenset[str]()
LOST = MembersReport(frozenset({"pod-0"}), frozenset({"pod-1"}))
FINE = MembersReport(frozenset({"pod-0", "pod-1"}))


def rendezvous_pod(uid: str = "rdzv", **changes: Any) -> dict[str, Any]:
    pod = jobs.make_pod("job-rendezvous", uid=uid)
    pod["metadata"]["labels"][names.LABEL_COMPONENT] = names.RENDEZVOUS
    pod["metadata"]["annotations"] = {names.ANNOTATION_RENDEZVOUS: names.RENDEZVOUS_VERSION}
    pod["metadata"].update(changes.pop("metadata", {}))
    return {**pod, "status": {"phase": "Running", "podIP": "10.0.0.9", **changes}}


class MembersPolling:
    """A poller of one job whose rendezvous service gives ``answer``."""

    def __init__(self) -> None:
        self.answer: MembersReport | None = FINE
        self.requests: list[tuple[str, int]] = []
        self.changed: list[Key] = []
        self.cache = Cache()
        self.cache.set_job(make_training())
        self.cache.set_pod(rendezvous_pod())
        self.poller = MembersPoller(self.cache, self.fetch, self.changed.append)

    async def fetch(self, address: str, port: int) -> MembersReport | None:
        self.requests.append((address, port))
        return self.answer

    async def polls(self, number: int, answer: MembersReport | None) -> frozenset[str]:
        """Return the silent pods after ``number`` further polls with ``answer``."""
        self.answer = answer
        self.poller.start(KEY, PORT)
        await asyncio.sleep(number * MEMBERS_SECONDS)
        return self.poller.heard(KEY).silent


def poll_members(scenario: Callable[[MembersPolling], Awaitable[None]]) -> None:
    async def main() -> None:
        polling = MembersPolling()
        try:
            await scenario(polling)
        finally:
            await polling.poller.close()

    run_in_virtual_time(main())


def test_lost_agents_are_reported_once_until_they_return() -> None:
    async def scenario(p: MembersPolling) -> None:
        assert p.poller.heard(KEY) == MembersReport()
        assert await p.polls(3, FINE) == NOBODY
        assert set(p.requests) == {("10.0.0.9", PORT)}
        assert p.changed == [KEY]
        assert await p.polls(3, LOST) == {"pod-1"}
        assert p.changed == [KEY, KEY]
        assert await p.polls(3, FINE) == NOBODY
        assert p.changed == [KEY] * 3
        assert p.poller.heard(KEY).alive == {"pod-0", "pod-1"}
        p.poller.stop(KEY)
        p.poller.stop(KEY)
        assert p.poller.heard(KEY) == MembersReport()

    poll_members(scenario)


def test_a_service_that_answered_before_is_silent_after_a_while() -> None:
    async def scenario(p: MembersPolling) -> None:
        assert await p.polls(10, None) == NOBODY, "it may not have started"
        assert await p.polls(2, LOST) == {"pod-1"}
        before = len(p.requests)
        assert await p.polls(1, None) == {"pod-1"}, "nothing new is known"
        assert await p.polls(2, None) == {"rdzv"}
        assert len(p.requests) - before >= SILENT_SECONDS - MEMBERS_SECONDS, "asked more often"
        p.cache.set_pod(rendezvous_pod("another"))
        assert await p.polls(10, None) == NOBODY
        assert await p.polls(2, FINE) == NOBODY

    poll_members(scenario)


def test_an_operator_that_could_not_ask_for_long_believes_no_single_time_out() -> None:
    async def scenario(p: MembersPolling) -> None:
        assert await p.polls(2, FINE) == NOBODY
        await asyncio.sleep(0)
        job = p.poller._jobs[KEY]
        job.answered -= 10 * SILENT_SECONDS  # as after a pause of the operator
        assert await p.polls(1, None) == NOBODY
        await asyncio.sleep(SILENT_POLLS * RETRY_SECONDS)
        assert p.poller.heard(KEY).silent == {"rdzv"}

    poll_members(scenario)


def test_a_service_that_answers_again_in_time_is_not_silent() -> None:
    async def scenario(p: MembersPolling) -> None:
        assert await p.polls(2, FINE) == NOBODY
        for _ in range(5):
            assert await p.polls(1, None) == NOBODY
            assert await p.polls(1, FINE) == NOBODY

    poll_members(scenario)


@pytest.mark.parametrize(
    "pod",
    [
        rendezvous_pod(phase="Pending"),
        rendezvous_pod(podIP=""),
        rendezvous_pod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        rendezvous_pod(metadata={"annotations": {}}),
        rendezvous_pod(metadata={"annotations": None}),
    ],
    ids=["pending", "no address", "deleting", "another version", "no annotations"],
)
def test_only_a_running_pod_of_this_version_is_asked(pod: dict[str, Any]) -> None:
    async def scenario(p: MembersPolling) -> None:
        p.cache.set_pod(pod)
        assert await p.polls(3, LOST) == NOBODY
        assert p.requests == []

    poll_members(scenario)


SHOWN, LAST = 58, 75


def message(
    step: int = LAST, rank: int = 0, ended: float | None = None, since_step: float = 1.0
) -> str:
    ended = time.time() if ended is None else ended
    values = {
        "rank": rank,
        "step": step,
        "lastStepTime": ended - since_step,
        "checkpointStep": step,
    }
    return json.dumps({**values, "checkpointTime": ended, "phaseSeconds": {"step": 60.0}})


class Terminating(ObjectStore):
    """Pods that are deleted still exist: their program has time to save a checkpoint."""

    async def delete(self, namespace: str, deletion: Delete, version: str) -> Manifest | None:
        if deletion.kind != "Pod":
            return await super().delete(namespace, deletion, version)
        existing = self.objects["Pod", deletion.name]
        existing["metadata"]["deletionTimestamp"] = stamp(time.time() + 180)
        return existing


def stopping() -> Harness:
    """Return a job that is being suspended, whose status shows step 58, with its pods."""
    shown = {"step": SHOWN, "samples": 0, "lastStepTime": stamp(time.time() - 20)}
    harness = Harness(Terminating())
    run_store(harness, 1, harness.sync, lambda: run_pods(harness.cache, 4), 1)
    job = make_job(**(harness.cluster.status | {"progress": shown}))
    job["spec"]["lifecycle"] = {"suspend": True}
    harness.set_job(job)
    run_store(harness, 1)
    assert harness.cluster.status["progress"]["step"] == SHOWN
    return harness


def pod(harness: Harness, name: str = "job-0") -> Manifest:
    (found,) = (p for p in harness.cache.pods(KEY) if p["metadata"]["name"] == name)
    return dict(found)


def ended(manifest: Manifest, text: str, finished: float | None = None) -> Manifest:
    """Return the final object of a pod, whose program exited with ``text`` as its last words."""
    at = stamp(time.time() if finished is None else finished)
    state = {"terminated": {"exitCode": 75, "message": text, "startedAt": at, "finishedAt": at}}
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]}
    return {**manifest, "status": status}


def step_after(harness: Harness, *removed: Manifest) -> int:
    """Return the step of the status after the final objects of pods, and no pod is left."""

    def remove() -> None:
        for manifest in removed:
            harness.cache.set_pod(manifest, deleted=True)
        for manifest in harness.cache.pods(KEY):
            harness.cache.set_pod(manifest, deleted=True)

    run_store(harness, remove, 1)
    return int(harness.cluster.status["progress"]["step"])


def test_the_final_object_in_a_deletion_has_the_last_step() -> None:
    harness = stopping()
    assert step_after(harness, ended(pod(harness), message())) == LAST
    assert harness.cluster.status["checkpoint"]["step"] == LAST


def test_a_change_that_is_followed_by_the_deletion_is_not_missed() -> None:
    harness = stopping()
    final = ended(pod(harness), message())
    harness.cache.set_pod(final)
    assert step_after(harness, final) == LAST


def test_a_pod_that_is_gone_already_when_it_is_deleted_has_the_last_step() -> None:
    """The response to the deletion came first, the watch event has the final object."""
    harness = stopping()
    final = ended(pod(harness), message())
    assert step_after(harness) == SHOWN
    assert harness.cluster.status["phase"] == "Suspended"
    assert step_after(harness, final) == LAST


@pytest.mark.parametrize(
    "text", ["", "out of memory", "{", message(rank=1), "[" * 5000, "[1]", '{"rank": 0}']
)
def test_other_last_words_change_nothing(text: str) -> None:
    harness = stopping()
    assert step_after(harness, ended(pod(harness), text)) == SHOWN


def test_a_step_before_that_of_the_status_does_not_count() -> None:
    harness = stopping()
    assert step_after(harness, ended(pod(harness), message(3, since_step=100))) == SHOWN


@pytest.mark.parametrize(
    "owners", [[], [{**OWNER, "uid": "another"}], [{**OWNER, "controller": False}]]
)
def test_pods_of_others_are_not_believed(owners: list[Any]) -> None:
    harness = stopping()
    stranger = ended(pod(harness), message())
    own = stranger["metadata"]
    stranger["metadata"] = {**own, "uid": "stranger", "name": "job-9", "ownerReferences": owners}
    assert step_after(harness, stranger) == SHOWN


def test_a_job_that_was_created_again_does_not_inherit_it() -> None:
    harness = stopping()
    harness.cache.set_pod(ended(pod(harness), message()), deleted=True)
    assert harness.cache.final_pod(KEY) is not None
    again = make_job()
    again["metadata"]["uid"] = "uid-again"
    harness.set_job(again, version="6000")
    assert harness.cache.final_pod(KEY) is None


def test_one_pod_is_kept_per_job_and_none_of_deleted_jobs() -> None:
    harness = stopping()
    for number in range(20):
        at = time.time() + number
        final = ended(pod(harness), message(LAST + number, ended=at), at)
        final["metadata"] = {**final["metadata"], "uid": f"uid-{number}", "name": f"job-{number}"}
        harness.cache.set_pod(final, deleted=True)
    assert len(harness.cache._final_pods) == 1
    assert step_after(harness) == LAST + 19
    harness.cache.set_job(make_job(), deleted=True)
    assert not harness.cache._final_pods
    harness.cache.set_pod(final, deleted=True)
    assert not harness.cache._final_pods


def test_a_trainer_that_answers_is_believed_more() -> None:
    final = Pod.from_object(ended(pod(stopping()), message()))
    answer = Progress.from_json({"rank": 0, "step": 0})
    assert final.final_progress is not None
    report = newest_report(Observed(progress=answer, final_pod=final), time.time())
    assert report is not None
    assert report.progress is answer
    report = newest_report(Observed(final_pod=final), time.time())
    assert report is not None
    assert report.progress.status.step == LAST


@in_virtual_time
async def test_callers_go_on_at_the_rate() -> None:
    times: list[float] = []

    async def call(pace: Pace) -> None:
        await pace.wait()
        times.append(round(now(), 3))

    pace = Pace(per_second=10)
    await asyncio.gather(*(call(pace) for _ in range(3)))
    await asyncio.sleep(100)
    await asyncio.gather(*(call(pace) for _ in range(2)))
    first = times[3]
    assert times == [0.0, 0.1, 0.2, first, round(first + 0.1, 3)]
    assert 100 <= first < 101
