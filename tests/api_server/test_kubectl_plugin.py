"""``kubectl fluxtrain``, started by kubectl, on a real API server with the real operator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.kubectl import Manifest
from tests.api_server.client import Kubectl, Plugin, make_job
from tests.end_to_end.stage import Operator, wait_for

from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import stamp

NAMESPACE = "people"
VIEWER = "--as=vera"


@pytest.fixture(scope="module")
def plugin(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    kubectl("create", "namespace", NAMESPACE)
    within = f"--namespace={NAMESPACE}"
    kubectl("create", "serviceaccount", "default", within)
    jobs = "fluxtrainings.fluxtrain.dev"
    kubectl("create", "role", "jobs", within, "--verb=get,list", f"--resource={jobs}")
    kubectl("create", "role", "pods", within, "--verb=get,list", "--resource=pods")
    kubectl("create", "rolebinding", "vera-jobs", within, "--role=jobs", "--user=vera")
    kubectl("create", "rolebinding", "paul-jobs", within, "--role=jobs", "--user=paul")
    kubectl("create", "rolebinding", "vera-pods", within, "--role=pods", "--user=vera")
    return Plugin(kubectl, tmp_path_factory.mktemp("plugin"), NAMESPACE)


@pytest.fixture(scope="module", autouse=True)
def operator(plugin: Plugin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Run the operator for the namespace."""
    operator = Operator(plugin.kubectl, NAMESPACE, tmp_path_factory.mktemp("operator"))
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()


def apply(plugin: Plugin, name: str, **spec: Any) -> None:
    plugin.kubectl.apply(make_job(name, spec), namespace=NAMESPACE)


def wait_until_said(plugin: Plugin, name: str, text: str) -> str:
    said: list[str] = []

    def is_said() -> bool:
        said[:] = [plugin.said("why", name)]
        return text in said[0]

    wait_for(is_said, lambda: f"{text!r} in: {said}", seconds=60)
    return said[0]


def patch_status(plugin: Plugin, kind: str, name: str, status: Manifest) -> None:
    plugin.kubectl(
        *("patch", kind, name, f"--namespace={NAMESPACE}", "--subresource=status"),
        *("--type=merge", f"--patch={json.dumps({'status': status})}"),
    )


def test_why_tells_what_a_job_waits_for(plugin: Plugin) -> None:
    apply(plugin, "early", lifecycle={"startAfter": ["first"]})
    wait_until_said(plugin, "early", "spec.lifecycle.startAfter: first does not exist")
    apply(plugin, "first", nodes={"min": 2, "max": 2})
    wait_until_said(plugin, "first", "first-0 (and 2 more like it) has not been processed")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    message = "0/3 nodes are available: 3 Insufficient cpu."
    patch_status(plugin, "pod", "first-0", {"conditions": [{**condition, "message": message}]})
    said = wait_until_said(plugin, "first", f"first-0 cannot be scheduled: {message}")
    assert said.startswith(f"{NAMESPACE}/first (Pending) waits for pods: 0 of at least 2 nodes")


def test_why_tells_of_a_foreign_object_with_a_needed_name(plugin: Plugin) -> None:
    ports = {"ports": [{"port": 80}]}
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken"}, "spec": ports}
    plugin.kubectl.create(foreign, namespace=NAMESPACE)
    apply(plugin, "taken")
    wait_until_said(plugin, "taken", "Service taken already exists and has no owner")


def test_why_tells_which_release_claims_the_namespace_of_a_job_that_nobody_touches(
    plugin: Plugin, tmp_path: Path
) -> None:
    kubectl = plugin.kubectl
    kubectl("create", "namespace", "elsewhere")
    elsewhere = Plugin(kubectl, tmp_path, "elsewhere")
    kubectl.apply(make_job("left", {}), namespace="elsewhere")
    wait_until_said(elsewhere, "left", "no status; no operator claims the namespace")
    renewed = stamp(time.time() - 60).replace("Z", ".000000Z")
    claim = {"holderIdentity": "beta/fluxtrain-operator", "renewTime": renewed}
    lease = {"kind": "Lease", "metadata": {"name": names.CLAIM}, "spec": claim}
    kubectl.create({"apiVersion": "coordination.k8s.io/v1", **lease}, namespace="elsewhere")
    said = elsewhere.said("why", "left")
    assert "beta/fluxtrain-operator claims the namespace, and renewed that 1m" in said
    holder = kubectl("get", "lease", names.CLAIM, f"--namespace={NAMESPACE}", "--output=yaml")
    assert "holderIdentity: " in holder, "the operator claims the namespace that it serves"
    assert "claims" not in plugin.said("why", "early")


def test_the_timeline_has_the_events_of_the_operator(plugin: Plugin) -> None:
    apply(plugin, "stopped", lifecycle={"suspend": True})
    wait_until_said(plugin, "stopped", "is suspended by spec.lifecycle.suspend")
    header, *lines = plugin.said("timeline", "stopped").splitlines()
    assert header.split() == ["TIME", "AGE", "ABOUT", "REASON", "MESSAGE"]
    found = [tuple(line.split()[2:4]) for line in lines]
    assert found[0] == ("job", "Created")
    assert ("job", "Suspended") in found
    assert ("Suspended=True", "Suspended") in found


def test_a_job_without_pods_has_neither_stacks_nor_logs(plugin: Plugin) -> None:
    within = f"--namespace={NAMESPACE}"
    why = f"`kubectl fluxtrain why stopped -n {NAMESPACE}` says why"
    assert f"stopped has no running pods; {why}" in plugin.error("stacks", "stopped", within)
    said = plugin.error("logs", "stopped", within)
    assert f"stopped has no pods; {why}" in said
    assert "/output/mlperf.log" in said


def test_goodput_lists_all_jobs(plugin: Plugin) -> None:
    names = [line.split()[0] for line in plugin.said("goodput").splitlines()]
    assert names == ["NAME", "early", "first", "stopped", "taken"]
    done = plugin("goodput", "--all-namespaces")
    assert done.stdout.split()[:3] == ["NAMESPACE", "NAME", "PHASE"]


def test_the_time_to_the_last_step_is_a_column(plugin: Plugin) -> None:
    apply(
        plugin, "timed", managedBy="example.org/other"
    )  # whose status the operator does not write
    patch_status(plugin, "ft", "timed", {"phase": "Running", "eta": "2h10m"})
    text = plugin.kubectl("get", "ft", "timed", f"--namespace={NAMESPACE}")
    header, row = (line.split() for line in text.splitlines())
    assert "ETA" in header
    assert "2h10m" in row


def test_an_absent_job_is_an_error_that_names_the_namespace(plugin: Plugin) -> None:
    message = plugin.error("why", "nothing", "-n", NAMESPACE)
    assert f"no FluxTraining nothing in namespace {NAMESPACE}" in message
    assert "no FluxTraining nothing in namespace default" in plugin.error("why", "nothing")


def test_a_missing_right_is_named(plugin: Plugin) -> None:
    within = f"--namespace={NAMESPACE}"
    text = plugin.error("why", "first", within, "--as=stranger")
    assert "user stranger lacks the right to get fluxtrainings.fluxtrain.dev" in text
    said = plugin.said("why", "first", "--as=paul")
    assert "waits for pods: 0 of at least 2 nodes are up" in said
    assert "Not read: pods (forbidden: user paul lacks the right to list pods" in said
    assert "Not read: events" in said
    running = {"phase": "Running", "startTime": stamp(0), "podIP": "10.0.0.1"}
    patch_status(plugin, "pod", "first-0", running)
    assert "vera lacks the right to create pods/exec" in plugin.error(
        "stacks", "first", within, VIEWER
    )
    assert "vera lacks the right to get pods/log" in plugin.error("logs", "first", within, VIEWER)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["--context=absent"], 2, "context: absent"),
        (["--cluster=absent"], 2, "absent"),
        (["--server=https://127.0.0.1:1"], 1, "the API server cannot be reached"),
        (["--token=wrong"], 1, "does not accept the credentials"),
        (["--kubeconfig=/nowhere"], 2, "/nowhere"),
    ],
)
def test_a_connection_that_fails_is_one_message(
    plugin: Plugin, arguments: list[str], exit_code: int, says: str
) -> None:
    message = plugin.error("why", "first", *arguments, exit_code=exit_code)
    assert says in message
    assert len(message.splitlines()) == 1


def test_without_a_kubeconfig_the_remedy_is_told(plugin: Plugin, tmp_path: Path) -> None:
    message = plugin.error("why", "first", exit_code=2, kubeconfig=tmp_path / "absent")
    assert "kubectl has no kubeconfig; set KUBECONFIG" in message


def test_the_operators_log_has_the_reason_of_each_decision(
    plugin: Plugin, operator: Operator
) -> None:
    apply(plugin, "logged", lifecycle={"activeDeadlineSeconds": 1})
    wait_until_said(plugin, "logged", "DeadlineExceeded")
    lines = [json.loads(line) for line in operator.log().splitlines() if line.startswith("{")]
    about = {line["action"]: line for line in lines if line.get("job") == "logged"}
    assert list(about)[:2] == ["run", "fail"]
    assert "Pod/logged-0" in about["run"]["create"]
    assert (about["fail"]["reason"], about["fail"]["namespace"]) == ("DeadlineExceeded", NAMESPACE)
    assert all(line["reason"] for line in about.values())
