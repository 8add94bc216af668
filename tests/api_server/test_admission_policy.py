"""The chart's ValidatingAdmissionPolicy on an API server: it refuses what the operator would refuse."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.programs import binaries
from tests.api_server.client import ApiServer, Kubectl, Response, make_job
from tests.end_to_end.stage import wait_for
from tests.operator.permissions import CHART, PROFILES, ROWS, Manifest, Row, values_file
from tests.paths import ROOT

from fluxtrain.contract.model_base import GROUP
from fluxtrain.contract.resource.fluxtraining import VERSIONS

VERSION = "/apis/admissionregistration.k8s.io/v1"
PRIVILEGED = {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]}


def namespace_of(profile: str) -> str:
    return f"limits-{profile}"


def jobs_in(profile: str) -> str:
    return f"/apis/fluxtrain.dev/v1alpha1/namespaces/{namespace_of(profile)}/fluxtrainings"


def policies(profile: str) -> list[Manifest]:
    """Return the policy of ``profile`` as the chart renders it for one namespace."""
    namespace = namespace_of(profile)
    command = [
        *(binaries.path("helm"), "template", "fluxtrain-operator", CHART),
        *(f"--namespace={namespace}", f"--values={values_file(profile)}"),
        f'--set-json=watchNamespaces=["{namespace}"]',
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rendered = [m for m in yaml.load_all(done.stdout, yaml.CSafeLoader) if m]
    return [m for m in rendered if m["kind"].startswith("ValidatingAdmissionPolicy")]


@pytest.fixture(scope="module")
def server(kubectl: Kubectl) -> Iterator[ApiServer]:
    """Return the API server with the policy of each profile in a namespace of its own."""
    server, paths = kubectl.server, list[str]()
    old = make_job("old", {"podTemplate": {"spec": PRIVILEGED}})
    for profile in PROFILES:
        kubectl("create", "namespace", namespace_of(profile))
        assert server.create(jobs_in(profile), old, dry_run=False).accepted
        for manifest in policies(profile):
            path = f"{VERSION}/{manifest['kind'].lower()[:-1]}ies".replace("bindinies", "bindings")
            response = server.create(path, manifest, dry_run=False)
            assert response.accepted, response.message
            paths.append(f"{path}/{manifest['metadata']['name']}")
    new = make_job("new", {"podTemplate": {"spec": PRIVILEGED}})
    refusing = PROFILES[:2]
    wait_for(
        lambda: not any(server.create(jobs_in(name), new).accepted for name in refusing),
        "the policies are in force",
        seconds=60,
    )
    yield server
    for path in paths:
        server.delete(path)


def create(server: ApiServer, profile: str, row: Row) -> Response:
    return server.create(jobs_in(profile), make_job("row", row.spec))


@pytest.mark.parametrize("profile", PROFILES)
def test_the_api_server_permits_what_the_operator_permits(server: ApiServer, profile: str) -> None:
    crossed = []
    for row in ROWS:
        response = create(server, profile, row)
        if response.accepted != (profile in row.permitted):
            crossed.append(f"{row.what} {row.spec}: {response.code} {response.message}")
        elif not response.accepted:
            assert "spec." in response.message
            assert "ValidatingAdmissionPolicy" in response.message
            assert "error" not in response.message, row
    assert not crossed, "\n".join(crossed)


def test_a_refusal_names_the_field_and_the_setting(server: ApiServer) -> None:
    response = server.create(
        jobs_in("default"), make_job("a", {"podTemplate": {"spec": PRIVILEGED}})
    )
    path = "spec.podTemplate.spec.containers[].securityContext.privileged"
    assert f"{path}: must be false" in response.message


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_of_any_version_is_refused(server: ApiServer, version: str) -> None:
    job = {**make_job("a", {"network": {"mode": "Host"}}), "apiVersion": f"{GROUP}/{version}"}
    response = server.create(jobs_in("default").replace("v1alpha1", version), job)
    assert "spec.network.mode: must be Pod: jobs.hostNetwork" in response.message


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_permitted_by_default(server: ApiServer, path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    response = server.create(jobs_in("default"), manifest)
    assert response.accepted, response.message


def test_an_earlier_job_can_be_changed_but_not_for_the_worse(server: ApiServer) -> None:
    path = f"{jobs_in('default')}/old"
    job = server.get(path).body
    job["spec"]["lifecycle"] = {"suspend": True}
    assert server.replace(path, job).accepted
    job["spec"]["network"] = {"mode": "Host"}
    response = server.replace(path, job)
    assert not response.accepted
    assert "is forbidden: ValidatingAdmissionPolicy" in response.message
