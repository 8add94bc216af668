"""Upgrades: operators of different versions restart no running pod, and lose no field of the status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import pytest
from pydantic import Field
from tests.operator.jobs import make_job
from tests.operator.object_store import Harness, run

from fluxtrain.contract.model_base import ApiModel
from fluxtrain.contract.resource import fluxtraining as resource
from fluxtrain.contract.resource.fluxtraining import FluxTraining, Network, Spec
from fluxtrain.contract.resource.status import Status, preserve_unknown_fields, read_status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base import job as job_module
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import digest
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.plan import load, plan
from fluxtrain_operator.resources import desired

NOW = 1_800_000_000.0
SMALL: dict[str, Any] = {"run": {"preset": "micro"}}
LARGE: dict[str, Any] = {
    "run": {"preset": "micro", "optim": {"learning_rate": 1e-3}},
    "gpusPerNode": 8,
    "network": {"mode": "host", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
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
    "large": "v2-631db85909129e66",
    "elastic": "v2-93c732fd9beed3b7",
    "mlperf": "v2-a38bbac7d3999660",
    "sidecar": "v2-acae794d4ca6e7f1",
}


def make(spec: dict[str, Any], **status: Any) -> Job:
    return load({**make_job(**status), "spec": spec}, "trainer:1")


@pytest.mark.parametrize("name", HASHES)
def test_the_hash_of_a_job_is_the_same_in_every_version(name: str) -> None:
    """A change restarts all running jobs with the upgrade: it needs another version of the hash."""
    job = make(SPECS[name])
    assert job.spec_hash == HASHES[name]
    assert job.matches_hash(HASHES[name])
    assert not any(map(job.matches_hash, ("v2-0000000000000000", "0000000000000000", "")))


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
        {"network": {"mode": "host"}},
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


FILLED = {"network": {"mode": "host", "mtu": 1500}, "profile": {"steps": 3}}
"""Defaults of a newer definition."""


@contextmanager
def newer_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(job_module, "FluxTraining", NewTraining)
        yield


def observed_of(job: Job) -> Observed:
    """Return the state in which all objects of ``job`` exist and its pods run."""
    pods, rendezvous, applied = [], None, {}
    for number, manifest in enumerate(desired(job)):
        if manifest["kind"] == "Secret":
            continue
        if manifest["kind"] != "Pod":
            notes = manifest["metadata"]["annotations"]
            applied[manifest["kind"], manifest["metadata"]["name"]] = notes[
                names.ANNOTATION_APPLIED
            ]
            continue
        ready = [{"type": "Ready", "status": "True"}]
        state = {"running": {"startedAt": "2027-01-15T07:59:00Z"}}
        main = manifest["spec"]["containers"][0]["name"]
        containers = [{"name": main, "state": state}]
        status = {"phase": "Running", "conditions": ready, "containerStatuses": containers}
        manifest["metadata"]["uid"] = f"uid-{number}"
        pod = Pod.from_object({**manifest, "status": status})
        if main == names.RENDEZVOUS:
            rendezvous = pod
        else:
            pods.append(pod)
    return Observed(pods=tuple(pods), rendezvous=rendezvous, applied=applied)


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
        after["network"] = {"mode": "pod", "mtu": 1500}
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
