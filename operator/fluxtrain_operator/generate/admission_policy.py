"""The policy for jobs as the API server checks it: a ValidatingAdmissionPolicy and its binding."""

from __future__ import annotations

import json
from typing import Any

from fluxtrain.contract.model_base import GROUP
from fluxtrain.contract.resource.fluxtraining import PLURAL
from fluxtrain_operator.limits import LISTED, NO_TEMPLATE, RESTRICTED, Limit, limits_of
from fluxtrain_operator.settings import DEFAULT_POLICY, JobPolicy

Manifest = dict[str, Any]

NAME = "fluxtrain-operator-fluxtrain-system-limits"
"""Name of the objects in ``manifests/``, as the chart calls them."""
_LIMITED = ("credentials", "image", "network", "podTemplate", "scheduling", "storage")
"""Sections of the spec that have limits: a change of others is no concern of the policy."""
CHANGED = "request.operation == 'CREATE' || " + " || ".join(
    f"object.spec.?{name} != oldObject.spec.?{name}" for name in _LIMITED
)


def validations(limits: tuple[Limit, ...]) -> list[Manifest]:
    """Return the entries of ``spec.validations`` for ``limits``."""
    return [
        {"expression": limit.expression, "message": f"{limit.at}: {limit.allowed}"}
        for limit in limits
    ]


def chart_file() -> Manifest:
    """Return what the chart's template of the policy reads: all that no value of the chart changes."""
    return {
        "changed": CHANGED,
        "none": validations(NO_TEMPLATE),
        "restricted": validations(RESTRICTED),
        "any": [],
        "listed": validations(LISTED),
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
        "matchConditions": [{"name": "changed", "expression": CHANGED}],
        "variables": _variables(policy),
        "validations": validations(limits_of(policy)),
    }
    return [
        _object("ValidatingAdmissionPolicy", spec),
        _object(
            "ValidatingAdmissionPolicyBinding", {"policyName": NAME, "validationActions": ["Deny"]}
        ),
    ]


def _variables(policy: JobPolicy) -> list[Manifest]:
    values = policy.model_dump(mode="json", by_alias=True, exclude={"pod_template"})
    return [
        {"name": name, "expression": json.dumps(values[name], separators=(",", ":"))}
        for name in sorted(values)
    ]


def _object(kind: str, spec: Manifest) -> Manifest:
    version = "admissionregistration.k8s.io/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": NAME}, "spec": spec}
