"""The objects of a job: equal to their goldens, valid for Kubernetes, and restricted.

A golden omits the config, which the contract's goldens contain, and all training pods but the first. Two are
complete; the others are diffs to another variant.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes_schemas import require_valid
from tests.operator.resources.variants import BASE, PARTITIONS, VARIANTS, Manifest, Variant

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.settings import parse_network_rules, parse_pod_defaults
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import Slot, desired, key_secret, rendezvous_pod, training_pod
from fluxtrain_operator.resources.scheduling import REQUIRED

GOLDEN = Path(__file__).parent / "golden"
COMPLETE = (BASE, "mlperf-schnell")
GOLDEN_PARTITION = f"gpus-{PARTITIONS[0].replace('_', '-')}"
OTHER_PARTITIONS = {f"gpus-{name.replace('_', '-')}" for name in PARTITIONS[1:]}
GOLDENS = [name for name in VARIANTS if name not in OTHER_PARTITIONS]
HASH = re.compile(r"'?[0-9a-f]{16}'?")  # YAML quotes one that could be a number
ELASTIC = {"nodes": {"min": 2, "max": 4}}


class Plain(yaml.CSafeDumper):
    """Writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def make_job(example: str = "micro", **spec: Any) -> Job:
    return load_job(Variant(spec, example=example))


def load_job(variant: Variant, image: str = "localhost/fluxtrain/trainer:dev") -> Job:
    manifest = variant.manifest()
    added = {"namespace": "team", "uid": "0000-uid", "generation": 1}
    manifest["metadata"] |= added
    defaults = parse_pod_defaults(json.dumps(variant.pod_defaults))
    network = parse_network_rules(json.dumps(variant.network))
    return load(manifest, image, variant.rendezvous_image, defaults, network_rules=network)


def trainer(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the main container of ``pod``."""
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def environment(job: Job, **slot: int) -> dict[str, str | None]:
    pod = training_pod(job, Slot(**{"index": 0, **slot}))
    return {variable["name"]: variable.get("value") for variable in trainer(pod)["env"]}


@cache
def golden_objects(name: str) -> list[Manifest]:
    """Return the objects of a variant that its golden contains."""
    job = load_job(VARIANTS[name])
    objects = []
    for manifest in desired(job):
        if manifest["kind"] == "ConfigMap":
            written = RunConfig.model_validate_json(manifest["data"]["config.json"])
            assert written == job.config
            config = f"the resolved config of preset {job.config.preset}"
            pods = "the specs of the pods below, without what differs between slots"
            texts = {"config.json": config, "pods.json": pods}
            manifest = {**manifest, "data": {**manifest["data"], **texts}}
        if manifest["metadata"]["labels"].get("fluxtrain.dev/node-index", "0") == "0":
            objects.append(manifest)
    return objects


def dump(manifest: Manifest | None) -> str:
    if manifest is None:
        return ""
    return yaml.dump(manifest, Dumper=Plain, sort_keys=False, width=110)


def difference(base: list[Manifest], other: list[Manifest]) -> str:
    """Return the diff of each object of ``other`` to that of ``base``."""
    before, after = by_role(base), by_role(other)
    hunks = []
    for role in dict.fromkeys([*before, *after]):
        texts = [dump(objects.get(role)).splitlines() for objects in (before, after)]
        _, *lines = [*difflib.unified_diff(*texts, lineterm="", n=1)][1:] or [""]
        if lines:
            places = ("@@" if line.startswith("@@") else line for line in lines)
            hunks.append("\n".join([f"=== {role}", *places]))
    return "\n".join(hunks) + "\n" if hunks else "no difference\n"


def by_role(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the objects by kind and component."""
    return {
        f"{m['kind']} ({m['metadata']['labels']['app.kubernetes.io/component']})": m
        for m in manifests
    }


def golden(name: str) -> str:
    objects = golden_objects(name)
    if name in COMPLETE:
        return "---\n".join(map(dump, objects))
    like = VARIANTS[name].like
    return f"# {name}, told apart from {like}\n{difference(golden_objects(like), objects)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDENS)
def test_the_objects_of_a_job_equal_its_golden_file(name: str) -> None:
    text = golden(name)
    path = GOLDEN / f"{name}.{'yaml' if name in COMPLETE else 'diff'}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("partition", PARTITIONS)
def test_partitions_differ_in_the_name_of_the_resource_and_in_hashes(partition: str) -> None:
    name, like = f"gpus-{partition.replace('_', '-')}", PARTITIONS[0]
    text = golden(name).replace(name, GOLDEN_PARTITION).replace(partition, like)
    expected = golden(GOLDEN_PARTITION)
    assert HASH.sub("", text) == HASH.sub("", expected)
    assert (text == expected) == (partition == like)


def test_every_variant_has_a_golden_and_there_is_no_other() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(GOLDENS)
    assert len(VARIANTS) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_object_is_valid_for_kubernetes(name: str) -> None:
    for manifest in golden_objects(name):
        if manifest["apiVersion"] not in (
            "scheduling.x-k8s.io/v1alpha1",
            "scheduling.volcano.sh/v1beta1",
        ):
            require_valid(manifest, "1.37")


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.level == "restricted"])
def test_pods_meet_the_restricted_pod_security_standard(name: str) -> None:
    for pod in (m for m in golden_objects(name) if m["kind"] == "Pod"):
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert trainer(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        allowed = {"name", "configMap", "secret", "persistentVolumeClaim", "emptyDir"}
        assert all(set(volume) <= allowed for volume in pod["spec"]["volumes"])


@pytest.mark.parametrize("given", [None, {"runAsNonRoot": True}])
def test_the_cluster_may_choose_the_users_of_all_pods(given: Manifest | None) -> None:
    job = load_job(Variant({}, pod_defaults={"securityContext": given}))
    for pod in (training_pod(job, Slot(0)), rendezvous_pod(job)):
        assert pod["spec"].get("securityContext") == given
        assert trainer(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_job_removes_fields_of_the_security_context() -> None:
    removed = {"runAsUser": None, "runAsGroup": None, "fsGroup": None, "sysctls": None}
    job = make_job(podTemplate={"spec": {"securityContext": removed}})
    for pod in (training_pod(job, Slot(0)), rendezvous_pod(job)):
        assert pod["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_null_in_place_of_a_whole_part_changes_no_pod() -> None:
    """The limits of jobs take it for a part that is left out: it may remove nothing of the operator's."""
    parts = dict.fromkeys(
        ("securityContext", "automountServiceAccountToken", "volumes", "affinity")
    )
    container = {"name": "trainer", "securityContext": None, "image": None, "env": None}
    plain = make_job(podTemplate={"spec": {"containers": [{"name": "trainer"}]}})
    job = make_job(podTemplate={"spec": {**parts, "containers": [container]}})
    assert training_pod(job, Slot(0))["spec"] == training_pod(plain, Slot(0))["spec"]
    assert rendezvous_pod(job)["spec"] == rendezvous_pod(plain)["spec"]


@pytest.mark.parametrize("task", ["train", "benchmark", "prepare", "preprocess"])
@pytest.mark.parametrize("claim_read_only", [False, True])
def test_only_tasks_that_make_data_sets_may_write_data_and_none_models(
    task: str, claim_read_only: bool
) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "data", "readOnly": claim_read_only}}
    run = {"preset": "mlperf-schnell-raw" if task.startswith("pre") else "micro", "task": task}
    pod = training_pod(make_job(run=run, storage={"data": claim}), Slot(0))
    mounts = {each["name"]: each.get("readOnly", False) for each in trainer(pod)["volumeMounts"]}
    assert mounts["data"] == (claim_read_only or task not in ("prepare", "preprocess"))
    assert mounts["models"] is True
    assert not any(mounts[name] for name in ("output", "tmp", "shm"))


@pytest.mark.parametrize(
    ("data", "writes"),
    [
        ({"images": "pictures"}, False),
        ({"images": "pictures", "cache": "encodings"}, True),
        ({"images": "pictures", "cache": "/data/encodings"}, True),
        ({"images": "pictures", "cache": "../output/encodings"}, False),
        ({"images": "pictures", "cache": "/tmp/../data/encodings"}, True),
        ({"images": "pictures", "cache": "/output/encodings"}, False),
        ({"images": "pictures", "cache": "/database"}, False),
        ({"images": "s3://bucket/pictures", "download": {"folder": "fetched"}}, True),
        ({"images": "s3://bucket/pictures", "download": {"folder": "/tmp/fetched"}}, False),
    ],
)
def test_data_can_be_written_where_the_run_keeps_encodings_or_fetched_files(
    data: dict[str, Any], writes: bool
) -> None:
    run = {"preset": "dev-lora", "data": data}
    pod = training_pod(make_job(run=run), Slot(0))
    (mount,) = (each for each in trainer(pod)["volumeMounts"] if each["name"] == "data")
    assert mount.get("readOnly", False) is not writes


def test_pods_of_one_attempt_differ_only_in_their_index() -> None:
    pods = [training_pod(make_job(**ELASTIC), Slot(index)) for index in range(2)]
    texts = [
        yaml.safe_dump(pod)
        .replace(f"micro-{index}\n", "micro-N\n")
        .replace(f"index: '{index}'", "index: N")
        for index, pod in enumerate(pods)
    ]
    assert texts[0] == texts[1]


def test_the_rendezvous_id_contains_the_attempt_and_its_endpoint_does_not() -> None:
    job = make_job(**ELASTIC)
    first, second = environment(job, attempt=1), environment(job, attempt=2)
    assert (first["PET_RDZV_ID"], second["PET_RDZV_ID"]) == ("0000-uid-1", "0000-uid-2")
    assert first["PET_RDZV_ENDPOINT"] == second["PET_RDZV_ENDPOINT"]
    assert first["PET_RDZV_ENDPOINT"] == "micro-rendezvous.micro:29500"


def test_pods_get_the_number_of_process_restarts() -> None:
    assert environment(make_job(), process_restarts=3)["FLUXTRAIN_PROCESS_RESTARTS"] == "3"


def test_the_default_image_is_not_hashed() -> None:
    job = make_job()
    other = load_job(Variant({}), image="localhost/fluxtrain/trainer:next")
    assert job.spec_hash == other.spec_hash
    assert job.spec_revision.name != other.spec_revision.name
    kinds = {"Pod", "ConfigMap"}
    assert [m for m in desired(job) if m["kind"] not in kinds] == [
        m for m in desired(other) if m["kind"] not in kinds
    ]


def test_the_settings_of_the_operator_are_not_hashed() -> None:
    plain, added = VARIANTS["gpus"], VARIANTS["pod-defaults"]
    other = replace(added, rendezvous_image="fluxtrain/operator:next")
    assert load_job(plain).spec_hash == load_job(added).spec_hash == load_job(other).spec_hash


def test_a_template_that_does_not_fit_the_defaults_is_rejected_with_the_path() -> None:
    template = {"securityContext": {"supplementalGroups": "44"}}
    variant = replace(
        VARIANTS["pod-defaults"], spec={"gpusPerNode": 8, "podTemplate": {"spec": template}}
    )
    with pytest.raises(ConfigError) as caught:
        load_job(variant)
    assert caught.value.path == "spec.podTemplate.spec.securityContext.supplementalGroups"


def container(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"affinity": []}, "affinity"),
        ({"tolerations": {"key": "x"}}, "tolerations"),
        ({"terminationGracePeriodSeconds": "60"}, "terminationGracePeriodSeconds"),
        (container(resources=["cpu"])["spec"], "containers[0].resources"),
        (container(ports=[{"name": "x"}])["spec"], "containers[0].ports[0]"),
        (container(volumeMounts=[{"name": "x"}])["spec"], "containers[0].volumeMounts[0]"),
        (container(volumeMounts="/site")["spec"], "containers[0].volumeMounts"),
        ({"$patch": "delete"}, "$patch"),
        (container(**{"$patch": "delete"})["spec"], "containers[0].$patch"),
        ({"affinity": {"$retainKeys": []}}, "affinity.$retainKeys"),
    ],
)
def test_a_template_with_wrong_types_or_directives_is_rejected_with_the_path(
    template: dict[str, Any], path: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(podTemplate={"spec": template})
    assert caught.value.path == f"spec.podTemplate.spec.{path}"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_rendezvous_pod_runs_where_training_pods_can(name: str) -> None:
    job = load_job(VARIANTS[name])
    pods = [rendezvous_pod(job, ("bad",)), training_pod(job, Slot(0, excluded_nodes=("bad",)))]
    places = [
        {
            "required": pod["spec"]["affinity"]["nodeAffinity"][REQUIRED],
            **{
                key: pod["spec"].get(key)
                for key in ("nodeSelector", "priorityClassName", "tolerations")
            },
        }
        for pod in pods
    ]
    assert places[0] == places[1]
    assert "resourceClaims" not in pods[0]["spec"]
    assert "amd.com/gpu" not in json.dumps(trainer(pods[0])["resources"])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_rendezvous_pod_has_no_secret_but_its_key(name: str) -> None:
    job = load_job(VARIANTS[name])
    pod = rendezvous_pod(job)
    pod["spec"].pop("imagePullSecrets", None)  # of the kubelet, not in the pod
    (key,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "rendezvous-key")
    assert key["secret"]["secretName"] == key_secret(job)["metadata"]["name"]
    others = [volume for volume in pod["spec"]["volumes"] if volume is not key]
    text = json.dumps([others, trainer(pod).get("env"), trainer(pod).get("envFrom")])
    assert "secret" not in text.lower()
