"""Revisions: only a changed spec replaces what pods are made from, and no version of the operator does.

Operators of different versions restart no running pod, and lose no field of the status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import pytest
from pydantic import Field
from tests.operator.jobs import make_job as job_manifest
from tests.operator.object_store import Harness, run
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

from fluxtrain.contract.model_base import ApiModel
from fluxtrain.contract.resource import fluxtraining as resource
from fluxtrain.contract.resource.fluxtraining import FluxTraining, Network, Spec
from fluxtrain.contract.resource.status import Status, preserve_unknown_fields, read_status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import job as job_module
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job, Manifest, Revision
from fluxtrain_operator.base.names import digest
from fluxtrain_operator.planner.observed import Observed
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


SMALL: dict[str, Any] = {"run": {"preset": "micro"}}
LARGE: dict[str, Any] = {
    "run": {"preset": "micro", "optim": {"learning_rate": 1e-3}},
    "gpusPerNode": 8,
    "network": {"mode": "Host", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
    "storage": {"data": {"persistentVolumeClaim": {"claimName": "data"}}},
    "podTemplate": {"spec": {"tolerations": [{"key": "spot", "operator": "Exists"}]}},
}
SPECS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "large": LARGE,
    "elastic": {**SMALL, "nodes": {"min": 2, "max": 8}, "scheduling": {"queueName": "team"}},
    "mlperf": {
        "run": {"preset": "mlperf-schnell", "seed": 7},
        "image": "registry.example.com/fluxtrain:1",
        "gpusPerNode": 8,
        "storage": {
            "data": {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
            "output": {"emptyDir": {"sizeLimit": "1Ti"}},
        },
        "restart": {"maxRestarts": 3},
    },
    "sidecar": {
        **SMALL,
        "podTemplate": {
            "metadata": {"labels": {"team": "vision"}},
            "spec": {"containers": [{"name": "logs", "image": "logs:1", "args": ["-F"]}]},
        },
    },
}
HASHES = {
    "small": "v2-93c732fd9beed3b7",
    "large": "v2-61538de47a58e053",
    "elastic": "v2-93c732fd9beed3b7",
    "mlperf": "v2-a38bbac7d3999660",
    "sidecar": "v2-acae794d4ca6e7f1",
}


def make(spec: dict[str, Any], **status: Any) -> Job:
    return load({**job_manifest(**status), "spec": spec}, "trainer:1")


@pytest.mark.parametrize("name", HASHES)
def test_the_hash_of_a_job_is_the_same_in_every_version(name: str) -> None:
    """A change restarts all running jobs with the upgrade: it needs another version of the hash."""
    job = make(SPECS[name])
    assert job.spec_hash == HASHES[name]
    assert job.spec_hash == HASHES[name]


def test_defaults_of_the_api_server_are_not_hashed() -> None:
    job = make(LARGE)
    filled: dict[str, Any] = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert filled != LARGE
    assert make(filled).spec_hash == job.spec_hash


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "other:1"},
        {"gpusPerNode": 4},
        {"run": {"preset": "micro", "optim": {"learning_rate": 2e-3}}},
        {"network": {"mode": "Host"}},
        {"storage": {"data": {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}}}},
        {"podTemplate": {}},
    ],
)
def test_a_change_of_the_spec_is_hashed(changes: dict[str, Any]) -> None:
    assert make({**LARGE, **changes}).spec_hash != make(LARGE).spec_hash


class NewNetwork(Network):
    """A section of a later version."""

    mtu: Annotated[int, Field(ge=1, le=65_536)] = 1500
    """A new field of a section."""


class Profile(ApiModel):
    """A new section."""

    steps: Annotated[int, Field(ge=0, le=100)] = 3
    """A field with a default."""


class NewSpec(Spec):
    """The spec of a later version."""

    network: NewNetwork = NewNetwork()
    """A section with a new field."""
    profile: Profile = Profile()
    """Another section."""
    colour: Annotated[str, Field(max_length=8)] | None = None
    """Another field."""


class NewTraining(FluxTraining):
    """The resource of a later version."""

    spec: NewSpec
    """The spec."""


FILLED = {"network": {"mode": "Host", "mtu": 1500}, "profile": {"steps": 3}}
"""Defaults of a newer definition."""


@contextmanager
def newer_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(job_module, "FluxTraining", NewTraining)
        yield


def observed_of(job: Job) -> Observed:
    """Return the state in which all objects of ``job`` exist and its pods run."""
    return observe(job, *make_pods(job.spec.nodes.max, job))


def started(spec: dict[str, Any]) -> Job:
    return make(spec, phase="Starting", attempt=1, nodes={"ready": 1, "desired": 1})


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("filled", [True, False])
def test_a_new_field_with_a_default_restarts_nothing_in_an_upgrade_or_downgrade(
    spec: dict[str, Any], filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = {**spec, **(FILLED if filled else {})}
    if "network" in after and "network" in spec:
        after["network"] = {**after["network"], **spec["network"]}
    elif filled:
        after["network"] = {"mode": "Pod", "mtu": 1500}
    old = started(spec)
    with newer_operator(monkeypatch):
        new = started(after)
        assert new.spec_hash == old.spec_hash
        upgraded = plan(new, observed_of(old), NOW)
        assert (upgraded.delete, upgraded.create, upgraded.status.attempt) == ((), (), 1)
    downgraded = plan(started(after), observed_of(new), NOW)
    assert (downgraded.delete, downgraded.create, downgraded.status.attempt) == ((), (), 1)
    admitted = next(c for c in downgraded.status.conditions if c.type == "Admitted")
    assert admitted.status == "True"
    assert ("leaves out" in admitted.message) is filled
    assert ("spec.network.mtu" in admitted.message) is filled


def test_an_unknown_field_of_the_run_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"spec\.run\.optimum: no such field"):
        make({"run": {"preset": "micro", "optimum": {}}})


NEWER = {
    "phase": "Hibernating",
    "attempt": 1,
    "mood": {"of": ["the", "day"]},
    "restarts": {"process": 1, "pod": 2, "gang": 0, "rack": 7},
    "nodes": {"ready": 0, "desired": 0, "asleep": 1},
    "progress": {"step": 3, "samples": 24, "warmth": 0.5},
    "conditions": [
        {
            "type": "Hibernating",
            "status": "True",
            "reason": "Winter",
            "message": "until spring",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}
"""A status of a newer operator."""


def test_unknown_fields_of_a_newer_operators_status_are_kept() -> None:
    harness = Harness(status=NEWER)
    run(harness, 1)
    written = harness.cluster.status
    assert written["mood"] == NEWER["mood"]
    assert written["restarts"].items() >= NEWER["restarts"].items()  # type: ignore[attr-defined]
    assert written["nodes"]["asleep"] == 1
    assert written["progress"]["warmth"] == 0.5
    assert NEWER["conditions"][0].items() <= written["conditions"][0].items()  # type: ignore[index]
    assert written["phase"] in ("Pending", "Restarting")


@pytest.mark.parametrize(
    "status",
    [
        None,
        [],
        "lost",
        {"attempt": "two"},
        {"nodes": 3},
        {"exitCode": -9},
        {"conditions": [{"type": "Ready"}]},
        {"progress": {"step": "many"}},
        {"phase": 7},
    ],
)
def test_an_invalid_status_is_ignored(status: Any) -> None:
    assert isinstance(read_status(status), Status)
    assert make({"run": {"preset": "micro"}}).status == Status()


def test_an_invalid_attempt_discards_the_status() -> None:
    assert read_status({"phase": "Running", "attempt": "two"}).phase is None
    status = read_status({"phase": "Running", "attempt": 2, "exitCode": 1000})
    assert (status.phase, status.attempt, status.exit_code) == ("Running", 2, None)


def test_known_fields_are_not_taken_from_the_previous_status() -> None:
    before = {"lastError": "gone", "exitCode": 1, "progress": {"step": 1, "evalLoss": 2.0}}
    assert preserve_unknown_fields(before, {"progress": {"step": 2}}) == {"progress": {"step": 2}}
    assert digest(preserve_unknown_fields(None, {"attempt": 1})) == digest({"attempt": 1})
    assert resource.FluxTraining is FluxTraining
