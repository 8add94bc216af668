"""CRDs of coscheduling's and Volcano's pod groups, with the fields that the operator uses; no scheduler.

Those of Volcano are of its API v1.14.0 (volcano.sh/apis, scheduling/v1beta1).
"""

from __future__ import annotations

from typing import Any

from cluster.kubectl import Manifest

_COUNT = {"type": "integer", "format": "int32", "minimum": 1}
_AMOUNTS = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
    },
}
_COSCHEDULING = {
    "minMember": _COUNT,
    "minResources": _AMOUNTS,
    "scheduleTimeoutSeconds": {"type": "integer", "format": "int32"},
}
_NUMBER = {"type": "integer", "format": "int32", "minimum": 0}
_VOLCANO = {
    "minMember": _NUMBER,
    "minTaskMember": {
        "type": "object",
        "additionalProperties": {"type": "integer", "format": "int32"},
    },
    "queue": {
        "type": "string",
        "default": "default",
        "maxLength": 253,
        "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    },
    "priorityClassName": {"type": "string", "maxLength": 253},
    "minResources": _AMOUNTS,
}
_TEXTS = ("type", "status", "transitionID", "reason", "message")
_CONDITION = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in _TEXTS},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
    },
}
_VOLCANO_STATUS = {
    "type": "object",
    "properties": {
        "phase": {
            "type": "string",
            "enum": ["Pending", "Running", "Unknown", "Inqueue", "Completed"],
        },
        "conditions": {"type": "array", "items": _CONDITION},
        **dict.fromkeys(("running", "succeeded", "failed"), _NUMBER),
    },
}
_ANY_STATUS = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _definition(
    group: str, version: str, fields: dict[str, Any], status: Manifest, **notes: str
) -> Manifest:
    properties = {"spec": {"type": "object", "properties": fields}, "status": status}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
        "subresources": {"status": {}},
    }
    names = {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"podgroups.{group}", "annotations": notes},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }


DEFINITIONS = [
    _definition(
        "scheduling.x-k8s.io",
        "v1alpha1",
        _COSCHEDULING,
        _ANY_STATUS,
        **{"api-approved.kubernetes.io": "unapproved, a copy for tests"},
    ),
    _definition("scheduling.volcano.sh", "v1beta1", _VOLCANO, _VOLCANO_STATUS),
]
