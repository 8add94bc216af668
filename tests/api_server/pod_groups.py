"""CRDs of coscheduling's and Volcano's pod groups, with the fields that the operator writes; no scheduler."""

from __future__ import annotations

from typing import Any

from cluster.kubectl import Manifest

NATIVE = "scheduling.k8s.io/v1alpha2"
"""Kubernetes' own pod groups: an alpha API, which our cluster does not serve."""
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
_VOLCANO = {
    "minMember": {"type": "integer", "format": "int32"},
    "minTaskMember": {"type": "object", "additionalProperties": _COUNT},
    "queue": {"type": "string", "default": "default"},
    "priorityClassName": {"type": "string"},
    "minResources": _AMOUNTS,
}


def _definition(group: str, version: str, fields: dict[str, Any], **notes: str) -> Manifest:
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
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
        **{"api-approved.kubernetes.io": "unapproved, a copy for tests"},
    ),
    _definition("scheduling.volcano.sh", "v1beta1", _VOLCANO),
]
