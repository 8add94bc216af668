"""The CustomResourceDefinition: valid for Kubernetes, and as strict as the models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.paths import ROOT

from fluxtrain.contract.run.closed_division import FIXED_VALUES
from fluxtrain.contract.run.immutable_fields import IMMUTABLE_PATHS
from fluxtrain_operator.generate.crd import custom_resource_definition, resource_schema

CRD = custom_resource_definition()
SCHEMA = resource_schema()


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema below ``schema`` with its path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from walk(below, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from walk(schema[word], f"{path}.{word}")


def job(**run: Any) -> dict[str, Any]:
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {"name": "job"},
        "spec": {"run": {"preset": "micro", **run}},
    }


def validate(resource: dict[str, Any]) -> None:
    """Validate ``resource``; Draft 4 has the exclusive bounds of OpenAPI 3.0."""
    jsonschema.Draft4Validator(SCHEMA).validate(resource)


def test_the_definition_is_valid_for_kubernetes() -> None:
    kubernetes_validate.validate(CRD, "1.34", strict=True)


def test_the_schema_is_structural() -> None:
    for path, schema in walk(SCHEMA):
        assert "type" in schema, path
        forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "definitions", "const", "title"}
        assert not forbidden & set(schema), path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_every_field_has_a_description() -> None:
    for path, schema in walk(SCHEMA):
        if "properties" not in schema and "items" not in path and "additional" not in path:
            named = path.startswith((".spec.", ".status."))
            assert not named or schema.get("description"), path


def test_text_and_lists_are_bounded() -> None:
    bounds = {"string": ("maxLength", "enum"), "array": ("maxItems",)}
    for path, schema in walk(SCHEMA):
        keywords = bounds.get(schema["type"])
        if keywords and path not in (".apiVersion", ".kind"):
            assert any(word in schema for word in keywords), path


def test_spec_run_has_no_defaults() -> None:
    run = SCHEMA["properties"]["spec"]["properties"]["run"]
    assert all("default" not in schema for _, schema in walk(run))


def test_cluster_fields_have_defaults() -> None:
    spec = SCHEMA["properties"]["spec"]["properties"]
    assert spec["gpuResource"]["default"] == "amd.com/gpu"
    assert spec["nodes"]["properties"]["max"]["default"] == 1


def test_subresources_columns_and_names() -> None:
    version = CRD["spec"]["versions"][0]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.nodes.max"
    assert version["subresources"]["status"] == {}
    assert CRD["spec"]["names"]["shortNames"] == ["ft"]
    for column in version["additionalPrinterColumns"]:
        if column["type"] != "date":
            schema = SCHEMA
            for name in column["jsonPath"].strip(".").split("."):
                schema = schema["properties"][name]
            assert schema["type"] == column["type"]


def test_every_field_of_the_trajectory_is_immutable() -> None:
    rules = SCHEMA["properties"]["spec"]["properties"]["run"]["x-kubernetes-validations"]
    guarded = {rule["fieldPath"] for rule in rules if "oldSelf" in rule["rule"]}
    assert guarded == {f".{path}" for path in IMMUTABLE_PATHS}


def test_every_value_of_the_closed_division_is_guarded() -> None:
    rules = SCHEMA["properties"]["spec"]["properties"]["run"]["x-kubernetes-validations"]
    guarded = {rule["fieldPath"] for rule in rules if "closed division" in rule["message"]}
    assert guarded == {f".{path}" for path in FIXED_VALUES}


def test_every_rule_has_a_field_path_or_concerns_its_whole_section() -> None:
    for path, schema in walk(SCHEMA):
        for rule in schema.get("x-kubernetes-validations", []):
            field = schema
            for name in rule.get("fieldPath", "").strip(".").split("."):
                field = field["properties"][name] if name else field
            assert field is not schema or rule["message"].startswith(("exactly", "every")), path


def test_a_template_preserves_unknown_fields_of_a_pod() -> None:
    template = SCHEMA["properties"]["spec"]["properties"]["podTemplate"]
    assert "x-kubernetes-preserve-unknown-fields" not in template
    assert template["properties"]["spec"]["x-kubernetes-preserve-unknown-fields"]
    assert template["default"] == {}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_the_schema_admits_the_examples(path: Path) -> None:
    validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "run",
    [
        {"optim": {"learning_rate": "fast"}},
        {"optim": {"learning_rate": 0}},
        {"optim": {"beta1": 1.0}},
        {"schedule": {"steps": 0}},
        {"schedule": {"steps": 1.5}},
        {"seed": 2**60},
        {"task": "infer"},
        {"preset": "none"},
        {"model": {"in_channels": 6}},
        {"model": {"axes_dim": [4, 6]}},
        {"data": {"train": "a\nb"}},
        {"sampling": {"prompts": [1]}},
    ],
)
def test_the_schema_rejects_what_the_models_reject(run: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(job(**run))


def test_the_schema_rejects_a_job_without_a_run() -> None:
    with pytest.raises(jsonschema.ValidationError, match="run"):
        validate({**job(), "spec": {}})
