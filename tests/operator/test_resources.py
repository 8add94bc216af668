"""The objects of a job: equal to their goldens, valid for Kubernetes, and overridden only where allowed.

A golden leaves out the config, which the contract's goldens hold, and all training pods but the first.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fluxtrain.contract.resolve import merge
from fluxtrain_operator.errors import TemplateError
from fluxtrain_operator.job import Job
from fluxtrain_operator.plan import load
from fluxtrain_operator.resources import Slot, desired, rendezvous_pod, training_pod

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
ELASTIC = {"nodes": {"min": 2, "max": 4}}
GPUS = {"gpusPerNode": 8, "gpuResource": "amd.com/gpu"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "micro": ("micro", {}),
    "openmoji-two-nodes": ("openmoji", {"nodes": {"min": 2, "max": 2}}),
    "mlperf-schnell": ("mlperf-schnell", {}),
    "partitions": ("micro", {"gpusPerNode": 64, "gpuResource": "amd.com/cpx_nps4"}),
    "host-network-rdma": (
        "mlperf-schnell",
        {
            "network": {
                "mode": "host",
                "rdmaResource": "rdma/hca",
                "env": [
                    {"name": "NCCL_IB_HCA", "value": "bnxt_re0"},
                    {"name": "NCCL_PXN_DISABLE", "value": "0"},
                ],
            }
        },
    ),
    "kueue": (
        "micro",
        {**ELASTIC, "scheduling": {"queueName": "team", "topology": "example.com/rack"}},
    ),
    "coscheduling": ("micro", {**ELASTIC, "scheduling": {"gang": "coscheduling"}}),
    "volcano": (
        "micro",
        {**ELASTIC, "scheduling": {"gang": "volcano", "priorityClassName": "high"}},
    ),
    "native-gang": ("micro", {**ELASTIC, "scheduling": {"gang": "native"}}),
    "placement": (
        "micro",
        {
            **GPUS,
            "scheduling": {
                "nodeSelector": {"amd.com/gpu.device-id": "74a1"},
                "tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}],
            },
        },
    ),
    "storage": (
        "micro",
        {
            "image": "registry.example.com/fluxtrain:1",
            "storage": {
                "data": {"hostPath": {"path": "/mnt/data"}},
                "models": {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
                "output": {"emptyDir": {"sizeLimit": "50Gi"}},
            },
        },
    ),
    "template": (
        "micro",
        {
            "podTemplate": {
                "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "ours"}},
                "spec": {
                    "imagePullSecrets": [{"name": "registry"}],
                    "securityContext": {"supplementalGroups": [44, 109]},
                    "schedulingGates": [{"name": "example.com/wait"}],
                    "tolerations": [{"key": "spot", "operator": "Exists"}],
                    "containers": [
                        {
                            "name": "trainer",
                            "env": [
                                {"name": "HOME", "value": "/site"},
                                {
                                    "name": "USER",
                                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                                },
                            ],
                            "resources": {"requests": {"cpu": "4", "memory": "8Gi"}},
                            "volumeMounts": [
                                {"name": "site", "mountPath": "/site", "readOnly": True}
                            ],
                        },
                        {"name": "sidecar", "image": "sidecar:1"},
                    ],
                    "volumes": [
                        {"name": "site", "persistentVolumeClaim": {"claimName": "site"}},
                        {"name": "tmp", "hostPath": {"path": "/scratch"}},
                        {"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}},
                    ],
                },
            }
        },
    ),
}


class Plain(yaml.SafeDumper):
    """Writes everything out, as a person would."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def make_job(example: str = "micro", **spec: Any) -> Job:
    manifest = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())
    added = {"namespace": "team", "uid": "0000-uid", "generation": 1}
    manifest["metadata"] = manifest["metadata"] | added
    manifest["spec"] = merge(manifest["spec"], spec)
    return load(manifest, "localhost/fluxtrain/trainer:dev")


def trainer(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def environment(job: Job, **slot: int) -> dict[str, str | None]:
    pod = training_pod(job, Slot(**{"index": 0, **slot}), "none")
    return {variable["name"]: variable.get("value") for variable in trainer(pod)["env"]}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_objects_of_a_job_are_those_of_its_golden_file(name: str) -> None:
    example, spec = VARIANTS[name]
    job = make_job(example, **spec)
    shown = []
    for manifest in copy.deepcopy(desired(job)):
        if manifest["kind"] == "ConfigMap":
            assert manifest["data"] == {"config.json": job.config_json}
            manifest["data"] = {"config.json": f"the resolved config of preset {job.config.preset}"}
        if manifest["metadata"]["labels"].get("fluxtrain.dev/node-index", "0") == "0":
            shown.append(manifest)
    text = yaml.dump_all(shown, Dumper=Plain, sort_keys=False, width=110)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", VARIANTS)
def test_kubernetes_knows_every_field(name: str) -> None:
    example, spec = VARIANTS[name]
    for manifest in desired(make_job(example, **spec)):
        if manifest["apiVersion"] not in (
            "scheduling.x-k8s.io/v1alpha1",
            "scheduling.volcano.sh/v1beta1",
        ):
            kubernetes_validate.validate(manifest, "1.36", strict=True)


def test_pods_of_one_attempt_differ_in_their_index_alone() -> None:
    pods = [training_pod(make_job(**ELASTIC), Slot(index), "none") for index in range(2)]
    texts = [
        yaml.safe_dump(pod)
        .replace(f"micro-{index}", "micro-N")
        .replace(f"index: '{index}'", "index: N")
        for index, pod in enumerate(pods)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "name", sorted(set(VARIANTS) - {"host-network-rdma", "storage", "template"})
)
def test_pods_meet_the_restricted_pod_security_standard(name: str) -> None:
    example, spec = VARIANTS[name]
    for pod in (m for m in desired(make_job(example, **spec)) if m["kind"] == "Pod"):
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        allowed = {"name", "configMap", "persistentVolumeClaim", "emptyDir"}
        assert all(set(volume) <= allowed for volume in pod["spec"]["volumes"])


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


def test_the_template_reaches_the_rendezvous_pod_where_it_concerns_every_pod() -> None:
    _, spec = VARIANTS["template"]
    pod = rendezvous_pod(make_job(**spec))
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    (container,) = pod["spec"]["containers"]
    assert {"name": "HOME", "value": "/site"} in container["env"]
    assert container["volumeMounts"][-1]["mountPath"] == "/site"
    assert container["resources"]["requests"] == {"cpu": "50m", "memory": "256Mi"}
    assert "schedulingGates" not in pod["spec"]


def container(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"hostname": "x"}}, "spec.hostname"),
        ({"spec": {"subdomain": "x"}}, "spec.subdomain"),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
        ({"spec": {"nodeName": "x"}}, "spec.nodeName"),
        ({"spec": {"volumes": [{"name": "data", "emptyDir": {}}]}}, "spec.volumes[0]"),
        ({"spec": {"volumes": {"name": "x"}}}, "spec.volumes"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes[0]"),
        ({"spec": {"securityContext": []}}, "spec.securityContext"),
        ({"spec": {"containers": 1}}, "spec.containers"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0].name"),
        ({"spec": []}, "spec"),
        (container(image="x"), "spec.containers[0].image"),
        (container(command=["x"]), "spec.containers[0].command"),
        (container(args=["x"]), "spec.containers[0].args"),
        (container(env=[{"name": "PET_NNODES", "value": "1"}]), "spec.containers[0].env[0].name"),
        (
            container(env=[{"name": "FLUXTRAIN_DATA", "value": "/"}]),
            "spec.containers[0].env[0].name",
        ),
        (container(env={"A": "b"}), "spec.containers[0].env"),
        (
            {"metadata": {"labels": {"fluxtrain.dev/job": "x"}}},
            "metadata.labels[fluxtrain.dev/job]",
        ),
        (
            {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}},
            "metadata.labels[app.kubernetes.io/name]",
        ),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"metadata": {"labels": []}}, "metadata.labels"),
        ({"kind": "Pod"}, "kind"),
    ],
)
def test_a_template_that_would_break_the_contract_is_refused_with_its_path(
    template: dict[str, Any], path: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        make_job(podTemplate=template)
    assert caught.value.path == f"spec.podTemplate.{path}"
