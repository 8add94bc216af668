"""Names of objects, durations for people, times by the operator's clock, and the limits of a spec.

Names have at most 63 characters, are distinct, and valid for their kind. What is too deep or too large is
refused, and the largest job delays no other.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
from tests.operator.controller.event_loop import synchronous
from tests.operator.jobs import KEY, make_job
from tests.operator.object_store import Harness, run

from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import UnreadableError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import (
    MAX_BYTES,
    MAX_DEPTH,
    Transition,
    duration,
    require_bounded,
    transition,
)
from fluxtrain_operator.planner.changes import MAX_PODS_PER_PLAN
from fluxtrain_operator.planner.plan import load

LONG = "a" * 63
MAKERS = (
    lambda job: names.pod(job, 0),
    lambda job: names.pod(job, 4095),
    names.rendezvous,
    lambda job: names.rendezvous(job, 2),
    names.service,
    lambda job: names.revision(job, "0123456789abcdef"),
    names.network_policy,
    names.disruption_budget,
    names.pod_group,
    lambda job: names.kueue_group(job, 12),
)


@pytest.mark.parametrize(
    "job", ["a", "1", "mlperf", "a-b", LONG, "a" * 54 + "-" + "b" * 8, "0" * 63]
)
def test_every_name_is_valid(job: str) -> None:
    for make in MAKERS:
        name = make(job)
        assert len(name) <= 63
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name
    assert names.service(job)[0].isalpha(), "the name of a service starts with a letter"


def test_short_names_are_readable() -> None:
    assert names.pod("mlperf", 3) == "mlperf-3"
    assert names.rendezvous("mlperf") == "mlperf-rendezvous"
    assert names.service("mlperf") == "mlperf"
    assert names.service("1st") == "ft-1st"


@pytest.mark.parametrize("job", ["mlperf", LONG])
def test_the_names_of_rendezvous_pods_are_known(job: str) -> None:
    own = [names.rendezvous(job, number) for number in (1, 2, 10)]
    assert all(names.is_rendezvous(job, name) for name in own)
    others = [*(f"{own[0]}{end}" for end in ("0", "1", "02", "-2", "x", "9" * 10)), "rendezvous"]
    assert not any(names.is_rendezvous(job, name) for name in (*others, names.pod(job, 2)))
    assert not any(names.is_rendezvous("other", name) for name in own)


def test_long_jobs_that_differ_at_the_end_have_different_names() -> None:
    one, other = "a" * 62 + "b", "a" * 62 + "c"
    for make in MAKERS:
        assert make(one) != make(other)


def test_the_training_pods_selector_excludes_the_rendezvous_pod() -> None:
    all_pods, trainers = names.selector("job"), names.trainer_selector("job")
    assert all_pods.items() <= trainers.items()
    assert all_pods.items() <= names.labels("job", names.RENDEZVOUS).items()
    assert not trainers.items() <= names.labels("job", names.RENDEZVOUS).items()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (61, "1m1s"),
        (3599, "59m59s"),
        (3600, "1h"),
        (3605, "1h"),
        (7800, "2h10m"),
        (86_400, "1d"),
        (86_460, "1d"),
        (273_600, "3d4h"),
        (1e9, "11574d1h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


NOW, HOUR = 1_800_000_000.0, 3600.0


@pytest.mark.parametrize(
    ("told", "before", "is_watched", "time"),
    [
        (NOW - 2, None, True, NOW),
        (NOW + HOUR, None, True, NOW),
        (NOW - HOUR, None, True, NOW),
        # not watched: between the creation, 100 s ago, and now
        (NOW - 2, None, False, NOW - 2),
        (NOW, None, False, NOW),
        (NOW + HOUR, None, False, NOW),
        (NOW - HOUR, None, False, NOW - 100),
        # the same transition again, by a later leader's clock too
        (NOW - HOUR, Transition(NOW - HOUR, NOW - 50), True, NOW - 50),
        (NOW + HOUR, Transition(NOW + HOUR, NOW - 50), False, NOW - 50),
        (NOW + HOUR, Transition(NOW + HOUR, NOW + 7), True, NOW + 7),
        # another one, after it or before it
        (NOW + HOUR + 1, Transition(NOW + HOUR, NOW - 50), True, NOW),
        (NOW - HOUR, Transition(NOW + HOUR, NOW - 50), True, NOW),
    ],
)
def test_a_transition_has_a_time_of_the_operator(
    told: float, before: Transition | None, is_watched: bool, time: float
) -> None:
    found = transition(told, before, is_watched=is_watched, earliest=NOW - 100, now=NOW)
    assert found == Transition(told, time)
    assert told + found.shift == time


def test_nothing_is_later_than_now_even_if_the_object_was_created_later() -> None:
    found = transition(NOW - HOUR, None, is_watched=False, earliest=NOW + 9, now=NOW)
    assert found.time == NOW


def test_times_are_whole_seconds_as_those_of_kubernetes() -> None:
    assert transition(NOW, None, is_watched=True, earliest=0.0, now=NOW + 0.9).time == NOW


LARGEST = MAX_BYTES["spec.podTemplate"]


def nested(depth: int, kind: str = "mapping") -> Any:
    """Return mappings or lists that are nested ``depth`` deep."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if kind == "mapping" else [value]
    return value


def templated(template: Any, nodes: int = 1) -> Manifest:
    manifest = make_job()
    manifest["spec"] |= {"podTemplate": template, "nodes": {"min": 1, "max": nodes}}
    return manifest


@pytest.mark.parametrize("kind", ["mapping", "list"])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1_000, 100_000])
def test_a_spec_that_is_too_deep_is_refused_with_its_path(kind: str, depth: int) -> None:
    template = {"spec": {"affinity": {"a": nested(depth, kind)}}}
    with pytest.raises(ConfigError, match="must be nested at most 32 deep") as error:
        load(templated(template), "trainer:1")
    assert str(error.value).startswith("spec.podTemplate.spec.affinity.a")
    assert len(str(error.value)) < 200


def test_the_deepest_and_the_largest_spec_are_accepted() -> None:
    require_bounded(nested(MAX_DEPTH), "spec")
    with pytest.raises(ConfigError):
        require_bounded(nested(MAX_DEPTH + 1), "spec")
    require_bounded({"a": "x" * (LARGEST - 100)}, "spec.podTemplate")
    for value in ({"a": "x" * LARGEST}, {"x" * LARGEST: 1}, [0] * LARGEST, {"a": [""] * LARGEST}):
        with pytest.raises(ConfigError, match="must be at most 64 KiB as JSON"):
            require_bounded(value, "spec.podTemplate")


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"affinity": {"a": "x" * 1_000_000}}},
        {"spec": {"affinity": {str(n): {} for n in range(20_000)}}},
        {"spec": {"hostAliases": [{"ip": "192.0.2.1"}] * 65}},
        {"spec": {"containers": [{"name": "trainer", "volumeMounts": [{"mountPath": "/a"}] * 65}]}},
        {"spec": {"initContainers": [{"name": "a", "image": "a", "env": [{"name": "A"}] * 129}]}},
    ],
)
def test_oversized_values_and_lists_are_refused(template: Manifest) -> None:
    with pytest.raises(ConfigError, match="at most"):
        load(templated(template), "trainer:1")


class FailingSpec(dict[str, Any]):
    """A spec that raises an unexpected error when it is read."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "podTemplate":
            raise MemoryError("too much")
        return super().get(key, default)


def test_an_unexpected_error_is_reported_in_the_job_and_affects_no_other() -> None:
    failing = {**make_job("failing"), "spec": FailingSpec(make_job()["spec"])}
    with pytest.raises(
        UnreadableError, match="this operator cannot read it: MemoryError: too much"
    ):
        load(failing, "trainer:1")

    async def main() -> list[float | None]:
        harness = Harness()
        harness.cache.set_job(failing)
        requeue_after = [
            await harness.reconciler.reconcile(("ns", name)) for name in ("failing", "job")
        ]
        assert len(harness.cluster.own("Pod")) == 5
        await harness.reconciler.poller.close()
        return requeue_after

    requeue_after, _ = asyncio.run(main())
    assert requeue_after is not None, "the error may be temporary"
    assert requeue_after >= 60


def test_an_unexpected_error_does_not_fail_the_job() -> None:
    harness = Harness(spec=FailingSpec(make_job()["spec"]))
    run(harness, 1)
    assert harness.cluster.condition("Healthy")[:2] == ("False", "InvalidSpec")
    assert "phase" not in harness.cluster.status


TEMPLATES = {
    "none": {},
    "variables": {
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": f"A{n}", "value": "x" * 440} for n in range(128)],
            }
        ]
    },
    "mappings": {"affinity": {f"k{n}": {"a": {"b": n}} for n in range(2_000)}},
    "aliases": {"hostAliases": [{"ip": "192.0.2.1", "hostnames": ["h" * 900]}] * 64},
}


@synchronous
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("nodes", [64, 4096])
async def test_the_largest_job_does_not_delay_the_lease(template: str, nodes: int) -> None:
    """The renewal needs the event loop, so the longest block of CPU time is bounded."""
    manifest = templated({"spec": TEMPLATES[template]}, nodes)
    assert len(json.dumps(manifest["spec"]["podTemplate"])) < LARGEST
    harness = Harness()
    harness.set_job(manifest, version="2")
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    ticking = asyncio.create_task(tick())
    for _ in range(3):
        requeue_after = await harness.reconciler.reconcile(KEY)
        await asyncio.sleep(0)
    assert nodes <= 2 * MAX_PODS_PER_PLAN or requeue_after == 0.0, "the rest follows at once"
    ticking.cancel()
    await harness.reconciler.poller.close()
    assert len(harness.cluster.own("Pod")) == min(nodes, 3 * MAX_PODS_PER_PLAN) + 1
    assert longest < 1.0, f"the loop was blocked for {longest:.2f} s"


def test_pods_of_one_job_share_the_template_but_not_their_identity() -> None:
    harness = Harness()
    shared = {"spec": {"tolerations": [{"key": "spot"}], **TEMPLATES["aliases"]}}
    harness.set_job(templated(shared, 3), version="2")
    run(harness, 1)
    pods = [harness.cluster.objects["Pod", f"job-{n}"] for n in range(3)]
    assert all(pod["spec"]["hostAliases"] == TEMPLATES["aliases"]["hostAliases"] for pod in pods)
    assert [pod["metadata"]["labels"][names.LABEL_INDEX] for pod in pods] == ["0", "1", "2"]
    assert [pod["spec"]["hostname"] for pod in pods] == ["job-0", "job-1", "job-2"]
