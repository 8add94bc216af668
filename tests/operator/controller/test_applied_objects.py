"""Supporting objects in the cache: only those of jobs, by uid; what is unchanged or late causes no work."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.operator.jobs import KEY, OWNER

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.controller.cache import Applied, AppliedObjects

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
    assert objects.of("uid-job", KINDS) == {("Service", "one"): Applied("u", "a", 1)}
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
