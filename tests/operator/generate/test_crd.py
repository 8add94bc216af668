"""The CustomResourceDefinition: valid for Kubernetes, and as strict as the models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.contract.bad_specs import BAD_SPECS, GOOD, UNKNOWN, Bad, changed
from tests.paths import EXAMPLES

from fluxtrain.contract.run.closed_division import FIXED_VALUES, FORBIDDEN_VALUES
from fluxtrain.contract.run.config import IMMUTABLE_PATHS
from fluxtrain_operator.generate.crd import custom_resource_definition, resource_schema

CRD = custom_resource_definition()
SCHEMA = resource_schema()
RUN = SCHEMA["properties"]["spec"]["properties"]["run"]
VALIDATIONS, INT_OR_WORD = "x-kubernetes-validations", "x-kubernetes-int-or-string"
SCHEMA_PHRASES = re.compile(
    r"(greater|less) than|should match|unknown field|at (most|least) \d|must be of type|supported values"
    r"|Required value|may not be more|multiple of \d|RFC|must be FluxTraining|generateName|no more than",
    re.IGNORECASE,
)
"""What the API server says about a value that the schema refuses, not a rule."""
KIND = "must be FluxTraining"
LOWERCASE, PASCAL_CASE = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*"), re.compile(r"([A-Z][a-z0-9]+)+")


def int_or_string(
    _: Any, wanted: bool, value: object, schema: dict[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    """Yield an error if ``value`` is neither; the keyword is Kubernetes' own."""
    if wanted and (isinstance(value, bool) or not isinstance(value, int | str)):
        yield jsonschema.ValidationError("must be of type integer or string")


VALIDATOR = jsonschema.validators.extend(  # Draft 4 has the exclusive bounds of OpenAPI 3.0
    jsonschema.Draft4Validator, {"x-kubernetes-int-or-string": int_or_string}
)(SCHEMA)


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema below ``schema`` with its path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from walk(below, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from walk(schema[word], f"{path}.{word}")


MESSAGES = [rule["message"] for _, s in walk(SCHEMA) for rule in s.get(VALIDATIONS, [])]


def is_of_a_rule(row: Bad) -> bool:
    return any(row.says in message for message in MESSAGES)


def test_the_definition_is_valid_for_kubernetes() -> None:
    kubernetes_validate.validate(CRD, "1.34", strict=True)


def test_the_schema_is_structural() -> None:
    for path, schema in walk(SCHEMA):
        assert ("type" in schema) != (schema.get(INT_OR_WORD) is True), path
        forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "definitions", "const", "title"}
        assert not forbidden & set(schema), path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def follows_casing(path: str, value: str) -> bool:
    """Return whether a value has the casing of its place: what the trainer reads or writes is lowercase."""
    casing = LOWERCASE if path.startswith((".spec.run.", ".status.progress.")) else PASCAL_CASE
    return casing.fullmatch(value) is not None


def test_every_value_of_an_enum_has_the_casing_of_its_place() -> None:
    values = [(path, value) for path, schema in walk(SCHEMA) for value in schema.get("enum", [])]
    assert {".spec.network.mode", ".spec.run.optim.name"} <= {path for path, _ in values}
    assert [pair for pair in values if not follows_casing(*pair)] == []


@pytest.mark.parametrize(
    ("path", "value", "holds"),
    [
        (".spec.network.mode", "host", False),
        (".spec.network.mode", "hostNetwork", False),
        (".status.phase", "RUNNING_LATE", False),
        (".status.phases", "Running-Late", False),
        (".spec.runs", "adamw", False),
        (".spec.run.optim.name", "AdamW", False),
        (".status.progress.straggler.cause", "Data", False),
        (".spec.run.optim.name", "schedule_free_adamw", True),
        (".spec.scheduling.gang", "ResourceQuota2", True),
    ],
)
def test_a_value_of_another_casing_is_found(path: str, value: str, holds: bool) -> None:
    assert follows_casing(path, value) is holds


def test_every_field_has_a_description() -> None:
    for path, schema in walk(SCHEMA):
        if "properties" not in schema and "items" not in path and "additional" not in path:
            named = path.startswith((".spec.", ".status."))
            assert not named or schema.get("description"), path


def test_text_and_lists_are_bounded() -> None:
    bounds = {"string": ("maxLength", "enum"), "array": ("maxItems",)}
    for path, schema in walk(SCHEMA):
        keywords = bounds.get(schema.get("type", ""))
        if INT_OR_WORD in schema:
            keywords = ("pattern",)
        if keywords and path not in (".apiVersion", ".kind"):
            assert any(word in schema for word in keywords), path


def test_spec_run_has_no_defaults() -> None:
    assert all("default" not in schema for _, schema in walk(RUN))


def test_cluster_fields_have_defaults() -> None:
    spec = SCHEMA["properties"]["spec"]["properties"]
    assert spec["gpuResource"]["default"] == "amd.com/gpu"
    assert spec["nodes"]["default"] == {}, (
        "a maximum would be stored, and stay below a raised minimum"
    )
    assert spec["nodes"]["properties"]["min"]["default"] == 1
    assert "default" not in spec["nodes"]["properties"]["max"], "it follows min"


def test_subresources_columns_and_names() -> None:
    version, other = CRD["spec"]["versions"]
    assert (version["name"], version["storage"]) == ("v1alpha1", True)
    changed = {"name": "v1beta1", "storage": False}
    assert other == {**version, **changed}, "without conversion their schemas must be equal"
    assert CRD["spec"]["conversion"] == {"strategy": "None"}
    assert len(json.dumps(CRD)) < 1 << 20, "etcd accepts 1.5 MiB"
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.nodes.max"
    assert version["subresources"]["status"] == {}
    assert CRD["spec"]["names"]["shortNames"] == ["ft"]
    for column in version["additionalPrinterColumns"]:
        if column["type"] != "date":
            schema = SCHEMA
            path = column["jsonPath"].replace('[?(@.type=="Ready")]', ".items")
            for name in path.strip(".").split("."):
                schema = schema["items"] if name == "items" else schema["properties"][name]
            assert schema["type"] == column["type"]


def test_every_field_of_the_trajectory_is_immutable() -> None:
    guarded = {rule["fieldPath"] for rule in RUN[VALIDATIONS] if "oldSelf" in rule["rule"]}
    assert guarded == {f".{path}" for path in IMMUTABLE_PATHS}


def test_every_value_of_the_closed_division_is_guarded() -> None:
    closed = [rule for rule in RUN[VALIDATIONS] if "closed division" in rule["message"]]
    guarded = {*FIXED_VALUES, *FORBIDDEN_VALUES}
    assert {rule["fieldPath"] for rule in closed} == {f".{path}" for path in guarded}


def test_every_message_of_the_bad_specs_is_that_of_a_rule_or_of_the_schema() -> None:
    others = [row.says for row in BAD_SPECS if not is_of_a_rule(row)]
    assert [says for says in others if not SCHEMA_PHRASES.search(says)] == []


def test_every_rule_has_a_field_path_or_concerns_its_whole_section() -> None:
    for path, schema in walk(SCHEMA):
        for rule in schema.get(VALIDATIONS, []):
            field = schema
            for name in rule.get("fieldPath", "").strip(".").split("."):
                field = field["properties"][name] if name else field
            assert field is not schema or rule["message"].startswith(("exactly", "every")), path


def test_a_template_preserves_unknown_fields_of_a_pod() -> None:
    template = SCHEMA["properties"]["spec"]["properties"]["podTemplate"]
    assert "x-kubernetes-preserve-unknown-fields" not in template
    assert template["properties"]["spec"]["x-kubernetes-preserve-unknown-fields"]
    assert template["default"] == {}


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda p: p.name)
def test_the_schema_admits_the_examples(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


def test_the_schema_rejects_what_the_models_reject() -> None:
    rows = [row for row in BAD_SPECS if not is_of_a_rule(row) and row.says not in (UNKNOWN, KIND)]
    assert len(rows) > 150
    assert [row for row in rows if VALIDATOR.is_valid(changed(GOOD, row.path, row.value))] == []
