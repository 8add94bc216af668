"""The poller of members: silent agents, a silent service, and who does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.operator import jobs
from tests.operator.controller.event_loop import run_in_virtual_time
from tests.operator.jobs import KEY, make_training

from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.base.reports import Heard
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.pollers import (
    MEMBERS_SECONDS,
    RETRY_SECONDS,
    SILENT_POLLS,
    SILENT_SECONDS,
    MembersPoller,
)

PORT = 9464
NOBODY = frozenset[str]()
LOST = Heard(frozenset({"pod-0"}), frozenset({"pod-1"}))
FINE = Heard(frozenset({"pod-0", "pod-1"}))


def rendezvous_pod(uid: str = "rdzv", **changes: Any) -> dict[str, Any]:
    pod = jobs.make_pod("job-rendezvous", uid=uid)
    pod["metadata"]["labels"][names.LABEL_COMPONENT] = names.RENDEZVOUS
    pod["metadata"]["annotations"] = {names.ANNOTATION_RENDEZVOUS: names.RENDEZVOUS_VERSION}
    pod["metadata"].update(changes.pop("metadata", {}))
    return {**pod, "status": {"phase": "Running", "podIP": "10.0.0.9", **changes}}


class Polling:
    """A poller of one job whose rendezvous service gives ``answer``."""

    def __init__(self) -> None:
        self.answer: Heard | None = FINE
        self.requests: list[tuple[str, int]] = []
        self.changed: list[Key] = []
        self.cache = Cache()
        self.cache.set_job(make_training())
        self.cache.set_pod(rendezvous_pod())
        self.poller = MembersPoller(self.cache, self.fetch, self.changed.append)

    async def fetch(self, address: str, port: int) -> Heard | None:
        self.requests.append((address, port))
        return self.answer

    async def polls(self, number: int, answer: Heard | None) -> frozenset[str]:
        """Return the silent pods after ``number`` further polls with ``answer``."""
        self.answer = answer
        self.poller.start(KEY, PORT)
        await asyncio.sleep(number * MEMBERS_SECONDS)
        return self.poller.heard(KEY).silent


def run(scenario: Callable[[Polling], Awaitable[None]]) -> None:
    async def main() -> None:
        polling = Polling()
        try:
            await scenario(polling)
        finally:
            await polling.poller.close()

    run_in_virtual_time(main())


def test_lost_agents_are_reported_once_until_they_return() -> None:
    async def scenario(p: Polling) -> None:
        assert p.poller.heard(KEY) == Heard()
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
        assert p.poller.heard(KEY) == Heard()

    run(scenario)


def test_a_service_that_answered_before_is_silent_after_a_while() -> None:
    async def scenario(p: Polling) -> None:
        assert await p.polls(10, None) == NOBODY, "it may not have started"
        assert await p.polls(2, LOST) == {"pod-1"}
        before = len(p.requests)
        assert await p.polls(1, None) == {"pod-1"}, "nothing new is known"
        assert await p.polls(2, None) == {"rdzv"}
        assert len(p.requests) - before >= SILENT_SECONDS - MEMBERS_SECONDS, "asked more often"
        p.cache.set_pod(rendezvous_pod("another"))
        assert await p.polls(10, None) == NOBODY
        assert await p.polls(2, FINE) == NOBODY

    run(scenario)


def test_an_operator_that_could_not_ask_for_long_believes_no_single_time_out() -> None:
    async def scenario(p: Polling) -> None:
        assert await p.polls(2, FINE) == NOBODY
        await asyncio.sleep(0)
        job = p.poller._jobs[KEY]
        job.answered -= 10 * SILENT_SECONDS  # as after a pause of the operator
        assert await p.polls(1, None) == NOBODY
        await asyncio.sleep(SILENT_POLLS * RETRY_SECONDS)
        assert p.poller.heard(KEY).silent == {"rdzv"}

    run(scenario)


def test_a_service_that_answers_again_in_time_is_not_silent() -> None:
    async def scenario(p: Polling) -> None:
        assert await p.polls(2, FINE) == NOBODY
        for _ in range(5):
            assert await p.polls(1, None) == NOBODY
            assert await p.polls(1, FINE) == NOBODY

    run(scenario)


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
    async def scenario(p: Polling) -> None:
        p.cache.set_pod(pod)
        assert await p.polls(3, LOST) == NOBODY
        assert p.requests == []

    run(scenario)
