"""The events about objects that cannot be read: one per generation, bounded, and none for others."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.controller.event_loop import now, run_in_virtual_time
from tests.operator.jobs import make_pod, make_training

from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.controller import kopf_handlers
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.list_watch import MAX_KNOWN, Reference, UnreadableObjects
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.plan import Event

POD = ("v1", "Pod")
ERROR = AttributeError("'str' object has no attribute 'get'")


class Reported(UnreadableObjects):
    """Records the events that are created, and when; the first ``num_refused`` are refused."""

    def __init__(self, num_refused: int = 0) -> None:
        super().__init__(Metrics(CollectorRegistry()))
        self.events, self.times = list[tuple[Reference, Event]](), list[float]()
        self.num_refused = num_refused

    async def create_event(self, reference: Reference, event: Event) -> None:
        self.times.append(now())
        if self.num_refused:
            self.num_refused -= 1
            raise ApiError(403, "forbidden: the namespace is being terminated")
        self.events.append((reference, event))

    async def post(self, seconds: float = 1000.0) -> None:
        """Create the events that are due in the next ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.post_events(self.create_event)

    @property
    def names(self) -> list[str]:
        return [reference["name"] for reference, _ in self.events]


def pod(name: str = "broken", **metadata: Any) -> Manifest:
    return make_pod(name, **metadata)


def test_the_event_is_about_the_object() -> None:
    async def main() -> None:
        reported = Reported()
        reported.report(POD, pod(), ERROR)
        await reported.post()
        ((reference, event),) = reported.events
        identity = {"name": "broken", "namespace": "ns", "uid": "broken"}
        assert reference == {"apiVersion": "v1", "kind": "Pod", **identity}
        assert (event.type, event.reason) == ("Warning", "Unreadable")
        assert event.message == f"ignored by the operator: AttributeError: {ERROR}"

    run_in_virtual_time(main())


def test_one_event_per_object_and_generation() -> None:
    async def main() -> None:
        reported = Reported()
        for generation, count in ((None, 3), (1, 2), (2, 2), (1, 1)):
            for _ in range(count):
                changes = {} if generation is None else {"generation": generation}
                reported.report(POD, pod(**changes), ERROR)
                await reported.post()
        assert len(reported.events) == 4
        reported.report(POD, pod("another"), ERROR)
        await reported.post()
        assert reported.names[-1] == "another"

    run_in_virtual_time(main())


def test_a_replica_that_becomes_leader_tells_what_it_has_read_before() -> None:
    async def main() -> None:
        reported = Reported()
        for _ in range(3):
            reported.report(POD, pod(), ERROR)
        assert not reported.events
        await reported.post(5)
        reported.report(POD, pod("later"), ERROR)
        await reported.post(5)
        assert reported.names == ["broken", "later"]

    run_in_virtual_time(main())


def test_a_refused_event_is_tried_again_when_the_object_is_read_again() -> None:
    async def main() -> None:
        reported = Reported(num_refused=1)
        for _ in range(2):
            reported.report(POD, pod(), ERROR)
            reported.report(POD, pod("other"), ERROR)
            await reported.post()
        assert reported.names == ["other", "broken"]

    run_in_virtual_time(main())


def test_many_objects_are_bounded_in_memory_and_in_rate() -> None:
    async def main() -> None:
        reported = Reported()
        for number in range(2 * MAX_KNOWN):
            reported.report(POD, pod(f"pod-{number}"), ERROR)
        await reported.post()
        assert reported.names == [f"pod-{number}" for number in range(MAX_KNOWN, 2 * MAX_KNOWN)]
        assert len(reported._known) == MAX_KNOWN
        assert reported.times[-1] - reported.times[0] > MAX_KNOWN / 10

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"metadata": None},
        {"metadata": []},
        {"metadata": {"name": "node-1", "uid": "u"}},  # without a namespace
        {"metadata": {"name": "a", "namespace": "ns"}},  # without a uid
        {"metadata": {"name": 1, "namespace": ["ns"], "uid": {}}},
    ],
)
def test_without_a_reference_there_is_no_event_and_no_error(manifest: Manifest) -> None:
    async def main() -> None:
        reported = Reported()
        reported.report(("v1", "Node"), manifest, ERROR)
        await reported.post()
        assert not reported.events
        name, labels = "fluxtrain_operator_unreadable_objects_total", {"kind": "node"}
        assert reported._metrics.registry.get_sample_value(name, labels) == 1

    run_in_virtual_time(main())


def test_a_job_that_cannot_be_read_is_told() -> None:
    async def main() -> None:
        reported, queued = Reported(), list[object]()
        registry = kopf_handlers.make_registry(Cache(), queued.append, reported._metrics, reported)
        (handler,) = registry._watching.get_all_handlers()
        job = make_training(spec={"lifecycle": {"startAfter": 5}}, generation=3)
        for _ in range(2):
            await handler.fn(event={"type": "MODIFIED", "object": job})
        await reported.post()
        ((reference, event),) = reported.events
        assert (reference["kind"], reference["name"]) == ("FluxTraining", "job")
        assert reference["apiVersion"] == "fluxtrain.dev/v1alpha1"
        assert "TypeError" in event.message
        assert not queued

    run_in_virtual_time(main())
