"""Which existing objects without an owner are a job's by content, and the command that removes others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.jobs import make_job

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import desired
from fluxtrain_operator.resources.existing import is_restored, is_restored_pod, removal, resource

Change = Callable[[Manifest], Any]


def loaded(uid: str = "uid-job", image: str = "trainer:1") -> Job:
    manifest = make_job()
    manifest["metadata"]["uid"] = uid
    return load(manifest, image)


JOB, EARLIER = loaded(), loaded("uid-earlier")
KINDS = ["ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget"]
PODS = ["job-0", "job-rendezvous"]
OWNER = {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "n"}


def restored(job: Job, kind: str, name: str = "") -> Manifest:
    """Return an object of ``job`` as a backup brings it back: without its owner, with defaults."""
    found = (m for m in desired(job) if m["kind"] == kind and name in ("", m["metadata"]["name"]))
    manifest: Manifest = json.loads(json.dumps(next(found)))
    metadata = manifest["metadata"]
    del metadata["ownerReferences"]
    metadata |= {"uid": "new", "resourceVersion": "7"}
    metadata["labels"]["velero.io/restore-name"] = "nightly"
    if kind == "Service":
        manifest["spec"] |= {
            "type": "ClusterIP",
            "clusterIPs": ["None"],
            "sessionAffinity": "None",
            "internalTrafficPolicy": "Cluster",
            "ipFamilies": ["IPv6"],
            "ipFamilyPolicy": "SingleStack",
        }
        for port in manifest["spec"]["ports"]:
            port["targetPort"] = port["port"]
    return manifest


def wanted(kind: str) -> Manifest:
    return next(m for m in desired(JOB) if m["kind"] == kind)


def at(*path: str | int, value: Any) -> Change:
    """Return what sets the field at ``path``."""

    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_with_the_content_of_the_jobs_is_its_own(kind: str) -> None:
    existing = restored(EARLIER, kind)
    assert is_restored(existing, wanted(kind))
    existing["metadata"] |= {"labels": None, "annotations": {"a": "b"}}
    assert is_restored(existing, wanted(kind)), "labels count for nothing"


OTHERS: dict[str, tuple[str, Change]] = {
    "other data": ("ConfigMap", at("data", "spec-hash", value="x")),
    "more data": ("ConfigMap", at("data", "more", value="x")),
    "binary data": ("ConfigMap", at("binaryData", value={"a": "eA=="})),
    "it may be changed": ("ConfigMap", at("immutable", value=False)),
    "another selector": ("Service", at("spec", "selector", value={"app": "shop"})),
    "a narrower selector": ("Service", at("spec", "selector", "app", value="shop")),
    "other addresses": ("Service", at("spec", "externalIPs", value=["192.0.2.1"])),
    "a port elsewhere": ("Service", at("spec", "ports", 0, "targetPort", value=22)),
    "an address of its own": ("Service", at("spec", "clusterIP", value="10.0.0.7")),
    "sessions": ("Service", at("spec", "sessionAffinity", value="ClientIP")),
    "one rule more": ("NetworkPolicy", lambda m: m["spec"]["ingress"].append({})),
    "all pods": ("NetworkPolicy", at("spec", "podSelector", value={})),
    "another number": ("PodDisruptionBudget", at("spec", "minAvailable", value=0)),
    "an owner": ("Service", at("metadata", "ownerReferences", value=[OWNER])),
    "being deleted": ("Service", at("metadata", "deletionTimestamp", value="2026-01-01T00:00:00Z")),
    "nothing": ("Service", lambda m: m.pop("spec")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_object_that_differs_or_has_an_owner_is_not(other: str) -> None:
    kind, change = OTHERS[other]
    existing = restored(EARLIER, kind)
    change(existing)
    assert not is_restored(existing, wanted(kind))


@pytest.mark.parametrize("name", PODS)
def test_a_pod_that_runs_the_revision_is_the_jobs(name: str) -> None:
    existing = restored(EARLIER, "Pod", name)
    assert is_restored_pod(existing, JOB, JOB.spec_revision)
    existing["spec"]["containers"].append({"name": "proxy", "image": "proxy:1"})
    existing["spec"]["containers"][0]["env"].append({"name": "INJECTED", "value": "1"})
    assert is_restored_pod(existing, JOB, JOB.spec_revision), "others may inject"
    assert not is_restored_pod(existing, JOB, loaded(image="trainer:2").spec_revision)


def test_the_revision_is_the_same_in_each_life_of_a_job_but_the_secret_is_not() -> None:
    assert EARLIER.spec_revision == JOB.spec_revision
    for name in PODS:
        text = json.dumps(restored(JOB, "Pod", name)["spec"]["volumes"])
        assert names.rendezvous_key("job", JOB.uid) in text
        assert names.rendezvous_key("job", EARLIER.uid) not in text


def config_of(name: str) -> Change:
    def change(manifest: Manifest) -> None:
        (volume,) = (v for v in manifest["spec"]["volumes"] if v["name"] == "config")
        volume["configMap"] = {"name": name}

    return change


def container(key: str, value: Any) -> Change:
    return at("spec", "containers", 0, key, value=value)


OTHER_PODS: dict[str, tuple[str, Change]] = {
    "another image": ("job-0", container("image", "evil:1")),
    "another command": ("job-0", container("command", ["sh"])),
    "arguments": ("job-0", container("args", ["--more"])),
    "no variables": ("job-0", container("env", [])),
    "another config": ("job-0", config_of("job-0123456789abcdef")),
    "another name": ("job-0", at("metadata", "name", value="shop-0")),
    "another container": ("job-0", container("name", "main")),
    "no spec": ("job-0", at("spec", value={})),
    "an owner": ("job-0", at("metadata", "ownerReferences", value=[OWNER])),
    "being deleted": ("job-0", at("metadata", "deletionTimestamp", value="2026-01-01T00:00:00Z")),
    "a trainer as rendezvous": ("job-0", at("metadata", "name", value="job-rendezvous")),
    "another key": (
        "job-rendezvous",
        lambda m: m["spec"]["containers"][0]["args"].__setitem__(-2, "--key=/tmp/key"),
    ),
    "fewer arguments": ("job-rendezvous", lambda m: m["spec"]["containers"][0]["args"].pop()),
}


@pytest.mark.parametrize("other", OTHER_PODS)
def test_a_pod_that_runs_anything_else_is_not(other: str) -> None:
    name, change = OTHER_PODS[other]
    existing = copy.deepcopy(restored(EARLIER, "Pod", name))
    change(existing)
    assert not is_restored_pod(existing, JOB, JOB.spec_revision)


START = "kubectl delete --ignore-not-found -n team"
LONG = "a" * 60


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ([("service", "job")], "service/job"),
        ([("pod", "job-1"), ("configmap", "job-0a")], "configmap/job-0a pod/job-1"),
        ([("pod", "job-rendezvous"), ("pod", "job-10"), ("pod", "job-9")],
         "pod/job-rendezvous pod/job-9 pod/job-10"),
        ([("pod", f"job-{i}") for i in range(1000) if i != 5],
         "pod/job-0 pod/job-1 pod/job-2 pod/job-3 pod/job-4 pod/job-{6..999}"),
        ([("pod", "job-007")], "pod/job-007"),
    ],
)  # fmt: skip
def test_the_command_names_all_objects(objects: list[tuple[str, str]], said: str) -> None:
    assert removal("team", objects) == f"{START} {said}"


def test_a_long_command_ends_between_two_objects_and_counts_the_rest() -> None:
    command = removal("team", [("pod", f"{LONG}-{2 * i}") for i in range(500)])
    assert len(command) < 700
    listed, _, left = command.partition(" (then ")
    terms = listed.removeprefix(START).split()
    assert all(term.startswith(f"pod/{LONG}-") for term in terms)
    assert left == f"{500 - len(terms)} more)"


@pytest.mark.parametrize(
    ("version", "kind", "said"),
    [
        ("v1", "ConfigMap", "configmap"),
        ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicy"),
        ("policy/v1", "PodDisruptionBudget", "poddisruptionbudget"),
        ("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroup.scheduling.volcano.sh"),
    ],
)
def test_a_kind_that_several_groups_serve_has_its_group(version: str, kind: str, said: str) -> None:
    assert resource(version, kind) == said
