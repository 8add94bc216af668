"""Specs and the API server: bad ones are refused with the path, good ones and their objects accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.kubectl import Manifest
from tests.api_server import pod_groups
from tests.api_server.client import ApiServer, Kubectl, Response, make_job
from tests.contract.bad_specs import BAD_SPECS, GOOD, ONLY_HERE, ONLY_THERE, Bad, changed, check
from tests.contract.updates import ALLOWED, FORBIDDEN, LIVING
from tests.operator.resources.variants import VARIANTS, Variant
from tests.paths import ROOT

from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.settings import parse_network_rules, parse_pod_defaults
from fluxtrain_operator.generate.crd import resource_schema
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import desired

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
"""Objects that some jobs refer to and that admission requires."""


def namespace_of(level: str) -> list[Manifest]:
    """Return a namespace that accepts only pods of ``level``, and the service accounts of pods."""
    name = f"specs-{level}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    accounts = [{"name": account, "namespace": name} for account in ("default", "site")]
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
        *({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": a} for a in accounts),
    ]


@pytest.fixture(scope="module")
def server(kubectl: Kubectl) -> ApiServer:
    """Return the API server with a namespace for each level of Pod Security."""
    for manifest in (*NEEDED, *chain(*map(namespace_of, LEVELS))):
        response = kubectl.server.apply(path_of(manifest), manifest, dry_run=False)
        assert response.accepted, response.message
    kubectl.wait_for_crds()
    return kubectl.server


def collection(manifest: Manifest) -> str:
    group, metadata, kind = manifest["apiVersion"], manifest["metadata"], manifest["kind"]
    root = f"/apis/{group}" if "/" in group else f"/api/{group}"
    within = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    plural = PLURALS.get(kind, f"{kind.lower()}{'es' if kind.endswith('s') else 's'}")
    return f"{root}{within}/{plural}"


def path_of(manifest: Manifest) -> str:
    return f"{collection(manifest)}/{manifest['metadata']['name']}"


def paths_of(response: Response) -> list[str]:
    """Return the field paths of a refusal; an unknown field has no cause."""
    return response.fields or re.findall(r'unknown field "([^"]+)"', response.message)


def title(row: tuple[Any, ...]) -> str:
    return f"{row[0]} = {row[1]!r}"[:80]


@pytest.mark.parametrize("row", BAD_SPECS, ids=title)
def test_the_api_server_refuses_a_bad_job_with_the_path_and_what_is_allowed(
    server: ApiServer, row: Bad
) -> None:
    response = server.create(JOBS, changed(GOOD, row.path, row.value))
    assert response.code in (400, 422), response.message
    assert row.named in paths_of(response), response.message
    assert row.says in response.message


@pytest.fixture(scope="module")
def living(server: ApiServer) -> Iterator[Manifest]:
    """Return an existing job as stored by the API server."""
    response = server.create(JOBS, LIVING, dry_run=False)
    assert response.accepted, response.message
    yield response.body
    server.delete(f"{JOBS}/living")


@pytest.mark.parametrize("row", FORBIDDEN, ids=title)
def test_a_change_of_an_immutable_field_is_refused_with_the_path(
    server: ApiServer, living: Manifest, row: tuple[str, Any]
) -> None:
    path, value = row
    response = server.replace(f"{JOBS}/living", changed(living, path, value))
    assert response.code == 422, response.message
    assert path in paths_of(response), response.message
    assert "stays as it was created; another value is another job" in response.message


@pytest.mark.parametrize("row", ALLOWED, ids=title)
def test_any_other_change_is_accepted(
    server: ApiServer, living: Manifest, row: tuple[str, Any]
) -> None:
    response = server.replace(f"{JOBS}/living", changed(living, *row))
    assert response.accepted, response.message


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        (0, "greater than or equal to 1"),
        (1, "min must be at most max"),
        (4097, "less than or equal"),
    ],
)
def test_a_job_is_scaled_within_its_limits_only(
    server: ApiServer, living: Manifest, replicas: int, says: str
) -> None:
    scale = server.get(f"{JOBS}/living/scale").body
    response = server.replace(f"{JOBS}/living/scale", changed(scale, "spec.replicas", replicas))
    assert response.code == 422
    assert says in response.message


def test_the_minimum_of_a_job_that_names_no_nodes_can_be_raised(server: ApiServer) -> None:
    job = make_job("plain", {}, namespace=NAMESPACE)
    assert server.create(JOBS, job, dry_run=False).body["spec"]["nodes"] == {"min": 1}
    raised = server.merge(f"{JOBS}/plain", {"spec": {"nodes": {"min": 2}}})
    assert raised.accepted, raised.message


def test_a_job_with_a_minimum_of_nodes_only_can_be_scaled(
    server: ApiServer, kubectl: Kubectl
) -> None:
    """Its scale can be written, but not read before: no default of a schema is another field's value."""
    job, within = f"{JOBS}/fixed", f"--namespace={NAMESPACE}"
    response = server.create(
        JOBS, make_job("fixed", {"nodes": {"min": 4}}, namespace=NAMESPACE), dry_run=False
    )
    assert response.accepted, response.message
    assert response.body["spec"]["nodes"] == {"min": 4}
    read = server.get(f"{job}/scale")
    assert (read.accepted, "nodes.max" in read.message) == (False, True), read.message
    kubectl("scale", "ft", "fixed", within, "--replicas=8")
    assert server.get(job).body["spec"]["nodes"] == {"min": 4, "max": 8}
    assert server.get(f"{job}/scale").body["spec"]["replicas"] == 8
    refused = server.merge(f"{job}/scale", {"spec": {"replicas": 3}})
    assert "min must be at most max" in refused.message


@pytest.mark.parametrize("row", ONLY_HERE, ids=title)
def test_specs_that_only_the_contract_can_refuse_are_listed(
    server: ApiServer, row: tuple[str, Any, str]
) -> None:
    response = server.create(JOBS, changed(GOOD, row[0], row[1]))
    assert response.accepted, (
        f"refused after all, so the row belongs to BAD_SPECS: {response.message}"
    )


@pytest.mark.parametrize("row", ONLY_THERE, ids=title)
def test_specs_that_are_bad_on_a_cluster_only_are_refused_there(
    server: ApiServer, row: tuple[str, Any, str]
) -> None:
    response = server.create(JOBS, changed(GOOD, row[0], row[1]))
    assert response.code == 422
    assert row[0] in paths_of(response)


CONTEXT_DEPENDENT = {
    *(f"spec.run.data.buckets.{name}" for name in ("step", "min_side", "max_side")),
    "spec.run.model.hidden_size",
    "spec.run.model.num_heads",
    "spec.run.schedule.min_learning_rate",
    "spec.run.logging.metrics_port",
    *(f"spec.run.adapter.{name}" for name in ("double_blocks", "single_blocks")),
}
"""Fields whose rules depend on the preset or on a cluster, see ONLY_HERE and ONLY_THERE."""


OTHERS = {
    "spec.run.adapter": ("spec.run.initial_weights", "weights"),
    "spec.run.adapter.lokr": ("spec.run.adapter.kind", "lokr"),
    "spec.run.data.images": ("spec.run.data.source", "encoded"),
    "spec.run.optim.prodigy": ("spec.run.optim.name", "prodigy"),
    "spec.run.schedule.cycles": ("spec.run.schedule.decay", "cosine_with_restarts"),
    "spec.run.schedule.power": ("spec.run.schedule.decay", "polynomial"),
}
"""Fields without which those that begin so are refused; the API server does not know the preset's."""


def with_others(job: Manifest, path: str) -> Manifest:
    """Return ``job`` with the fields that ``path`` needs."""
    for start, (field, value) in OTHERS.items():
        job = changed(job, field, value) if path.startswith(start) else job
    return job


def test_contract_and_api_server_agree_at_the_limits_of_every_field(server: ApiServer) -> None:
    num_checked = 0
    for path, schema in fields(resource_schema()["properties"]["spec"], "spec"):
        for value in edges(schema) if path not in CONTEXT_DEPENDENT else ():
            job = changed(with_others(GOOD, path), path, value)
            try:
                check(job)
                error_text = ""
            except ConfigError as error:
                error_text = str(error)
            response = server.create(JOBS, job)
            assert response.accepted == (not error_text), (
                f"{path} = {value!r}: {response.message} | {error_text}"
            )
            num_checked += 1
    assert num_checked > 400


def fields(schema: Manifest, path: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the schema of every field that is not in a list."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")


def edges(schema: Manifest) -> list[Any]:
    """Return the minimum and maximum of ``schema``, values beyond, and a value of another type."""
    below, above = schema.get("minimum"), schema.get("maximum")
    kind = schema.get("type", "an integer or a word")
    values: list[Any] = [[] if kind == "object" else {}]
    values += [below, below - 1] if below is not None else []
    values += [above, above + 1] if above is not None else []
    if kind == "string" and "enum" not in schema:
        values += ["", "a", "a" * (schema["maxLength"] + 1)]
    if kind == "an integer or a word":
        word = schema["pattern"].strip("^$")
        values += [word, "", f"{word}s", str(below), 1.5, True, []]
    return values


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_the_api_server_accepts_the_examples(server: ApiServer, path: Path) -> None:
    response = server.create(JOBS, yaml.safe_load(path.read_text()))
    assert response.accepted, response.message


@pytest.mark.parametrize("name", VARIANTS)
def test_a_good_job_and_all_its_objects_are_accepted(server: ApiServer, name: str) -> None:
    variant = VARIANTS[name]
    response = server.create(JOBS, variant.manifest())
    assert response.accepted, response.message
    for manifest in objects(variant, response.body, variant.level):
        response = submit(server, manifest)
        assert response.accepted, f"{manifest['kind']}: {response.message}"


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.level != "restricted"])
def test_privileged_pods_are_refused_in_restricted_namespaces(server: ApiServer, name: str) -> None:
    variant = VARIANTS[name]
    stricter = LEVELS[: LEVELS.index(variant.level)]
    for level in stricter:
        pods = [m for m in objects(variant, variant.manifest(), level) if m["kind"] == "Pod"]
        responses = [submit(server, pod) for pod in pods]
        assert 403 in {response.code for response in responses}
        messages = " ".join(response.message for response in responses)
        assert f'violates PodSecurity "{level}:latest"' in messages
        assert variant.refused_for in messages


def objects(variant: Variant, manifest: Manifest, level: str) -> list[Manifest]:
    """Return the operator's objects for ``manifest``, in the namespace of ``level``."""
    metadata = {**manifest["metadata"], "namespace": f"specs-{level}", "uid": "0000-uid"}
    defaults = parse_pod_defaults(json.dumps(variant.pod_defaults))
    network = parse_network_rules(json.dumps(variant.network))
    image = "localhost/fluxtrain/trainer:dev"
    changed = {**manifest, "metadata": metadata}
    job = load(changed, image, variant.rendezvous_image, defaults, network_rules=network)
    return desired(job)


def submit(server: ApiServer, manifest: Manifest) -> Response:
    """Submit ``manifest`` as the operator does: pods are created, everything else is applied."""
    if manifest["kind"] == "Pod":
        return server.create(collection(manifest), manifest)
    return server.apply(path_of(manifest), manifest)
