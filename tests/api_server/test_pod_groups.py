"""APIs of gang schedulers that are installed later, go away, and report what a job waits for.

Volcano's controllers do not run here: the tests write the status that its scheduler would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.kubectl import Manifest
from tests.api_server import pod_groups
from tests.api_server.client import Kubectl, Plugin, make_job
from tests.api_server.empty_api_server import api_server
from tests.end_to_end.stage import Operator, condition, wait_for

NAMESPACE = "gangs"
HERE = f"--namespace={NAMESPACE}"
GROUPS = {"Volcano": "scheduling.volcano.sh", "Coscheduling": "scheduling.x-k8s.io"}


@pytest.fixture(scope="module")
def kubectl(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Return kubectl for an API server of its own: others want pod groups to be served."""
    with api_server(tmp_path_factory.mktemp("api_server")) as kubectl:
        kubectl("create", "namespace", NAMESPACE)
        kubectl("create", "serviceaccount", "default", HERE)
        yield kubectl


@pytest.fixture(scope="module")
def plugin(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    """Run the operator for the namespace; return ``kubectl fluxtrain``."""
    operator = Operator(kubectl, NAMESPACE, tmp_path_factory.mktemp("operator"))
    operator.start()
    try:
        yield Plugin(kubectl, tmp_path_factory.mktemp("plugin"), NAMESPACE)
    finally:
        operator.stop()


def apply(kubectl: Kubectl, name: str, **scheduling: Any) -> None:
    spec = {"nodes": {"min": 2, "max": 2}, "scheduling": scheduling}
    kubectl.apply(make_job(name, spec), namespace=NAMESPACE)


def pods(kubectl: Kubectl, name: str) -> list[str]:
    selector = f"--selector=fluxtrain.dev/job={name}"
    listed = json.loads(kubectl("get", "pods", HERE, selector, "--output=json"))
    return sorted(pod["metadata"]["name"] for pod in listed["items"])


def admitted(kubectl: Kubectl, name: str) -> Manifest:
    return condition(kubectl.get("ft", name, HERE).get("status", {}), "Admitted")


def wait_until_admitted(kubectl: Kubectl, name: str, reason: str, text: str = "") -> Manifest:
    """Wait for the reason of Admitted and for a part of its message."""

    def is_so() -> bool:
        found = admitted(kubectl, name)
        return found.get("reason") == reason and text in found.get("message", "")

    wait_for(is_so, lambda: f"{reason} {text}: {admitted(kubectl, name)}", seconds=90)
    return admitted(kubectl, name)


def group_spec(kubectl: Kubectl, name: str) -> Manifest:
    group = f"podgroups.{GROUPS['Volcano']}/{name}-gang"
    spec: Manifest = json.loads(kubectl("get", group, HERE, "--output=json"))["spec"]
    return spec


def report(kubectl: Kubectl, name: str, **status: Any) -> None:
    """Write the status of a job's pod group, as Volcano's scheduler would."""
    group = f"podgroups.{GROUPS['Volcano']}/{name}-gang"
    patch = json.dumps({"status": status})
    kubectl("patch", group, HERE, "--subresource=status", "--type=merge", f"--patch={patch}")


def install(kubectl: Kubectl, gang: str) -> None:
    (definition,) = (d for d in pod_groups.DEFINITIONS if d["spec"]["group"] == GROUPS[gang])
    kubectl.apply(definition)
    kubectl.wait_for_crds()


def why(plugin: Plugin, name: str) -> str:
    return plugin.said("why", name)


@pytest.mark.proof
@pytest.mark.parametrize("gang", GROUPS)
def test_a_job_waits_for_an_api_that_is_installed_later_and_goes_away_again(
    plugin: Plugin, gang: str
) -> None:
    kubectl, name, definition = (
        plugin.kubectl,
        f"late-{gang.lower()}",
        f"crd/podgroups.{GROUPS[gang]}",
    )
    apply(kubectl, name, gang=gang)
    wait_until_admitted(kubectl, name, "NoPodGroups", f"PodGroup of {GROUPS[gang]}/")
    assert pods(kubectl, name) == []
    said = why(plugin, name)
    assert "the cluster does not serve PodGroup" in said
    assert "Install the scheduler's custom resource definitions" in said
    install(kubectl, gang)
    wait_for(lambda: len(pods(kubectl, name)) == 3, lambda: why(plugin, name), seconds=90)
    kubectl("delete", definition)
    kubectl("delete", "pod", f"{name}-1", HERE, "--force", "--grace-period=0")
    wait_until_admitted(kubectl, name, "NoPodGroups")
    assert f"{name}-1" not in pods(kubectl, name)
    install(kubectl, gang)
    wait_for(lambda: len(pods(kubectl, name)) == 3, lambda: why(plugin, name), seconds=90)


def test_a_job_in_volcanos_queue_says_what_it_waits_for(plugin: Plugin) -> None:
    kubectl = plugin.kubectl
    install(kubectl, "Volcano")
    apply(kubectl, "queued", gang="Volcano", queueName="team")
    wait_until_admitted(kubectl, "queued", "PodGroupPending", "has not seen the pod group")
    assert group_spec(kubectl, "queued") == {
        "minMember": 2,
        "queue": "team",
        "priorityClassName": "",
    }
    unmet = {
        "type": "Unschedulable",
        "status": "True",
        "reason": "NotEnoughResources",
        "message": "queue team has no room",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    report(kubectl, "queued", phase="Pending", conditions=[unmet])
    found = wait_until_admitted(kubectl, "queued", "PodGroupPending", "queue team has no room")
    assert found["status"] == "False"
    said = why(plugin, "queued")
    assert "waits in Volcano's queue team: NotEnoughResources: queue team has no room" in said
    assert (
        "`kubectl describe podgroups.scheduling.volcano.sh -n gangs -l fluxtrain.dev/job=queued`"
        in said
    )
    assert "startTime" not in kubectl.get("ft", "queued", HERE)["status"]
    report(kubectl, "queued", phase="Inqueue")
    assert wait_until_admitted(kubectl, "queued", "Admitted")["status"] == "True"
    wait_for(
        lambda: "startTime" in kubectl.get("ft", "queued", HERE)["status"],
        lambda: "no start time",
    )


def test_a_group_follows_the_queue_and_the_minimum_of_its_job(plugin: Plugin) -> None:
    kubectl = plugin.kubectl
    install(kubectl, "Volcano")
    apply(kubectl, "moved", gang="Volcano", queueName="team")
    steps: list[tuple[Manifest, Manifest]] = [
        ({"scheduling": {"queueName": "other", "priorityClassName": "high"}}, {"queue": "other"}),
        ({"nodes": {"min": 3, "max": 4}}, {"minMember": 3, "priorityClassName": "high"}),
        (
            {"scheduling": {"queueName": None, "priorityClassName": None}},
            {"minMember": 3, "queue": "default", "priorityClassName": ""},
        ),
    ]
    wait_until_admitted(kubectl, "moved", "PodGroupPending")
    for change, expected in steps:
        patch = json.dumps({"spec": change})
        kubectl("patch", "ft", "moved", HERE, "--type=merge", f"--patch={patch}")

        def follows(expected: Manifest = expected) -> bool:
            return expected.items() <= group_spec(kubectl, "moved").items()

        wait_for(follows, lambda: str(group_spec(kubectl, "moved")), seconds=30)
