"""The objects of a job: equal to their goldens, valid for Kubernetes, and overridden only where allowed.

A golden leaves out the config, which the contract's goldens hold, and all training pods but the first.
Two are written in full; the others say how they differ from the first of them.
"""

from __future__ import annotations

import copy
import difflib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.operator.resources.variants import BASE, VARIANTS, Manifest, Variant

from fluxtrain.errors import ConfigError
from fluxtrain_operator.job import Job
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import Slot, desired, rendezvous_pod, training_pod

GOLDEN = Path(__file__).parent / "golden"
IN_FULL = (BASE, "mlperf-schnell")
ELASTIC = {"nodes": {"min": 2, "max": 4}}


class Plain(yaml.SafeDumper):
    """Writes everything out, as a person would."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def make_job(example: str = "micro", **spec: Any) -> Job:
    return load_job(Variant(spec, example=example).manifest())


def load_job(manifest: Manifest) -> Job:
    added = {"namespace": "team", "uid": "0000-uid", "generation": 1}
    metadata = manifest["metadata"] | added
    return load({**manifest, "metadata": metadata}, "localhost/fluxtrain/trainer:dev")


def trainer(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the main container of ``pod``."""
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def environment(job: Job, **slot: int) -> dict[str, str | None]:
    pod = training_pod(job, Slot(**{"index": 0, **slot}), "none")
    return {variable["name"]: variable.get("value") for variable in trainer(pod)["env"]}


def shown(variant: Variant) -> list[Manifest]:
    """Return the objects of ``variant`` as a golden has them."""
    job = load_job(variant.manifest())
    found = []
    for manifest in copy.deepcopy(desired(job)):
        if manifest["kind"] == "ConfigMap":
            assert manifest["data"] == {"config.json": job.config_json}
            manifest["data"] = {"config.json": f"the resolved config of preset {job.config.preset}"}
        if manifest["metadata"]["labels"].get("fluxtrain.dev/node-index", "0") == "0":
            found.append(manifest)
    return found


def write_out(manifest: Manifest | None) -> str:
    if manifest is None:
        return ""
    return yaml.dump(manifest, Dumper=Plain, sort_keys=False, width=110)


def difference(base: list[Manifest], other: list[Manifest]) -> str:
    """Return, object by object, the lines in which ``other`` differs from ``base``."""
    before, after = by_role(base), by_role(other)
    hunks = []
    for role in dict.fromkeys([*before, *after]):
        texts = [write_out(objects.get(role)).splitlines() for objects in (before, after)]
        _, *lines = [*difflib.unified_diff(*texts, lineterm="", n=1)][1:] or [""]
        if lines:
            places = ("@@" if line.startswith("@@") else line for line in lines)
            hunks.append("\n".join([f"=== {role}", *places]))
    return "\n".join(hunks) + "\n" if hunks else "no difference\n"


def by_role(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the objects by what they are in a job, whatever they are called."""
    return {
        f"{m['kind']} ({m['metadata']['labels']['app.kubernetes.io/component']})": m
        for m in manifests
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_the_objects_of_a_job_are_those_of_its_golden_file(name: str) -> None:
    objects = shown(VARIANTS[name])
    if name in IN_FULL:
        text, path = "---\n".join(map(write_out, objects)), GOLDEN / f"{name}.yaml"
    else:
        like = VARIANTS[name].like
        text = f"# {name}, told apart from {like}\n{difference(shown(VARIANTS[like]), objects)}"
        path = GOLDEN / f"{name}.diff"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_there_is_a_golden_for_every_variant_and_none_else() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(VARIANTS)
    assert len(VARIANTS) >= 40


@pytest.mark.parametrize("name", VARIANTS)
def test_kubernetes_knows_every_field(name: str) -> None:
    for manifest in shown(VARIANTS[name]):
        if manifest["apiVersion"] not in (
            "scheduling.x-k8s.io/v1alpha1",
            "scheduling.volcano.sh/v1beta1",
        ):
            kubernetes_validate.validate(manifest, "1.36", strict=True)


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.level == "restricted"])
def test_pods_meet_the_restricted_pod_security_standard(name: str) -> None:
    for pod in (m for m in shown(VARIANTS[name]) if m["kind"] == "Pod"):
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert trainer(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        allowed = {"name", "configMap", "persistentVolumeClaim", "emptyDir"}
        assert all(set(volume) <= allowed for volume in pod["spec"]["volumes"])


def test_pods_of_one_attempt_differ_in_their_index_alone() -> None:
    pods = [training_pod(make_job(**ELASTIC), Slot(index), "none") for index in range(2)]
    texts = [
        yaml.safe_dump(pod)
        .replace(f"micro-{index}", "micro-N")
        .replace(f"index: '{index}'", "index: N")
        for index, pod in enumerate(pods)
    ]
    assert texts[0] == texts[1]


def test_the_rendezvous_is_named_for_the_attempt_and_the_dns_names_are_not() -> None:
    job = make_job(**ELASTIC)
    first, second = environment(job, attempt=1), environment(job, attempt=2)
    assert (first["PET_RDZV_ID"], second["PET_RDZV_ID"]) == ("0000-uid-1", "0000-uid-2")
    assert first["PET_RDZV_ENDPOINT"] == second["PET_RDZV_ENDPOINT"]
    assert first["PET_RDZV_ENDPOINT"] == "micro-rendezvous.micro:29500"


@pytest.mark.parametrize(
    ("gpus", "resource", "processes"),
    [
        (0, "amd.com/gpu", "1"),
        (8, "amd.com/gpu", "8"),
        (64, "amd.com/cpx_nps4", "64"),
        (1, "nvidia.com/gpu", "1"),
    ],
)
def test_processes_follow_the_requested_devices(gpus: int, resource: str, processes: str) -> None:
    job = make_job(gpusPerNode=gpus, gpuResource=resource)
    assert environment(job)["PET_NPROC_PER_NODE"] == processes
    container = trainer(training_pod(job, Slot(0), "none"))
    requests = container.get("resources", {}).get("requests", {})
    assert requests == ({resource: str(gpus)} if gpus else {})


def test_torchrun_restarts_more_often_where_peers_can_pull_each_other_down() -> None:
    assert environment(make_job())["PET_MAX_RESTARTS"] == "10"
    assert environment(make_job(**ELASTIC))["PET_MAX_RESTARTS"] == "20"


def test_a_job_tells_its_pods_how_often_processes_were_restarted_before() -> None:
    assert environment(make_job(), process_restarts=3)["FLUXTRAIN_PROCESS_RESTARTS"] == "3"


def test_the_network_block_wins_over_the_defaults_and_never_over_the_contract() -> None:
    env = [{"name": "NCCL_SOCKET_IFNAME", "value": "bond0"}]
    values = environment(make_job(gpusPerNode=8, network={"env": env}))
    assert (values["NCCL_SOCKET_IFNAME"], values["GLOO_SOCKET_IFNAME"]) == ("bond0", "eth0")


def test_a_job_of_fixed_size_has_no_disruption_budget() -> None:
    kinds = {m["kind"] for m in desired(make_job(nodes={"min": 2, "max": 2}))}
    assert "PodDisruptionBudget" not in kinds


def test_every_object_goes_with_its_job_and_blocks_nothing() -> None:
    for manifest in desired(make_job(**ELASTIC, scheduling={"gang": "native"})):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            "0000-uid",
            True,
            False,
        )


def test_another_default_image_changes_no_hash() -> None:
    job = make_job()
    other = replace(job, image="localhost/fluxtrain/trainer:next")
    assert job.spec_hash == other.spec_hash
    assert [m for m in desired(job) if m["kind"] != "Pod"] == [
        m for m in desired(other) if m["kind"] != "Pod"
    ]


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ({"gpusPerNode": 8}, [44, 109]),
        ({"gpusPerNode": 0}, None),
        (
            {
                "gpusPerNode": 1,
                "podTemplate": {"spec": {"securityContext": {"supplementalGroups": [7]}}},
            },
            [7],
        ),
    ],
    ids=["GPUs", "no GPUs", "the job's own win"],
)
def test_pods_with_gpus_get_the_groups_of_the_device_files(
    spec: dict[str, Any], groups: list[int] | None
) -> None:
    plain = make_job(**spec)
    job = replace(plain, device_groups=(44, 109))
    pods = [m for m in desired(job) if m["kind"] == "Pod"]
    found = {
        pod["metadata"]["name"]: pod["spec"]["securityContext"].get("supplementalGroups")
        for pod in pods
    }
    store = found.pop("micro-rendezvous")
    assert found == {"micro-0": groups}
    assert store == (groups if groups == [7] else None), "it opens no device"
    assert job.spec_hash == plain.spec_hash, "other groups restart no pod that runs"


@pytest.mark.parametrize("count", [0, 1, 8])
def test_a_trainer_is_told_how_many_gpus_its_pod_asked_for(count: int) -> None:
    told = environment(make_job(gpusPerNode=count)).get("FLUXTRAIN_GPUS")
    assert told == (str(count) if count else None)


def test_the_template_reaches_the_rendezvous_pod_where_it_concerns_every_pod() -> None:
    parts = ("metadata", "pull-secrets", "env", "volume", "resources", "gate")
    pods = {
        part: rendezvous_pod(load_job(VARIANTS[f"template-{part}"].manifest())) for part in parts
    }
    assert pods["metadata"]["metadata"]["labels"]["team"] == "vision"
    assert pods["pull-secrets"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert {"name": "HOME", "value": "/site"} in trainer(pods["env"])["env"]
    assert trainer(pods["volume"])["volumeMounts"][-1]["mountPath"] == "/site"
    asked = trainer(pods["resources"])["resources"]["requests"]
    assert asked == {"cpu": "50m", "memory": "256Mi"}, "those of training pods are not for this one"
    assert "schedulingGates" not in pods["gate"]["spec"]


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
    ],
)
def test_a_template_of_a_form_that_no_pod_has_is_refused_with_its_path(
    template: dict[str, Any], path: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(podTemplate={"spec": template})
    assert caught.value.path == f"spec.podTemplate.spec.{path}"
