"""The API server as the judge of specs: bad ones refused with the path, good ones and their objects taken."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster.kubectl import Kubectl
from tests.contract.bad_specs import BAD_SPECS, GOOD, ONLY_HERE, ONLY_THERE, Bad, changed, check
from tests.contract.updates import ALLOWED, FORBIDDEN, LIVING
from tests.end_to_end import pod_groups
from tests.end_to_end.api_server import Answer, ApiServer, Manifest
from tests.end_to_end.stage import ROOT, wait_for
from tests.operator.resources.variants import VARIANTS, Variant

from fluxtrain.errors import ConfigError
from fluxtrain_operator.generate.crd import resource_schema
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import desired

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the cluster's nodes"),
    pytest.mark.timeout(1500),  # the first start builds Kubernetes
]

LEVELS = ("restricted", "baseline", "privileged")
NAMESPACE = "specs-restricted"
JOBS = f"/apis/fluxtrain.dev/v1alpha1/namespaces/{NAMESPACE}/fluxtrainings"
PLURALS = {"NetworkPolicy": "networkpolicies"}
NEEDED: list[Manifest] = [
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "high"},
        "value": 1000,
    },
    {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "site"},
        "handler": "runc",
    },
    *pod_groups.DEFINITIONS,
]
"""What the objects of some jobs refer to, and admission looks for."""


def namespace_of(level: str) -> list[Manifest]:
    """Return the namespace that takes only pods of ``level``, and the accounts that pods name."""
    name = f"specs-{level}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    accounts = [{"name": account, "namespace": name} for account in ("default", "site")]
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
        *({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": a} for a in accounts),
    ]


NAMESPACES = [namespace_of(level) for level in LEVELS]


@pytest.fixture(scope="module")
def server(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Return the API server with a namespace for each level of Pod Security."""
    found = ApiServer(kubectl.kubeconfig, tmp_path_factory.mktemp("client"))
    wait_for(lambda: make(found, NEEDED), "what jobs refer to")
    kubectl("wait", "--for=condition=Established", *map(crd_name, pod_groups.DEFINITIONS))
    for namespace in NAMESPACES:  # one of an earlier run may still be on its way out
        wait_for(lambda made=namespace: make(found, made), "a namespace with its accounts")
    yield found
    for manifest in (*NEEDED, *(namespace[0] for namespace in NAMESPACES)):
        found.delete(path_of(manifest))
    found.close()


def make(server: ApiServer, manifests: list[Manifest]) -> bool:
    """Apply ``manifests``; return whether all of them were taken."""
    return all(server.apply(path_of(m), m, dry_run=False).accepted for m in manifests)


def crd_name(manifest: Manifest) -> str:
    return f"crd/{manifest['metadata']['name']}"


def collection(manifest: Manifest) -> str:
    """Return the path of the collection that ``manifest`` belongs to."""
    group, metadata, kind = manifest["apiVersion"], manifest["metadata"], manifest["kind"]
    root = f"/apis/{group}" if "/" in group else f"/api/{group}"
    within = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    plural = PLURALS.get(kind, f"{kind.lower()}{'es' if kind.endswith('s') else 's'}")
    return f"{root}{within}/{plural}"


def path_of(manifest: Manifest) -> str:
    return f"{collection(manifest)}/{manifest['metadata']['name']}"


def named(answer: Answer) -> list[str]:
    """Return the paths that a refusal names; a misspelt field has no cause of its own."""
    return answer.fields or re.findall(r'unknown field "([^"]+)"', answer.message)


def title(row: tuple[Any, ...]) -> str:
    return f"{row[0]} = {row[1]!r}"[:80]


@pytest.mark.parametrize("row", BAD_SPECS, ids=title)
def test_the_api_server_refuses_a_bad_job_with_the_path_and_what_is_allowed(
    server: ApiServer, row: Bad
) -> None:
    answer = server.create(JOBS, changed(GOOD, row.path, row.value))
    assert answer.code in (400, 422), answer.message
    assert row.named in named(answer), answer.message
    assert row.says in answer.message


@pytest.fixture(scope="module")
def living(server: ApiServer) -> Iterator[Manifest]:
    """Return a job that is there, as the API server keeps it."""
    answer = server.create(JOBS, LIVING, dry_run=False)
    assert answer.accepted, answer.message
    yield answer.body
    server.delete(f"{JOBS}/living")


@pytest.mark.parametrize("row", FORBIDDEN, ids=title)
def test_a_change_that_would_make_another_job_is_refused_with_the_path(
    server: ApiServer, living: Manifest, row: tuple[str, Any]
) -> None:
    path, value = row
    answer = server.replace(f"{JOBS}/living", changed(living, path, value))
    assert answer.code == 422, answer.message
    assert path in named(answer), answer.message
    assert "stays as it was created; another value is another job" in answer.message


@pytest.mark.parametrize("row", ALLOWED, ids=title)
def test_any_other_change_is_taken(
    server: ApiServer, living: Manifest, row: tuple[str, Any]
) -> None:
    answer = server.replace(f"{JOBS}/living", changed(living, *row))
    assert answer.accepted, answer.message


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        (0, "greater than or equal to 1"),
        (1, "min must be at most max"),
        (4097, "less than or equal"),
    ],
)
def test_a_job_is_not_scaled_below_its_minimum_nor_without_end(
    server: ApiServer, living: Manifest, replicas: int, says: str
) -> None:
    scale = server.get(f"{JOBS}/living/scale").body
    answer = server.replace(f"{JOBS}/living/scale", changed(scale, "spec.replicas", replicas))
    assert answer.code == 422
    assert says in answer.message


@pytest.mark.parametrize("row", ONLY_HERE, ids=title)
def test_what_only_the_contract_can_refuse_is_known(
    server: ApiServer, row: tuple[str, Any, str]
) -> None:
    answer = server.create(JOBS, changed(GOOD, row[0], row[1]))
    assert answer.accepted, f"refused after all, so the row belongs to BAD_SPECS: {answer.message}"


@pytest.mark.parametrize("row", ONLY_THERE, ids=title)
def test_what_means_something_on_a_cluster_alone_is_refused_there(
    server: ApiServer, row: tuple[str, Any, str]
) -> None:
    answer = server.create(JOBS, changed(GOOD, row[0], row[1]))
    assert answer.code == 422
    assert row[0] in named(answer)


BESIDE_OTHERS = {
    "spec.run.model.hidden_size",
    "spec.run.model.num_heads",
    "spec.run.schedule.min_learning_rate",
    "spec.run.logging.metrics_port",
}
"""Fields whose rules ONLY_HERE and ONLY_THERE have: good or bad beside the preset, or on a cluster."""


def test_at_the_edges_of_every_field_both_judges_say_the_same(server: ApiServer) -> None:
    asked = 0
    for path, schema in fields(resource_schema()["properties"]["spec"], "spec"):
        for value in edges(schema) if path not in BESIDE_OTHERS else ():
            job = changed(GOOD, path, value)
            try:
                check(job)
                said = ""
            except ConfigError as error:
                said = str(error)
            answer = server.create(JOBS, job)
            assert answer.accepted == (not said), f"{path} = {value!r}: {answer.message} | {said}"
            asked += 1
    assert asked > 400


def fields(schema: Manifest, path: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the schema of every field that is not in a list."""
    for name, below in schema.get("properties", {}).items():
        yield f"{path}.{name}", below
        yield from fields(below, f"{path}.{name}")


def edges(schema: Manifest) -> list[Any]:
    """Return the least and the most that ``schema`` admits, what lies beyond, and another type."""
    below, above = schema.get("minimum"), schema.get("maximum")
    found = [[] if schema["type"] == "object" else {}]
    found += [below, below - 1] if below is not None else []
    found += [above, above + 1] if above is not None else []
    if schema["type"] == "string" and "enum" not in schema:
        found += ["", "a", "a" * (schema["maxLength"] + 1)]
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_the_api_server_accepts_the_examples(server: ApiServer, path: Path) -> None:
    answer = server.create(JOBS, yaml.safe_load(path.read_text()))
    assert answer.accepted, answer.message


@pytest.mark.parametrize("name", VARIANTS)
def test_a_good_job_is_taken_and_so_is_everything_that_it_makes(
    server: ApiServer, name: str
) -> None:
    variant = VARIANTS[name]
    answer = server.create(JOBS, variant.manifest())
    assert answer.accepted, answer.message
    for manifest in objects(variant, answer.body, variant.level):
        answer = offer(server, manifest)
        assert answer.accepted, f"{manifest['kind']}: {answer.message}"


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.level != "restricted"])
def test_pods_that_need_more_rights_are_refused_where_they_may_not_have_them(
    server: ApiServer, name: str
) -> None:
    variant = VARIANTS[name]
    stricter = LEVELS[: LEVELS.index(variant.level)]
    for level in stricter:
        pods = [m for m in objects(variant, variant.manifest(), level) if m["kind"] == "Pod"]
        answers = [offer(server, pod) for pod in pods]
        assert 403 in {answer.code for answer in answers}
        said = " ".join(answer.message for answer in answers)
        assert f'violates PodSecurity "{level}:latest"' in said
        assert variant.refused_for in said


def objects(variant: Variant, manifest: Manifest, level: str) -> list[Manifest]:
    """Return what the operator makes of ``manifest``, as its goldens have it, in another namespace."""
    metadata = {**manifest["metadata"], "namespace": f"specs-{level}", "uid": "0000-uid"}
    job = load({**manifest, "metadata": metadata}, "localhost/fluxtrain/trainer:dev")
    return desired(job)


def offer(server: ApiServer, manifest: Manifest) -> Answer:
    """Ask for ``manifest`` as the operator does: pods are created, all else is applied."""
    if manifest["apiVersion"] == pod_groups.NATIVE:  # not served: its schema is asked instead
        kubernetes_validate.validate(manifest, "1.36", strict=True)
        return Answer(200, manifest)
    if manifest["kind"] == "Pod":
        return server.create(collection(manifest), manifest)
    return server.apply(path_of(manifest), manifest)
