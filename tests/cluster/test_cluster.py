"""The cluster for development and tests: it starts, runs pods, loses a node, and is removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster
import pytest
from cluster.console import wait_until
from cluster.errors import ClusterError, MachineError
from cluster.host import left_behind, mounts
from cluster.kubectl import Kubectl
from cluster.layout import KUBECONFIG, STATE, Node
from cluster.nodes import fake_gpus, fake_nodes, images, node, volumes
from cluster.programs import packages

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for namespaces, cgroups and mounts"),
    pytest.mark.timeout(1200),  # the first start builds Kubernetes
]

Manifest = dict[str, Any]

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}

ALL_REDUCE = """
import sys
import torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", "tcp://train-0.train:29500", rank=rank, world_size=2)
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def machine() -> dict[str, list[str]]:
    """The state of the machine before the cluster starts."""
    if "KUBECONFIG" in os.environ:
        pytest.skip("KUBECONFIG is set: these tests start their own cluster")
    if KUBECONFIG.exists():
        pytest.skip("a cluster runs already; `make cluster-down` lets these tests start their own")
    try:
        cluster.prepare()
        left_behind.clear()
    except ClusterError as error:
        pytest.skip(f"the cluster cannot be prepared here: {error}")
    return host_state()


@pytest.fixture(scope="module")
def kubectl(machine: dict[str, list[str]]) -> Iterator[Kubectl]:
    began = time.monotonic()
    try:
        kubeconfig = cluster.up()
    except MachineError as error:
        pytest.skip(f"no cluster can run here: {error}")
    print(f"\nstarted in {time.monotonic() - began:.1f} s")
    yield Kubectl(kubeconfig)
    cluster.down()


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace under restricted Pod Security, named like the test."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:50].rstrip("-")
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": level}}
    )
    wait_until(lambda: has(kubectl, "serviceaccount/default", name), "its account", seconds=30)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def make_pod(name: str, *command: str, resources: Manifest | None = None, **spec: Any) -> Manifest:
    container = {
        "name": "main",
        "image": images.BASE_IMAGE,
        "command": list(command),
        "securityContext": RESTRICTED,
        "resources": resources or {},
        "volumeMounts": spec.pop("volumeMounts", []),
    }
    settings = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, **spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name.rsplit("-", 1)[0]}},
        "spec": {"containers": [container], **settings},
    }


def has(kubectl: Kubectl, what: str, namespace: str) -> bool:
    return bool(kubectl("get", what, f"--namespace={namespace}", "--ignore-not-found"))


def wait_for_phase(kubectl: Kubectl, namespace: str, phase: str, *pods: str) -> None:
    names = [f"pod/{name}" for name in pods]
    condition = f"--for=jsonpath={{.status.phase}}={phase}"
    kubectl("wait", f"--namespace={namespace}", condition, "--timeout=90s", *names, seconds=100)


def host_state() -> dict[str, list[str]]:
    """Return everything that a cluster may leave on a machine."""

    def output_lines(*argv: str) -> list[str]:
        done = subprocess.run(
            [packages.program(argv[0]), *argv[1:]], capture_output=True, text=True, check=True
        )
        return sorted(line for line in done.stdout.splitlines() if not line.startswith("#"))

    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    folders = ("/var/lib/kubelet", "/var/log/containers", "/var/lib/cni", "/run/containerd")
    return {
        "processes": [text.decode() for text in commands if str(STATE).encode() in text],
        "mounts": sorted(line.split()[4] for line in mounts),
        "links": output_lines("ip", "-brief", "link", "show"),
        "routes": output_lines("ip", "route", "show"),
        "namespaces": output_lines("ip", "netns", "list"),
        "iptables": [line.split(" [")[0] for line in output_lines("iptables-save")],
        "cgroups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("**/fluxtrain*")),
        "folders": [folder for folder in folders if Path(folder).exists()],
        "kernel": [Path("/proc/sys/kernel/panic").read_text()],
    }


def test_two_nodes_are_ready_and_have_eight_gpus_each(kubectl: Kubectl) -> None:
    items = kubectl.get("nodes")["items"]
    assert [item["metadata"]["name"] for item in items] == ["node-0", "node-1"]
    for item in items:
        assert item["status"]["allocatable"]["amd.com/gpu"] == "8"
        assert item["metadata"]["labels"].items() >= fake_gpus.LABELS.items()
        assert item["status"]["nodeInfo"]["kubeletVersion"] == "v1.37.2"


def test_a_second_start_uses_the_running_cluster(kubectl: Kubectl) -> None:
    before = cluster.status()
    assert cluster.up() == KUBECONFIG
    assert cluster.status() == before
    assert all(before.values())


def test_a_pod_runs_and_its_log_can_be_read(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply(make_pod("hello", "python3", "-c", "print('seen')"), namespace=namespace)
    wait_for_phase(kubectl, namespace, "Succeeded", "hello")
    assert kubectl("logs", f"--namespace={namespace}", "hello") == "seen\n"


def test_a_command_can_be_run_inside_a_pod(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply(make_pod("waits", "sleep", "600"), namespace=namespace)
    wait_for_phase(kubectl, namespace, "Running", "waits")
    inside = kubectl("exec", f"--namespace={namespace}", "waits", "--", "id", "-u")
    assert inside == f"{images.USER_ID}\n"


def test_restricted_pod_security_refuses_a_privileged_pod(kubectl: Kubectl, namespace: str) -> None:
    bad = make_pod("bad", "true")
    bad["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(cluster.ClusterError, match="violates PodSecurity"):
        kubectl.apply(bad, namespace=namespace)


def test_a_pod_that_requests_more_gpus_than_are_free_stays_pending(
    kubectl: Kubectl, namespace: str
) -> None:
    all_gpus = {"limits": {"amd.com/gpu": "8"}}
    pods = [make_pod(f"gpus-{index}", "sleep", "600", resources=all_gpus) for index in range(2)]
    kubectl.apply(*pods, namespace=namespace)
    wait_for_phase(kubectl, namespace, "Running", "gpus-0", "gpus-1")
    kubectl.apply(make_pod("gpus-2", "sleep", "600", resources=all_gpus), namespace=namespace)
    unschedulable = "--for=jsonpath={.status.conditions[?(@.type=='PodScheduled')].reason}"
    wait = ["wait", f"--namespace={namespace}", "pod/gpus-2"]
    kubectl(*wait, f"{unschedulable}=Unschedulable", "--timeout=30s")


def test_two_pods_reduce_a_tensor_over_a_headless_service(kubectl: Kubectl, namespace: str) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "train"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": "train"},
        },
    }
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "script"},
        "data": {"all_reduce.py": ALL_REDUCE},
    }
    pods = [make_rank(rank) for rank in range(2)]
    packages_volume = volumes.site_packages("packages", namespace)
    kubectl.apply(service, script, *packages_volume, *pods, namespace=namespace)
    wait_for_phase(kubectl, namespace, "Succeeded", "train-0", "train-1")
    for rank in range(2):
        assert f"rank {rank} of 2: 3" in kubectl(
            "logs", f"--namespace={namespace}", f"train-{rank}"
        )


def make_rank(rank: int) -> Manifest:
    """Return a pod of one rank, on the node with the number ``rank``."""
    return make_pod(
        f"train-{rank}",
        *("python3", "/script/all_reduce.py", str(rank)),
        hostname=f"train-{rank}",
        subdomain="train",
        nodeSelector={"kubernetes.io/hostname": f"node-{rank}"},
        volumes=[
            {
                "name": "packages",
                "persistentVolumeClaim": {"claimName": "packages", "readOnly": True},
            },
            {"name": "script", "configMap": {"name": "script"}},
        ],
        volumeMounts=[
            {"name": "packages", "mountPath": volumes.SITE_PACKAGES, "readOnly": True},
            {"name": "script", "mountPath": "/script"},
        ],
    )


def test_a_built_image_runs_in_a_pod(kubectl: Kubectl, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE\nFROM ${BASE}\nUSER 0\nRUN echo built > /srv/how.txt\nUSER 1000\n"
    )
    arguments = {"BASE": images.BASE_IMAGE}
    name = "localhost/fluxtrain/built:test"
    images.load([images.build(name, tmp_path / "Dockerfile", tmp_path, arguments)])
    pod = make_pod("built", "cat", "/srv/how.txt")
    pod["spec"]["containers"][0].update(image=name, imagePullPolicy="Never")
    kubectl.apply(pod, namespace=namespace)
    wait_for_phase(kubectl, namespace, "Succeeded", "built")
    assert kubectl("logs", f"--namespace={namespace}", "built") == "built\n"


def test_a_powered_off_node_is_powered_on_again(kubectl: Kubectl, namespace: str) -> None:
    pod = make_pod("victim", "sleep", "600", nodeName="node-1", restartPolicy="Always")
    kubectl.apply(pod, namespace=namespace)
    wait_for_phase(kubectl, namespace, "Running", "victim")
    node.power_off(Node(1))
    assert not any(name.startswith("node-1.") for name in cluster.status())
    cluster.up()  # powers it on and changes nothing else
    count = "--for=jsonpath={.status.containerStatuses[0].restartCount}=1"
    kubectl("wait", f"--namespace={namespace}", "pod/victim", count, "--timeout=60s", seconds=70)


def test_a_pod_on_a_fake_node_is_reported_as_running(kubectl: Kubectl, namespace: str) -> None:
    names = fake_nodes.start(20)
    pods = [
        make_pod(
            f"fake-{index}",
            "true",
            nodeSelector={"type": "fake"},
            tolerations=[{"key": fake_nodes.TAINT["key"], "operator": "Exists"}],
            resources={"limits": {"amd.com/gpu": "8"}},
        )
        for index in range(20)
    ]
    kubectl.apply(*pods, namespace=namespace)
    wait_for_phase(kubectl, namespace, "Running", *(f"fake-{index}" for index in range(20)))
    items = kubectl.get("pods", f"--namespace={namespace}")["items"]
    assert {pod["spec"]["nodeName"] for pod in items} == set(names)
    fake_nodes.stop()
    assert len(kubectl.get("nodes")["items"]) == 2


def test_down_restores_the_machine_and_the_next_start_is_warm(
    kubectl: Kubectl, machine: dict[str, list[str]]
) -> None:
    cluster.down()
    assert host_state() == machine
    assert not STATE.exists()
    began = time.monotonic()
    cluster.up()
    print(f"\nwarm start: {time.monotonic() - began:.1f} s")
    assert all(cluster.status().values())


def test_a_cluster_without_a_clone_is_removed_and_one_with_it_is_named(kubectl: Kubectl) -> None:
    with pytest.raises(MachineError, match=f"the cluster of {STATE.parent} is running"):
        left_behind.clear()
    before = host_state()
    mounts.unmount(STATE)
    shutil.rmtree(STATE)
    cluster.up()
    assert all(cluster.status().values())
    now = host_state()
    for name in ("routes", "namespaces", "cgroups"):
        assert now[name] == before[name]
    for name in ("links", "processes"):  # with new addresses and paths
        assert len(now[name]) == len(before[name])
