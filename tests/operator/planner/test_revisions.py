"""What pods are made from follows from the revision, which only a changed spec replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    created,
    created_pods,
    deleted,
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    num_gang_restarts,
    observe,
    plan_with,
    progress,
    rendezvous,
    running,
    with_status,
)

from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.planner.plan import Plan, load, plan

TEMPLATE = {"podTemplate": {"metadata": {"annotations": {"restarted": "today"}}}}


def images(result: Plan) -> set[str]:
    return {c["image"] for pod in created_pods(result) for c in pod["spec"]["containers"]}


def by_a_later_operator(job: Job) -> Job:
    """Return ``job`` as an operator with another default image loads it."""
    metadata = job.training.metadata.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    manifest = {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {**metadata, "uid": job.uid, "generation": 1},
        "spec": spec,
    }
    later = load(manifest, "trainer:2")
    assert later.spec_revision.name != job.spec_revision.name
    return with_status(later, job.status)


def stored(job: Job) -> dict[str, Any]:
    return {"revision": job.spec_revision}


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": {"min": 1, "max": 3}},
        {"lifecycle": {"activeDeadlineSeconds": 60}},
        {"restart": {"maxRestarts": 1}},
        {"scheduling": {"tolerations": [{"key": "spot", "operator": "Exists"}]}},
    ],
)
def test_what_no_pod_runs_is_no_part_of_the_revision(changes: Manifest) -> None:
    assert make_job(**changes).spec_revision.name == make_job().spec_revision.name


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "trainer:2"},
        {"gpusPerNode": 8},
        {"run": {"preset": "micro", "seed": 7}},
        {"network": {"env": [{"name": "A", "value": "b"}]}},
        TEMPLATE,
    ],
)
def test_what_pods_run_is_part_of_the_revision_and_restarts_them(changes: Manifest) -> None:
    job = running()
    changed = make_job(job.status, **changes)
    assert changed.spec_revision.name != job.spec_revision.name
    result = plan_with(changed, *make_pods(2, job), progress=progress())
    assert (result.status.attempt, num_gang_restarts(result.status)) == (2, 0)
    assert result.status.revision == changed.spec_revision.name
    assert result.status.previous_revision == job.spec_revision.name


def test_a_placement_changes_with_the_spec_and_what_runs_does_not() -> None:
    job = running()
    tolerations = [{"key": "spot", "operator": "Exists"}]
    changed = by_a_later_operator(
        make_job(job.status, scheduling={"tolerations": tolerations, "nodeSelector": {"a": "b"}})
    )
    (pod,) = created_pods(plan_with(changed, make_pod(0, job), progress=progress(), **stored(job)))
    assert (pod["spec"]["tolerations"], pod["spec"]["nodeSelector"]) == (tolerations, {"a": "b"})
    assert pod["spec"]["containers"][0]["image"] == "trainer:1"


@pytest.mark.parametrize("cause", ["program", "suspended", "node", "no pods"])
def test_every_restart_and_replacement_keeps_the_revision_over_an_upgrade(cause: str) -> None:
    job = running()
    later = by_a_later_operator(job)
    observed: dict[str, Any] = {"progress": progress(), **stored(job)}
    pods = make_pods(2, job)
    if cause == "program":
        pods = [failed(0, job=job), pods[1]]
    if cause == "suspended":
        pods = []
        later = with_status(later, job.status.model_copy(update={"phase": "Suspended"}))
    if cause == "node":
        observed["nodes"] = lost("node-1")
    if cause == "no pods":
        pods = []
    result = plan_with(later, *pods, **observed)
    if cause == "program":  # once the pods of the attempt before are gone
        later = with_status(later, result.status)
        result = plan_with(later, **observed)
    assert created_pods(result)
    assert images(result) == {"trainer:1"}
    assert result.status.revision == job.spec_revision.name
    notes = created_pods(result)[0]["metadata"]["annotations"]
    assert notes[names.ANNOTATION_REVISION] == job.spec_revision.name


def test_a_lost_status_takes_the_revision_from_the_pods() -> None:
    job = running()
    later = with_status(by_a_later_operator(job), None)
    result = plan_with(later, make_pod(0, job), progress=progress(), **stored(job))
    assert (result.status.attempt, result.status.revision) == (1, job.spec_revision.name)
    assert images(result) == {"trainer:1"}


def test_pods_of_a_lost_revision_train_on_and_restart_together_once_one_is_lost() -> None:
    job = running()
    later, store = by_a_later_operator(job), rendezvous(job)
    result = plan_with(later, *make_pods(2, job), rendezvous=store, progress=progress())
    assert (deleted(result), created(result), result.status.attempt) == ([], [], 1)
    later = with_status(later, result.status)
    result = plan_with(later, make_pod(0, job), rendezvous=store, progress=progress())
    assert (deleted(result), result.status.attempt) == (["job-0", "job-rendezvous"], 2)
    assert num_gang_restarts(result.status) == 0


def test_the_revision_before_and_those_of_pods_are_kept_and_others_deleted() -> None:
    job = running()
    status = job.status.model_copy(update={"previous_revision": "job-2"})
    pods = [*make_pods(2, job), make_pod(2, job, attempt=0, revision="job-1", deleting=True)]
    maps = {("ConfigMap", f"job-{number}"): "hash" for number in range(4)}
    observed = observe(job, *pods, progress=progress())
    observed = replace(observed, applied={**observed.applied, **maps})
    result = plan(with_status(job, status), observed, NOW)
    assert [(d.kind, d.name) for d in result.delete] == [
        ("ConfigMap", "job-0"),
        ("ConfigMap", "job-3"),
    ]
    assert result.create == ()


def test_a_revision_that_no_config_map_holds_is_rejected() -> None:
    Revision.of("job", "v2-0", "x" * 1_048_000, {})
    with pytest.raises(ConfigError, match="have 1024 KiB as JSON; a config map holds 1024 KiB"):
        Revision.of("job", "v2-0", "x" * (1 << 20), {})
    with pytest.raises(ConfigError, match="config map holds"):
        Revision.of("job", "v2-0", "", {"trainer": {"hostAliases": ["\u00e9" * (1 << 19)]}})


@pytest.mark.parametrize("part", ["config.json", "pods.json", "spec-hash"])
def test_a_revision_is_believed_only_if_its_name_has_its_hash(part: str) -> None:
    revision = make_job().spec_revision
    config_map: Manifest = {"metadata": {"name": revision.name}, "data": dict(revision.data)}
    assert Revision.from_object("job", config_map) == revision
    assert Revision.from_object("other", config_map) is None
    for changed in (revision.data[part] + " ", None, 7):
        data = {**revision.data, part: changed}
        assert Revision.from_object("job", {**config_map, "data": data}) is None
    assert Revision.from_object("job", {"metadata": {"name": revision.name}}) is None
