"""Both versions of the API on a real API server: what is written as one is read as the other."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from cluster.errors import ClusterError
from cluster.kubectl import Manifest
from cluster.programs import binaries
from tests.api_server.client import Kubectl, make_job
from tests.api_server.empty_api_server import api_server
from tests.paths import ROOT

OLD, NEW = "v1alpha1", "v1beta1"
BOTH_WAYS = pytest.mark.parametrize(("written", "read"), [(OLD, NEW), (NEW, OLD)])
CRD = "crd/fluxtrainings.fluxtrain.dev"
STATUS = {"phase": "Running", "observedGeneration": 1, "nodes": {"ready": 2, "desired": 2}}


def path(version: str, name: str = "") -> str:
    jobs = f"/apis/fluxtrain.dev/{version}/namespaces/default/fluxtrainings"
    return f"{jobs}/{name}" if name else jobs


def job(version: str, name: str, **spec: Any) -> Manifest:
    return {**make_job(name, spec), "apiVersion": f"fluxtrain.dev/{version}"}


def content(body: Manifest) -> Manifest:
    """Return an object without what differs between versions and between reads."""
    metadata = {key: body["metadata"][key] for key in ("name", "uid", "generation")}
    return {"metadata": metadata, "spec": body["spec"], "status": body["status"]}


@BOTH_WAYS
def test_what_is_written_as_one_version_is_read_as_the_other(
    kubectl: Kubectl, written: str, read: str
) -> None:
    server, name = kubectl.server, f"from-{written}"
    spec = {"nodes": {"min": 1, "max": 2}, "scheduling": {"gang": "Volcano"}}
    created = server.create(path(written), job(written, name, **spec), dry_run=False)
    assert created.accepted, created.message
    body = server.get(path(read, name)).body
    assert body["apiVersion"] == f"fluxtrain.dev/{read}"
    assert content(body) == content(server.get(path(written, name)).body)
    assert body["status"] == {**body["status"], "observedGeneration": -1}, "nobody has seen it"

    changed = {"spec": {"nodes": {"max": 3}}}
    assert server.merge(path(read, name), changed).code == HTTPStatus.OK
    assert server.get(path(written, name)).body["spec"]["nodes"] == {"min": 1, "max": 3}
    assert server.merge(f"{path(written, name)}/status", {"status": STATUS}).accepted
    body = server.get(path(read, name)).body
    assert body["status"] == {**body["status"], **STATUS}
    scale = server.get(f"{path(read, name)}/scale").body
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 2)


@BOTH_WAYS
@pytest.mark.parametrize(
    "spec",
    [
        {"nodes": {"min": 3, "max": 2}},
        {"scheduling": {"gang": "volcano"}},
        {"run": {"preset": "micro", "optim": {"beta1": 2}}},
        {"unknown": 1},
    ],
)
def test_both_versions_refuse_the_same_with_the_same_words(
    kubectl: Kubectl, written: str, read: str, spec: Manifest
) -> None:
    answers = [
        kubectl.server.create(path(version), job(version, "bad", **spec))
        for version in (written, read)
    ]
    assert not any(answer.accepted for answer in answers)
    one, other = (answer.message.replace(written, read) for answer in answers)
    assert one == other


def test_one_version_is_stored_and_kubectl_shows_the_other(kubectl: Kubectl) -> None:
    kubectl.apply(job(OLD, "shown"))
    definition = json.loads(kubectl("get", CRD, "--output=json"))
    assert definition["status"]["storedVersions"] == [OLD]
    assert kubectl("get", "ft", "shown", "--output=jsonpath={.apiVersion}").endswith(NEW)
    narrow = kubectl("get", "ft", "shown").splitlines()[0].split()
    assert narrow == ["NAME", "READY", "PHASE", "NODES", "STEP", "ETA", "AGE"]
    wide = kubectl("get", "ft", "shown", "--output=wide").splitlines()[0].split()
    added = ["REASON", "LOSS", "EVAL", "SAMPLES/S", "RESTARTS", "FAULTS"]
    assert wide == [*narrow, *added]


@pytest.fixture
def own(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """Return kubectl for an API server whose CRD the test may change."""
    with api_server(tmp_path_factory.mktemp("versions")) as kubectl:
        yield kubectl


def migration() -> list[str]:
    """Return the commands of docs/api-versions.md that write all objects and say so."""
    page = (ROOT / "docs" / "api-versions.md").read_text()
    return re.findall(r"^\$ (kubectl .*)$", page, re.MULTILINE)


def store(kubectl: Kubectl, *versions: tuple[str, bool]) -> None:
    """Write the definition with these versions, and whether each is the stored one."""
    definition = json.loads(kubectl("get", CRD, "--output=json"))
    content = definition["spec"]["versions"][0]
    definition["spec"]["versions"] = [
        {**content, "name": name, "storage": stored} for name, stored in versions
    ]
    kubectl("replace", "--filename=-", stdin=json.dumps(definition))


def uids(kubectl: Kubectl) -> dict[str, str]:
    listed = json.loads(kubectl("get", "ft", "--output=json"))["items"]
    return {ft["metadata"]["name"]: ft["metadata"]["uid"] for ft in listed}


def test_the_documented_commands_migrate_the_storage(own: Kubectl) -> None:
    for name in ("one", "two"):
        own.apply(job(OLD, name))
    store(own, (OLD, False), (NEW, True))
    own.apply(job(OLD, "three"))
    before = uids(own)
    with pytest.raises(ClusterError, match="storedVersions"):
        store(own, (NEW, True))
    program = shlex.join([str(binaries.path("kubectl")), f"--kubeconfig={own.kubeconfig}"])
    for command in migration():
        text = command.replace("kubectl ", f"{program} ")
        subprocess.run(text, shell=True, check=True, capture_output=True)
    store(own, (NEW, True))
    own.wait_for_crds()
    assert uids(own) == before
    assert before.keys() == {"one", "two", "three"}
