"""The CustomResourceDefinition, from the models of the contract, and the policy for jobs, from its limits.

The API server checks the policy by a ValidatingAdmissionPolicy and its binding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from fluxtrain.contract.model_base import (
    GROUP,
    Rule,
    StrictModel,
    allowed,
    is_list,
    iter_fields,
    key_schema,
    model_of,
    value_schema,
)
from fluxtrain.contract.resource.fluxtraining import (
    KIND,
    PLURAL,
    SHORT_NAME,
    SINGULAR,
    VERSION,
    VERSIONS,
    FluxTraining,
    Spec,
)
from fluxtrain.contract.resource.status import NOT_OBSERVED
from fluxtrain.contract.run import closed_division
from fluxtrain.contract.run.config import RunConfig
from fluxtrain_operator.base.limits import LISTED, NO_TEMPLATE, RESTRICTED, Limit, limits_of
from fluxtrain_operator.base.settings import DEFAULT_POLICY, JobPolicy

Manifest = dict[str, Any]

_READY = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS = (
    ("Ready", "string", f"{_READY}.status", "Whether it trains, is complete or is suspended."),
    ("Phase", "string", ".status.phase", "One word for where the job is."),
    ("Nodes", "integer", ".status.nodes.ready", "Nodes that train."),
    ("Step", "integer", ".status.progress.step", "Optimizer steps done."),
    ("ETA", "string", ".status.eta", "Estimated time to the last step."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
)
_WIDE_COLUMNS = (
    ("Reason", "string", f"{_READY}.reason", "Why it is ready, or is not."),
    ("Loss", "number", ".status.progress.trainLoss", "Training loss."),
    ("Eval", "number", ".status.progress.evalLoss", "Evaluation loss."),
    ("Samples/s", "number", ".status.progress.samplesPerSecond", "Throughput."),
    ("Restarts", "integer", ".status.restarts.charged", "Restarts after errors of the program."),
    ("Faults", "integer", ".status.restarts.free", "Interruptions by the infrastructure."),
)
"""Shown by ``kubectl get --output=wide`` only."""


def custom_resource_definition() -> Manifest:
    """Return the CRD as the object that ``kubectl apply --server-side`` takes."""
    content = _content_of_versions()  # YAML has it once, and an alias
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["fluxtrain"],
            },
            "versions": [
                {"name": name, "served": True, "storage": name == VERSION, **content}
                for name in VERSIONS
            ],
            "conversion": {"strategy": "None"},
        },
    }


def _content_of_versions() -> Manifest:
    """Return what all versions have in common: conversion changes the apiVersion only."""
    return {
        "schema": {"openAPIV3Schema": resource_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.nodes.max",
                "statusReplicasPath": ".status.nodes.ready",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {
                "name": name,
                "type": kind,
                "jsonPath": path,
                "description": text,
                "priority": priority,
            }
            for priority, columns in enumerate((_COLUMNS, _WIDE_COLUMNS))
            for name, kind, path, text in columns
        ],
    }


def resource_schema() -> Schema:
    """Return the schema of the whole resource, with its validation rules.

    Fields of ``spec.run`` have no defaults: those of the API server would override the preset's values.
    """
    schema = structural(FluxTraining, defaults=True)
    properties = schema["properties"]
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string"}
    name = properties["metadata"]["properties"]["name"]
    properties["metadata"] = {"type": "object", "properties": {"name": name}}
    schema["required"] = ["spec"]
    spec = properties["spec"]
    text = spec["properties"]["run"].get("description", "")
    run = {**structural(RunConfig, defaults=False), "description": text}
    spec["properties"]["run"] = run
    for path, validations in rules().items():
        _at(schema, path).setdefault("x-kubernetes-validations", []).extend(validations)
    properties["status"]["default"] = {"observedGeneration": NOT_OBSERVED}
    conditions = properties["status"]["properties"]["conditions"]
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return schema


def _at(schema: Schema, path: str) -> Schema:
    for part in path.split(".") if path else ():
        schema = schema["items"] if part == "items" else schema["properties"][part]
    return schema


# The CEL validation rules of the resource: rules between fields, and immutable fields.
#
# They are generated from the sections' ``rules`` and ``IMMUTABLE`` fields, so that ``fluxtrain
# run`` and the API server reject the same values with the same messages.


Validation = dict[str, str]
"""One entry of ``x-kubernetes-validations``."""
Rules = dict[str, list[Validation]]
"""Validations by the path of their schema within the resource."""


def rules() -> Rules:
    result = between_fields()
    for path, validations in of_updates().items():
        result.setdefault(path, []).extend(validations)
    result["spec.run"] += _closed_division()
    return result


def between_fields() -> Rules:
    """Return the rules between the fields of a job, without MLPerf's."""
    result = {
        path: [_validation(rule) for rule in section.rules]
        for path, section in (*_sections(FluxTraining), *_sections(RunConfig, "spec.run"))
        if section.rules
    }
    result["spec.run"].append(_METRICS_PORT)
    return result


def of_updates() -> Rules:
    """Return the transition rules, which compare a job with its previous version."""
    return {"spec": [*_transitions(Spec)], "spec.run": [*_transitions(RunConfig)]}


def _sections(model: type[StrictModel], path: str = "") -> Iterator[tuple[str, type[StrictModel]]]:
    """Yield ``model`` and all nested sections with the paths of their schemas."""
    yield path, model
    for name, field in model.model_fields.items():
        below = model_of(field.annotation)
        if below is not None:
            items = ".items" if is_list(field.annotation) else ""
            yield from _sections(below, f"{path}.{field.alias or name}{items}".strip("."))


def _validation(rule: Rule) -> Validation:
    guards = [_has(path) for path in (rule.field, *rule.others) if path]
    checked = f"!({' && '.join(guards)}) || {rule.cel}" if guards else rule.cel
    message = f"{rule.field} {rule.message}".strip()
    return _validation_of(checked, message, rule.field)


def _validation_of(rule: str, message: str, field: str) -> Validation:
    """Return the validation of ``field``; of the whole section if it is empty."""
    return {"rule": rule, "message": message, **({"fieldPath": f".{field}"} if field else {})}


def _has(path: str, root: str = "self") -> str:
    """Return the CEL expression that tests that every part of ``path`` is set."""
    parts = path.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[: n + 1])})" for n in range(len(parts)))


def _transitions(model: type[StrictModel]) -> Iterator[Validation]:
    """Yield a rule per immutable field.

    Rules of whole sections or optional text would exceed the API server's cost limit.
    """
    for facts in iter_fields(model):
        if facts.immutable:
            now, before = _has(facts.path), _has(facts.path, "oldSelf")
            equal = f"self.{facts.path} == oldSelf.{facts.path}"
            yield _validation_of(
                f"({now} && {before}) ? {equal} : ({now}) == ({before})",
                f"{facts.path} stays as it was created; another value is another job",
                facts.path,
            )


def _closed_division() -> Iterator[Validation]:
    """Yield a rule per field that MLPerf's closed division fixes."""
    closed = " && ".join(
        (
            f"self.preset.startsWith('{closed_division.PREFIX}')",
            _is_or_unset("task", "train"),
            _is_or_unset("logging.mlperf.division", "closed"),
        )
    )
    for path, each_allowed in closed_division.FIXED_VALUES.items():
        equal = "" if each_allowed is None else f" || self.{path} == {json.dumps(each_allowed)}"
        message = f"{path}: {closed_division.refusal(path)}"
        yield _validation_of(f"!({closed}) || !({_has(path)}){equal}", message, path)
    for path, value in closed_division.FORBIDDEN_VALUES.items():
        message = f"{path}: {closed_division.refusal(path)}"
        rule = f"!({closed}) || !({_has(path)}) || self.{path} != {json.dumps(value)}"
        yield _validation_of(rule, message, path)
    given = " && ".join(map(_has, closed_division.FIELDS))
    sizes, size = list(closed_division.REFERENCE_SCHEDULES), closed_division.SIZE
    yield _validation_of(
        f"!({closed}) || !({_has(size)}) || self.{size} in {sizes} || ({given})",
        f"{size}: {closed_division.MESSAGE}",
        size,
    )
    division = "logging.mlperf.division"
    yield _validation_of(
        f"!({_has(division)}) || self.{division} != 'closed' || "
        f"self.preset.startsWith('{closed_division.PREFIX}')",
        f"{division}: {closed_division.ONLY_OF_PRESETS}",
        division,
    )


def _is_or_unset(path: str, value: str) -> str:
    return f"(!({_has(path)}) || self.{path} == '{value}')"


_METRICS_PORT = _validation_of(
    f"!({_has('logging.metrics_port')}) || self.logging.metrics_port != 0",
    "logging.metrics_port must not be 0 on a cluster: the operator reads the progress there",
    "logging.metrics_port",
)


Schema = dict[str, Any]

_KEPT = (
    "type", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems",
    "multipleOf", "description",
)  # fmt: skip
_ANY_OBJECT = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def structural(model: type[BaseModel], defaults: bool) -> Schema:
    """Return the structural schema of ``model``, with references resolved.

    Without ``defaults`` all fields are optional, and their descriptions name the model's defaults.
    """
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.get("$defs", {}), defaults)


def _convert(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    schema = _resolved(schema, definitions)
    if "anyOf" in schema:
        return _alternatives(schema, definitions, defaults)
    result = {key: schema[key] for key in _KEPT if key in schema}
    if "x-kubernetes-int-or-string" in schema:
        del result["type"]
        result["x-kubernetes-int-or-string"] = True
    if "const" in schema:
        result["enum"] = [schema["const"]]
    _bounds(schema, result)
    if "prefixItems" in schema or "items" in schema:
        items = schema["prefixItems"][0] if "prefixItems" in schema else schema["items"]
        result["items"] = _convert(items, definitions, defaults)
    if schema.get("type") == "object":
        result |= _object(schema, definitions, defaults)
    if defaults and schema.get("default") is not None:
        # the API server fills in those of a section's fields; it would also store nulls, and nodes.max
        result["default"] = {} if schema.get("type") == "object" else schema["default"]
    elif not defaults and "default" in schema and schema.get("type") != "object":
        result["description"] = (
            f"{result.get('description', '')} Default: {_as_text(schema['default'])}.".strip()
        )
    return result


def _resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return {**definitions[reference.rpartition("/")[2]], **rest}


def _alternatives(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    """Return the schema of ``X | None``, or of an integer or a word."""
    one, *others = [option for option in schema["anyOf"] if option.get("type") != "null"]
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    if others:
        (word,) = others
        bounds = {key: one[key] for key in ("minimum", "maximum")}
        pattern = f"^{word['const']}$"
        field = _convert({**bounds, "pattern": pattern, **rest}, definitions, defaults)
        return {**field, "x-kubernetes-int-or-string": True}
    if rest.get("default") is None:
        rest.pop("default", None)
    return {
        **_convert({**_resolved(one, definitions), **rest}, definitions, defaults),
        "nullable": True,
    }


def _bounds(schema: Schema, result: Schema) -> None:
    for bound, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in schema:  # a flag in OpenAPI 3.0
            result[inclusive], result[bound] = schema[bound], True
    if schema.get("type") == "integer":
        result["format"] = "int64"


def _object(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    if "properties" not in schema:
        return _mapping(schema, definitions, defaults)
    result: Schema = {
        "properties": {
            name: _convert(below, definitions, defaults)
            for name, below in schema["properties"].items()
        }
    }
    if schema.get("additionalProperties"):
        result |= _ANY_OBJECT
    if schema.get("required"):
        result["required"] = schema["required"]
    return result


def _mapping(schema: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    values = value_schema(schema)
    if values is None:
        return _ANY_OBJECT
    result: Schema = {"additionalProperties": _convert(values, definitions, defaults)}
    if "maxProperties" in schema:
        result["maxProperties"] = schema["maxProperties"]
    keys = key_schema(schema)
    if "pattern" in keys:  # OpenAPI cannot constrain keys
        rule = (
            f"self.all(key, key.size() <= {keys['maxLength']} && key.matches('{keys['pattern']}'))"
        )
        result["x-kubernetes-validations"] = [
            {"rule": rule, "message": f"every key must be {allowed(keys)}"}
        ]
    return result


def _as_text(value: object) -> str:
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


_POLICY = "fluxtrain-operator-fluxtrain-system-limits"
"""Name of the objects in ``manifests/``, as the chart calls them."""
_LIMITED = ("credentials", "image", "network", "podTemplate", "scheduling", "storage")
"""Sections of the spec that have limits: a change of others is no concern of the policy."""
_CHANGED = "request.operation == 'CREATE' || " + " || ".join(
    f"object.spec.?{name} != oldObject.spec.?{name}" for name in _LIMITED
)


def _validations(limits: tuple[Limit, ...]) -> list[Manifest]:
    return [
        {"expression": limit.expression, "message": f"{limit.at}: {limit.allowed}"}
        for limit in limits
    ]


def chart_limits() -> Manifest:
    """Return what the chart's template of the policy reads: all that no value of the chart changes."""
    return {
        "changed": _CHANGED,
        "none": _validations(NO_TEMPLATE),
        "restricted": _validations(RESTRICTED),
        "any": [],
        "listed": _validations(LISTED),
    }


def admission_policy(policy: JobPolicy = DEFAULT_POLICY) -> list[Manifest]:
    """Return the objects that let the API server refuse what ``policy`` does not permit."""
    rule = {
        "apiGroups": [GROUP],
        "apiVersions": ["*"],
        "operations": ["CREATE", "UPDATE"],
        "resources": [PLURAL],
        "scope": "*",
    }
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "matchPolicy": "Equivalent",
            "namespaceSelector": {},
            "objectSelector": {},
            "resourceRules": [rule],
        },
        "matchConditions": [{"name": "changed", "expression": _CHANGED}],
        "variables": _variables(policy),
        "validations": _validations(limits_of(policy)),
    }
    return [
        _policy_object("ValidatingAdmissionPolicy", spec),
        _policy_object(
            "ValidatingAdmissionPolicyBinding",
            {"policyName": _POLICY, "validationActions": ["Deny"]},
        ),
    ]


def _variables(policy: JobPolicy) -> list[Manifest]:
    values = policy.model_dump(mode="json", by_alias=True, exclude={"pod_template"})
    return [
        {"name": name, "expression": json.dumps(values[name], separators=(",", ":"))}
        for name in sorted(values)
    ]


def _policy_object(kind: str, spec: Manifest) -> Manifest:
    version = "admissionregistration.k8s.io/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": _POLICY}, "spec": spec}
