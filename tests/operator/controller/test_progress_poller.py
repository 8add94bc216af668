"""Trainers are asked beside the reconciles: rank 0 alone once it is known, and no job waits for another's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fluxtrain.contract.resource.status import ProgressStatus
from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.progress_poller import ProgressPoller
from fluxtrain_operator.names import Key
from fluxtrain_operator.progress import Progress

KEY = ("ns", "job")
PORT = 9464
JOB = {"metadata": {"name": "job", "namespace": "ns", "uid": "job", "resourceVersion": "1"}}


def make_store() -> Cache:
    """Return a store that knows the job."""
    store = Cache()
    store.set_job(JOB)
    return store


def pod(index: int, phase: str = "Running", uid: str | None = None) -> dict[str, Any]:
    labels = {names.LABEL_JOB: "job"}
    owner = {"kind": "FluxTraining", "name": "job", "uid": "job", "controller": True}
    metadata: dict[str, Any] = {"name": f"job-{index}", "namespace": "ns", "labels": labels}
    metadata["ownerReferences"] = [owner]
    status = {"phase": phase, "podIP": f"10.0.0.{index}"}
    return {"metadata": {**metadata, "uid": uid or f"uid-{index}"}, "status": status}


def step(number: int) -> Progress:
    return Progress(ProgressStatus(step=number))


@dataclass
class Trainers:
    """Pods of which one, at ``rank_0``, answers with a step."""

    rank_0: str = "10.0.0.1"
    now: Progress | None = field(default_factory=lambda: step(1))
    asked: list[str] = field(default_factory=list)

    async def ask(self, address: str, port: int) -> Progress | None:
        assert port == PORT
        self.asked.append(address)
        await asyncio.sleep(0)
        return self.now if address == self.rank_0 else None


def run(
    trainers: Trainers,
    scenario: Callable[[ProgressPoller, Cache, list[Key]], Awaitable[None]],
    seconds: float = 0.02,
) -> None:
    async def main() -> None:
        store, news = make_store(), list[Key]()
        for index in range(3):
            store.set_pod(pod(index))
        answers = ProgressPoller(store, trainers.ask, news.append, seconds)
        try:
            async with asyncio.timeout(20):
                await scenario(answers, store, news)
        finally:
            await answers.close()

    asyncio.run(main())


def test_all_pods_are_asked_until_one_says_that_it_is_rank_0_and_then_only_that_one() -> None:
    trainers = Trainers()

    async def scenario(answers: ProgressPoller, store: Cache, news: list[Key]) -> None:
        answers.follow(KEY, PORT)
        assert answers.last(KEY) is None
        while not news:
            await asyncio.sleep(0.01)
        assert sorted(trainers.asked) == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
        assert answers.last(KEY) == step(1)
        trainers.asked.clear()
        while len(trainers.asked) < 3:
            await asyncio.sleep(0.01)
        assert set(trainers.asked) == {"10.0.0.1"}

    run(trainers, scenario)


def test_only_an_answer_that_differs_is_news() -> None:
    trainers = Trainers()

    async def scenario(answers: ProgressPoller, store: Cache, news: list[Key]) -> None:
        answers.follow(KEY, PORT)
        while len(trainers.asked) < 10:
            await asyncio.sleep(0.01)
        assert news == [KEY]
        trainers.now = step(2)
        while len(news) < 2:
            await asyncio.sleep(0.01)
        assert answers.last(KEY) == step(2)
        trainers.now = None
        while len(news) < 3:
            await asyncio.sleep(0.01)
        assert answers.last(KEY) is None

    run(trainers, scenario)


def test_rank_0_is_found_in_another_pod() -> None:
    trainers = Trainers()

    async def scenario(answers: ProgressPoller, store: Cache, news: list[Key]) -> None:
        answers.follow(KEY, PORT)
        while not news:
            await asyncio.sleep(0.01)
        trainers.rank_0, trainers.now = "10.0.0.2", step(5)
        while answers.last(KEY) != step(5):
            await asyncio.sleep(0.01)

    run(trainers, scenario)


def test_where_rank_0_is_done_the_others_tell_whether_there_is_progress() -> None:
    said = {
        "10.0.0.1": replace(step(9), phase="complete", alive=100.0),
        "10.0.0.2": replace(step(9), phase="sampling", alive=200.0, rank=4),
    }

    async def ask(address: str, port: int) -> Progress | None:
        return said.get(address)

    async def main() -> None:
        store, news = Cache(), list[Key]()
        store.set_job(JOB)
        for index in range(3):
            store.set_pod(pod(index))
        answers = ProgressPoller(store, ask, news.append, 0.02)
        async with asyncio.timeout(20):
            answers.follow(KEY, PORT)
            while (last := answers.last(KEY)) is None or last.alive != 200.0:
                await asyncio.sleep(0.01)
            assert last.phase == "complete"
            said["10.0.0.1"] = replace(step(9), phase="running", alive=300.0)
            while (last := answers.last(KEY)) is None or last.alive != 300.0:
                await asyncio.sleep(0.01)
            await answers.close()

    asyncio.run(main())


def test_the_answer_of_a_pod_that_runs_no_more_is_not_believed() -> None:
    trainers = Trainers()

    async def scenario(answers: ProgressPoller, store: Cache, news: list[Key]) -> None:
        answers.follow(KEY, PORT)
        while not news:
            await asyncio.sleep(0.01)
        store.set_pod(pod(1, phase="Failed"))
        assert answers.last(KEY) is None
        store.set_pod(pod(1, uid="namesake"))
        assert answers.last(KEY) is None

    run(trainers, scenario, seconds=100)


def test_trainers_are_asked_at_once_when_pods_come_or_go_while_the_job_trains() -> None:
    trainers = Trainers()

    async def scenario(answers: ProgressPoller, store: Cache, news: list[Key]) -> None:
        answers.follow(KEY, PORT)
        while not news:
            await asyncio.sleep(0.01)
        trainers.now = step(2)
        answers.follow(KEY, PORT)
        await asyncio.sleep(0.05)
        assert answers.last(KEY) == step(1), "the same pods are asked in their own time"
        store.set_pod(pod(2), gone=True)
        answers.follow(KEY, PORT)
        while answers.last(KEY) != step(2):
            await asyncio.sleep(0.01)

    run(trainers, scenario, seconds=100)


def test_a_job_that_is_left_is_asked_no_more_and_forgotten() -> None:
    trainers = Trainers()

    async def scenario(answers: ProgressPoller, store: Cache, news: list[Key]) -> None:
        answers.follow(KEY, PORT)
        while not news:
            await asyncio.sleep(0.01)
        answers.leave(KEY)
        answers.leave(KEY)
        assert len(answers) == 0
        assert answers.last(KEY) is None
        trainers.asked.clear()
        await asyncio.sleep(0.1)
        assert trainers.asked == []

    run(trainers, scenario)


def test_a_job_whose_trainers_hang_holds_up_no_other() -> None:
    trainers, hang = Trainers(), asyncio.Event()

    async def ask(address: str, port: int) -> Progress | None:
        if port != PORT:
            await hang.wait()
        return await trainers.ask(address, PORT)

    async def main() -> None:
        store, news = make_store(), list[Key]()
        for key in ("job", "stuck"):
            one = pod(1, uid=key)
            one["metadata"]["labels"] = {names.LABEL_JOB: key}
            store.set_pod(one)
        answers = ProgressPoller(store, ask, news.append, 0.02)
        async with asyncio.timeout(20):
            answers.follow(("ns", "stuck"), 1)
            answers.follow(KEY, PORT)
            while not news:
                await asyncio.sleep(0.01)
            await answers.close()
        assert news == [KEY]

    asyncio.run(main())


def test_a_port_that_changes_is_asked_from_then_on() -> None:
    ports: list[int] = []

    async def ask(address: str, port: int) -> Progress | None:
        ports.append(port)
        return None

    async def main() -> None:
        store = make_store()
        store.set_pod(pod(0))
        answers = ProgressPoller(store, ask, lambda key: None, 0.02)
        async with asyncio.timeout(20):
            for port in (1, 2):
                answers.follow(KEY, port)
                while port not in ports:
                    await asyncio.sleep(0.01)
        assert len(answers) == 1
        await answers.close()

    asyncio.run(main())


def test_asking_goes_on_after_an_error_of_our_own(caplog: pytest.LogCaptureFixture) -> None:
    trainers = Trainers()

    async def ask(address: str, port: int) -> Progress | None:
        if not trainers.asked:
            trainers.asked.append(address)
            raise RuntimeError("a bug")
        return await trainers.ask(address, port)

    async def main() -> None:
        store, news = make_store(), list[Key]()
        store.set_pod(pod(1))
        answers = ProgressPoller(store, ask, news.append, 0.02)
        async with asyncio.timeout(20):
            while not news:
                answers.follow(KEY, PORT)
                await asyncio.sleep(0.01)
        await answers.close()

    asyncio.run(main())
    assert "a bug" in caplog.text


def test_a_pod_that_only_has_the_jobs_label_is_not_asked() -> None:
    trainers = Trainers(rank_0="10.0.0.9")

    async def scenario(answers: ProgressPoller, store: Cache, news: list[Key]) -> None:
        stranger = pod(9)
        stranger["metadata"]["ownerReferences"] = []
        store.set_pod(stranger)
        answers.follow(KEY, PORT)
        while len(trainers.asked) < 6:
            await asyncio.sleep(0.01)
        assert "10.0.0.9" not in trainers.asked
        assert answers.last(KEY) is None

    run(trainers, scenario)


@pytest.mark.parametrize(("num_jobs", "often"), [(1, True), (40, False)])
def test_where_very_many_do_not_answer_they_are_asked_less_often(
    num_jobs: int, often: bool
) -> None:
    """25 pods a second, of all jobs together; those that answer are asked as often as ever."""
    asked: list[str] = []

    async def ask(address: str, port: int) -> Progress | None:
        asked.append(address)
        return step(1) if address == "answers" else None

    async def main() -> None:
        store = make_store()
        for index in range(num_jobs):
            one = pod(0, uid=f"silent-{index}")
            one["metadata"]["labels"] = {names.LABEL_JOB: f"silent-{index}"}
            store.set_job({"metadata": {**JOB["metadata"], "name": f"silent-{index}"}})
            store.set_pod(one)
        talking = pod(1)
        talking["status"]["podIP"] = "answers"
        store.set_pod(talking)
        answers = ProgressPoller(store, ask, lambda key: None, 0.02)
        answers.follow(KEY, PORT)
        for index in range(num_jobs):
            answers.follow(("ns", f"silent-{index}"), PORT)
        async with asyncio.timeout(20):
            while asked.count("answers") < 20:
                await asyncio.sleep(0.01)
            rounds = (len(asked) - asked.count("answers")) / num_jobs
            assert (rounds > 5) is often
            for index in range(num_jobs):
                answers.leave(("ns", f"silent-{index}"))
            assert not answers._num_silent
        await answers.close()

    asyncio.run(main())
