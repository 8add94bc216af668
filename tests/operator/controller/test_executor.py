"""What reaches the API server: pods created together, supporting objects applied once, requests counted.

Pods of a namespace are created together, however many jobs it has. What is unchanged or late causes no work.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import pytest
from tests.operator.controller.event_loop import synchronous
from tests.operator.jobs import KEY, OWNER, make_training

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.controller.api_client import resource_of
from fluxtrain_operator.controller.cache import Applied, AppliedObjects, Cache
from fluxtrain_operator.controller.executor import _POD_SLOTS, Executor, JobState
from fluxtrain_operator.planner.observed import Observed
from fluxtrain_operator.planner.plan import load, plan


class SlowStore:
    """An API server that counts the requests of each namespace that are in flight."""

    def __init__(self) -> None:
        self.in_flight, self.most = Counter[str](), Counter[str]()
        self.created = Counter[str]()

    async def create(self, manifest: Manifest) -> Manifest:
        namespace = manifest["metadata"]["namespace"]
        self.in_flight[namespace] += 1
        self.most[namespace] = max(self.most[namespace], self.in_flight[namespace])
        await asyncio.sleep(0.001)
        self.in_flight[namespace] -= 1
        self.created[namespace] += 1
        return {**manifest, "metadata": {**manifest["metadata"], "uid": f"{self.created.total()}"}}


@synchronous
async def test_the_jobs_of_a_namespace_share_its_slots() -> None:
    store = SlowStore()
    executor = Executor(Cache(), store)  # type: ignore[arg-type]

    async def create(namespace: str, name: str) -> None:
        manifest = make_training()
        manifest["metadata"] |= {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}
        job = load(manifest, "trainer:1")
        pods: list[Manifest] = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{name}-{number}", "namespace": namespace},
            }
            for number in range(40)
        ]
        await executor._create_pods(job, pods, JobState(job.uid))

    jobs = [("busy", f"job-{number}") for number in range(5)] + [("quiet", "job")]
    await asyncio.gather(*(create(*job) for job in jobs))
    assert store.created == {"busy": 200, "quiet": 40}
    assert store.most == {"busy": _POD_SLOTS, "quiet": _POD_SLOTS}


class Refusing(SlowStore):
    """An API server whose quota refuses all pods with a word in their names."""

    refused = "-rendezvous"

    async def create(self, manifest: Manifest) -> Manifest:
        if self.refused in manifest["metadata"]["name"]:
            raise ApiError(403, "create", server_message="exceeded quota: small")
        return await super().create(manifest)


@pytest.mark.parametrize(("refused", "num_created"), [("-rendezvous", 0), ("job-2", 16), ("-", 0)])
def test_no_training_pod_is_created_while_the_rendezvous_pod_is_refused(
    refused: str, num_created: int
) -> None:
    manifest, store = make_training({"nodes": {"min": 20, "max": 20}}), Refusing()
    store.refused = refused
    job = load(manifest, "trainer:1")
    result = plan(job, Observed(), 0.0)
    pods = [created for created in result.create if created["kind"] == "Pod"]
    assert names.is_rendezvous(job.name, pods[0]["metadata"]["name"])
    state = JobState(job.uid)
    asyncio.run(Executor(Cache(), store)._create_pods(job, pods, state))  # type: ignore[arg-type]
    assert store.created.total() == num_created
    reasons = {failure.reason for failure in state.create_failures.values()}
    assert reasons == {"QuotaExceeded"}
    assert len(state.create_failures) == len(pods) - num_created
    failures = tuple(state.create_failures.values())
    retry = min(failure.retry_time for failure in failures)
    for now, num_tried in ((retry - 0.1, 0), (retry, len(pods))):
        again = plan(job, Observed(create_failures=failures), now).create
        assert sum(created["kind"] == "Pod" for created in again) == num_tried


SERVICE = ("v1", "Service")
KINDS = {"Service": "v1"}
OTHER = {**OWNER, "name": "other", "uid": "uid-other"}


def service(
    name: str = "job", applied: str = "a", version: int = 1, owners: Any = (OWNER,), **more: Any
) -> Manifest:
    common = {"name": name, "namespace": "ns", "uid": "u", "resourceVersion": str(version)}
    notes = {names.ANNOTATION_APPLIED: applied}
    return {"metadata": {**common, "annotations": notes, "ownerReferences": [*owners], **more}}


def filled(*manifests: Manifest) -> AppliedObjects:
    objects = AppliedObjects()
    for manifest in manifests:
        objects.set(SERVICE, manifest)
    return objects


@pytest.mark.parametrize(
    "owners",
    [
        [],
        None,
        [{**OWNER, "controller": False}],
        [{**OWNER, "uid": ""}],
        [{"kind": "Deployment", "name": "shop", "uid": "uid-job", "controller": True}],
    ],
)
def test_an_object_of_another_owner_is_not_kept_and_no_job_is_queued(owners: Any) -> None:
    objects = AppliedObjects()
    foreign = service()
    foreign["metadata"]["ownerReferences"] = owners
    for _ in range(100):
        assert objects.set(SERVICE, foreign) == []
    assert objects.remove(SERVICE, foreign) == []
    assert (len(objects), objects.of("uid-job", KINDS)) == (0, {})


def test_objects_are_found_by_the_uid_of_the_job_and_the_version_of_the_api() -> None:
    objects = filled(service("one"), service("two", owners=[OTHER]))
    group = ("scheduling.volcano.sh/v1beta1", "PodGroup")
    objects.set(group, service("gang"))
    assert objects.of("uid-job", KINDS) == {("Service", "one"): Applied("u", "a", version=1)}
    assert ("PodGroup", "gang") in objects.of("uid-job", {"PodGroup": group[0]})
    assert objects.of("uid-job", {"PodGroup": "scheduling.x-k8s.io/v1alpha1"}) == {}
    assert objects.of("", KINDS) == {}


@pytest.mark.parametrize(
    ("change", "queued"),
    [
        ({}, []),
        ({"version": 2}, []),
        ({"version": 2, "labels": {"a": "b"}}, []),
        ({"version": 2, "applied": "b"}, [KEY]),
        ({"version": 2, "uid": "another"}, [KEY]),
        ({"version": 2, "owners": []}, [KEY]),
        ({"version": 2, "owners": [OTHER]}, [KEY, ("ns", "other")]),
        ({"version": 0, "applied": "b"}, [KEY]),
    ],
)
def test_only_what_the_planner_compares_queues_a_job(change: Any, queued: Any) -> None:
    assert filled(service()).set(SERVICE, service(**change)) == queued


def test_an_event_that_is_older_than_our_own_write_is_ignored() -> None:
    objects = filled(service(applied="new", version=7))
    assert objects.set(SERVICE, service(applied="old", version=6)) == []
    assert objects.of("uid-job", KINDS)["Service", "job"].applied_hash == "new"


def test_a_deletion_counts_only_for_the_same_uid() -> None:
    objects = filled(service())
    assert objects.remove(SERVICE, service(uid="earlier")) == []
    assert objects.remove(SERVICE, service(version=9)) == [KEY]
    assert objects.remove(SERVICE, service(version=9)) == [], "twice"
    assert len(objects) == len(objects._by_owner) == 0


def test_a_list_removes_what_it_has_not_but_nothing_newer_and_nothing_elsewhere() -> None:
    objects = filled(
        service("stays", uid="1"),
        service("goes", uid="2"),
        service("newer", uid="3", version=9),
        service("elsewhere", uid="4", namespace="b"),
    )
    objects.set(("v1", "ConfigMap"), service("map", uid="5"))
    assert objects.retain(SERVICE, {"1"}, 5, "ns") == [KEY]
    kept = {name for _, name in objects.of("uid-job", {"Service": "v1", "ConfigMap": "v1"})}
    assert kept == {"stays", "newer", "elsewhere", "map"}


def test_an_object_that_our_own_request_found_gone_is_forgotten() -> None:
    objects = filled(service())
    objects.discard("uid-other", SERVICE, "ns", "job")
    assert len(objects) == 1
    objects.discard("uid-job", SERVICE, "ns", "job")
    objects.discard("uid-job", SERVICE, "ns", "job")
    assert len(objects) == 0


def test_an_object_takes_little_memory() -> None:
    """Nothing of the manifest is kept but name, uid, owner, hash and version."""
    objects = filled(service(annotations={names.ANNOTATION_APPLIED: "h", "other": "x" * 10_000}))
    seen, size, stack = set[int](), 0, [objects._entries, objects._by_owner]
    while stack:
        value: Any = stack.pop()
        if id(value) not in seen:
            seen.add(id(value))
            size += sys.getsizeof(value)
            stack += [*value.keys(), *value.values()] if isinstance(value, dict) else []
            stack += value if isinstance(value, tuple) else []
    assert size < 3000


PATHS = {
    "/api/v1/namespaces/team/pods": "pods",
    "/api/v1/namespaces/team/pods/job-0": "pods",
    "/api/v1/namespaces/team/configmaps?labelSelector=a%3Db": "configmaps",
    "/apis/fluxtrain.dev/v1alpha1/namespaces/t/fluxtrainings/x/status?fieldManager=y": (
        "fluxtrainings/status"
    ),
    "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/n?force=true": "networkpolicies",
    "/apis/scheduling.volcano.sh/v1beta1": "",
    "/api/v1": "",
}


@pytest.mark.parametrize(("path", "resource"), PATHS.items())
def test_a_request_is_counted_by_its_resource(path: str, resource: str) -> None:
    assert resource_of(path) == resource
