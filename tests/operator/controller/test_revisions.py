"""What an attempt runs is read from its revision, by every operator, whatever happened to the config map."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from tests.operator.jobs import make_job
from tests.operator.object_store import Harness, ObjectStore, run

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.planner import plan
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import pods, template

REVISION = ("ConfigMap", load(make_job(), "trainer:1").spec_revision.name)
MAX_CPU_SECONDS = 0.5
"""Of which the API server in memory, which encodes all pods, needs most."""
IMMUTABLE = "data: Forbidden: field is immutable when `immutable` is set"


class Cluster(ObjectStore):
    """An API server that counts reads, and changes no immutable object."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0

    async def get(self, manifest: Manifest) -> Manifest | None:
        self.num_read += 1
        return await super().get(manifest)

    async def apply(self, manifest: Manifest, uid: str) -> Manifest | None:
        existing = await ObjectStore.get(self, manifest)
        if existing and existing.get("immutable") and existing["data"] != manifest["data"]:
            raise ApiError(422, IMMUTABLE, "Invalid", IMMUTABLE)
        return await super().apply(manifest, uid)


def make_spec(**changes: Any) -> Manifest:
    return {**make_job()["spec"], **changes}


def started() -> Harness:
    harness = Harness(Cluster())
    run(harness, 1)
    return harness


def upgraded(before: Harness, image: str = "trainer:2", **spec: Any) -> Harness:
    """Return an operator with another default image that takes over the cluster."""
    after = Harness(before.cluster, image, status=before.cluster.status, spec=make_spec(**spec))
    after.sync()
    return after


def lose(harness: Harness, name: str = "job-1") -> None:
    harness.delete("Pod", name)
    run(harness, 1)


def pod(harness: Harness, name: str = "job-1") -> Manifest:
    return harness.cluster.objects["Pod", name]


def images(harness: Harness) -> set[str]:
    pods = (m for (kind, _), m in harness.cluster.objects.items() if kind == "Pod")
    return {container["image"] for m in pods for container in m["spec"]["containers"]}


def without_identity(manifest: Manifest) -> Manifest:
    of_server = ("uid", "resourceVersion", "creationTimestamp")
    metadata = {k: v for k, v in manifest["metadata"].items() if k not in of_server}
    notes = {k: v for k, v in metadata["annotations"].items() if k != names.ANNOTATION_REPLACEMENT}
    return {**manifest, "metadata": {**metadata, "annotations": notes}}


@pytest.mark.parametrize("name", ["job-1", "job-rendezvous"])
def test_an_upgraded_operator_replaces_a_pod_by_an_equal_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started()
    before = without_identity(copy.deepcopy(pod(first, name)))
    monkeypatch.setattr(pods, "grace_seconds", lambda job: 7)
    second = upgraded(first)
    assert load(make_job(), "trainer:2").spec_revision.name != REVISION[1]
    lose(second, name)
    assert without_identity(pod(second, name)) == before
    assert images(second) == {"trainer:1"}
    assert second.cluster.status["attempt"] == 1
    third = upgraded(second, "trainer:1")  # and back again
    lose(third, name)
    assert without_identity(pod(third, name)) == before


def test_the_revision_is_read_once_and_only_by_an_operator_that_would_make_another() -> None:
    same = upgraded(started(), "trainer:1")
    lose(same)
    assert same.cluster.num_read == 0
    other = upgraded(same)
    lose(other)
    lose(other, "job-2")
    assert other.cluster.num_read == 1


def test_a_changed_spec_takes_over_the_defaults_of_the_operator() -> None:
    first = started()
    second = upgraded(first, network={"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]})
    run(second, 3)
    assert images(second) == {"trainer:2"}
    assert second.cluster.status["attempt"] == 2
    assert second.cluster.status["previousRevision"] == REVISION[1]
    assert second.cluster.own("ConfigMap") == sorted(
        [REVISION[1], second.cluster.status["revision"]]
    )
    third = upgraded(second)
    run(third, 3)
    assert images(third) == {"trainer:2"}
    assert REVISION[1] not in third.cluster.own("ConfigMap"), "only the one before is kept"


def test_a_deleted_revision_is_written_again_before_a_pod_mounts_it() -> None:
    harness = started()
    before = copy.deepcopy(harness.cluster.objects.pop(REVISION))
    with pytest.raises(ApiError, match="was deleted or replaced"):
        lose(harness)  # the operator finds out when it applies it, and tries again
    assert "job-1" not in harness.cluster.own("Pod")
    run(harness, 1)
    assert without_identity(harness.cluster.objects[REVISION]) == without_identity(before)
    assert "job-1" in harness.cluster.own("Pod")
    assert harness.cluster.status["attempt"] == 1


def test_an_operator_that_cannot_read_the_revision_lets_the_pods_train_until_one_is_lost() -> None:
    first = started()
    del first.cluster.objects[REVISION]
    second = upgraded(first)
    run(second, 2)
    assert images(second) == {"trainer:1"}
    assert second.cluster.status["attempt"] == 1
    lose(second)
    run(second, 2)
    assert images(second) == {"trainer:2"}, "never two images in one attempt"
    assert second.cluster.status["attempt"] == 2
    assert second.cluster.status["restarts"]["gang"] == 0


def tamper(cluster: ObjectStore, **changes: Any) -> Manifest:
    """Replace the revision by another one that claims to be the job's."""
    forged = {**copy.deepcopy(cluster.objects[REVISION]), **changes}
    forged["data"] = {**forged["data"], "config.json": "{}"}
    cluster.objects[REVISION] = forged
    return forged


def test_a_changed_revision_is_restored_before_a_pod_mounts_it() -> None:
    harness = started()
    right = harness.cluster.objects[REVISION]["data"]
    tamper(harness.cluster, immutable=False)
    lose(harness)
    assert harness.cluster.objects[REVISION]["data"] == right
    assert "job-1" in harness.cluster.own("Pod")


def test_no_pod_mounts_an_immutable_revision_with_other_content() -> None:
    harness = started()
    tamper(harness.cluster)
    lose(harness)
    assert "job-1" not in harness.cluster.own("Pod")
    status, reason, message = harness.cluster.condition("Training")
    assert (status, reason) == ("False", "ConfigMapRefused")
    assert REVISION[1] in message
    assert "immutable" in message
    del harness.cluster.objects[REVISION]
    with pytest.raises(ApiError, match="was deleted or replaced"):
        run(harness, 1)
    run(harness, 2)
    assert "job-1" in harness.cluster.own("Pod"), "once somebody has deleted it"


def test_an_upgraded_operator_does_not_believe_a_changed_revision() -> None:
    first = started()
    tamper(first.cluster)
    second = upgraded(first)
    run(second, 2)
    assert second.cluster.status["revision"] != REVISION[1]
    assert images(second) == {"trainer:1"}, "nothing is restarted for it"


def test_a_foreign_object_with_the_name_of_the_revision_blocks_new_pods_only() -> None:
    harness = started()
    del harness.cluster.objects[REVISION]
    theirs = harness.cluster.put(*REVISION)
    with pytest.raises(ApiError, match="was deleted or replaced"):
        lose(harness)
    run(harness, 2)
    assert harness.cluster.objects[REVISION] == theirs
    assert harness.cluster.own("Pod") == ["job-0", "job-2", "job-3", "job-rendezvous"]
    assert harness.cluster.condition("Training")[1] == "NameConflict"


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[object]:
    calls: list[object] = []
    original = getattr(module, name)

    def counted(*arguments: Any) -> Any:
        calls.append(name)
        return original(*arguments)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_a_job_is_merged_and_resolved_once_for_all_pods_and_reconciles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merged = count_calls(monkeypatch, template, "_without_empty")
    loaded = count_calls(monkeypatch, plan, "revision_of")
    harness = Harness(Cluster(), spec=make_spec(nodes={"min": 1, "max": 64}))
    run(harness, 5)
    assert len(harness.cluster.own("Pod")) == 65
    assert len(merged) == 2, "the training pod and the rendezvous pod"
    assert len(loaded) == 1
    changed = make_job(**harness.cluster.status)
    changed["spec"] = make_spec(nodes={"min": 1, "max": 64}, image="other:1")
    harness.set_job(changed)
    run(harness, 1)
    assert len(loaded) == 2


def test_a_reconcile_of_a_large_job_takes_bounded_time_and_bytes() -> None:
    """A pod of the largest template is copied for each node; nothing else grows with the nodes."""
    annotations = {f"a{number}": "x" * 12_000 for number in range(5)}
    spec = make_spec(
        nodes={"min": 1, "max": 64}, podTemplate={"metadata": {"annotations": annotations}}
    )
    harness = Harness(Cluster(), spec=spec)
    began = time.process_time()
    run(harness, 1)
    assert time.process_time() - began < MAX_CPU_SECONDS
    sizes = {at: len(json.dumps(m)) for at, m in harness.cluster.objects.items()}
    assert len(sizes) > 64
    assert all(size < 80 << 10 for (kind, _), size in sizes.items() if kind == "Pod")
    assert sum(size for (kind, _), size in sizes.items() if kind != "Pod") < 40 << 10
