"""What a hostile tenant may try with the rights to create and change jobs in a namespace: a table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.operator.permissions import ROWS

Manifest = dict[str, Any]

_MOST = 2**31 - 1
_LATER, _EARLIER = "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"
_BEGUN: Manifest = {"phase": "Running", "attempt": 1}


def _condition(kind: str, message: str = "") -> Manifest:
    names = {"type": kind, "status": "True", "reason": "Forged", "message": message}
    return {**names, "lastTransitionTime": _LATER}


def _fault(number: int) -> Manifest:
    return {"node": f"node-{number}", "reason": "PodFailed", "time": _LATER, "pod": "x"}


FORGED: dict[str, Manifest] = {
    "the largest attempt": {"phase": "Running", "attempt": _MOST},
    "a million attempts": {"phase": "Restarting", "attempt": 1_000_000, "groupAttempt": _MOST},
    "complete": {**_BEGUN, "phase": "Complete", "conditions": [_condition("Complete")]},
    "failed": {**_BEGUN, "phase": "Failed", "conditions": [_condition("Failed")]},
    "complete, suspended and failed": {
        "conditions": [_condition(kind) for kind in ("Complete", "Suspended", "Failed")]
    },
    "restarts beyond the largest number": {
        **_BEGUN,
        "restarts": {"process": _MOST, "pod": _MOST, "gang": _MOST, "free": _MOST},
    },
    "restarts counted ahead": {
        **_BEGUN,
        "restarts": {"counted": {"attempt": _MOST, "generation": _MOST, "process": _MOST}},
    },
    "the revision of another's job": {**_BEGUN, "revision": "quiet-0123456789abcdef"},
    "an object that is no revision": {**_BEGUN, "revision": "kube-root-ca.crt"},
    "a fault of each node, in the year 9999": {
        **_BEGUN,
        "nodeFaults": [_fault(number) for number in range(16)],
    },
    "retries that never end": {
        **_BEGUN,
        "retries": [
            {"index": n, "reason": "Evicted", "count": _MOST, "time": _LATER} for n in range(64)
        ],
    },
    "progress beyond the end": {
        **_BEGUN,
        "progress": {
            "step": _MOST,
            "samples": 2**53,
            "remainingSeconds": 1e308,
            "trainLoss": -1e308,
            "lastStepTime": _LATER,
            "phaseSeconds": {"step": 1e308},
        },
    },
    "times that are none": {
        **_BEGUN,
        "startTime": 'x\n{"level": "error"}',
        "activeSince": "-",
        "completionTime": "\x1b[2J",
        "exclusionLifted": _EARLIER,
    },
    "times before Christ's birth": {**_BEGUN, "startTime": _EARLIER, "activeSince": _EARLIER},
    "time spent without end": {
        **_BEGUN,
        "timeSpent": {"until": _LATER, "step": 1e308, "other": -1e308},
        "goodput": 1,
        "trainSecondsBefore": -1e308,
    },
    "a restart in place in the largest generation": {
        **_BEGUN,
        "inPlaceRestart": {"attempt": 1, "generation": _MOST, "step": 0, "time": _LATER},
    },
    "another's pods to be replaced": {
        **_BEGUN,
        "podReplacement": {"attempt": 1, "time": _LATER, "pods": ["quiet-0", "quiet-rendezvous"]},
    },
    "another's pods as its own": {
        **_BEGUN,
        "nodes": {"ready": _MOST, "desired": _MOST},
        "selector": "fluxtrain.dev/job=quiet",
    },
    "predecessors that it does not have": {"completedPredecessors": ["quiet"] * 16},
    "messages of half a megabyte": {
        **_BEGUN,
        "conditions": [_condition(f"T{n}", "x" * 32_000) for n in range(16)],
        "lastError": "\n" * 4096,
    },
}
"""What is written -> the status."""


@dataclass(frozen=True)
class Attack:
    """A job, or several, that a tenant creates."""

    what: str
    spec: Manifest = field(default_factory=dict)
    metadata: Manifest = field(default_factory=dict)
    raw: str = ""
    """JSON that takes the place of the text HERE: what Python itself cannot write."""
    status: Manifest = field(default_factory=dict)
    """The status that the tenant writes after the operator's first one."""
    count: int = 1
    """How many jobs of this spec are created at once."""


def _nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


def _template(**spec: Any) -> Manifest:
    return {"podTemplate": {"spec": spec}}


_HERE = _template(affinity="HERE", containers=[{"name": "trainer"}])
_WIDE = {"nodes": {"min": 64, "max": 64}}
_ALIASES = json.dumps([{"ip": "192.0.2.1", "hostnames": [f"h{n}"]} for n in range(30_000)])
_VARIABLES = [{"name": f"V{n}", "value": "x" * 440} for n in range(128)]

FORBIDDEN = tuple(
    Attack(f"{row.what}: {json.dumps(row.spec)[:60]}", row.spec)
    for row in ROWS
    if "default" not in row.permitted
)
"""Jobs that ask for more than the policy permits."""

OVERSIZED = (
    Attack("30,000 hostAliases", _WIDE | _template(hostAliases=json.loads(_ALIASES))),
    Attack("30,000 hostAliases elsewhere in a template", _WIDE | _HERE, raw=_ALIASES),
    Attack("mappings nested 2,000 deep", _WIDE | _HERE, raw=_nested(2_000, '{"a":', "}")),
    Attack("lists nested 2,000 deep", _HERE, raw=_nested(2_000, "[", "]")),
    Attack("mappings nested 9,000 deep", _HERE, raw=_nested(9_000, '{"a":', "}")),
    Attack("lists nested 9,000 deep", _HERE, raw=_nested(9_000, "[", "]")),
    Attack("mappings nested 33 deep", _HERE, raw=_nested(33, '{"a":', "}")),
    Attack("one text of a megabyte", _HERE, raw=json.dumps({"a": "x" * 1_000_000})),
    Attack("200,000 numbers", _HERE, raw=json.dumps({"a": [1] * 200_000})),
    Attack("50,000 keys", _HERE, raw=json.dumps({f"k{n}": {} for n in range(50_000)})),
    Attack("an annotation of 250 KB", metadata={"annotations": {"a": "x" * 250_000}}),
    Attack("5,000 annotations", metadata={"annotations": {f"a{n}": "x" * 30 for n in range(5_000)}}),
    Attack("5,000 labels", metadata={"labels": {f"a{n}": "x" for n in range(5_000)}}),
    Attack("2,000 finalizers", metadata={"finalizers": [f"example.com/f{n}" for n in range(2_000)]}),
    Attack("a template of annotations of 16 KB", {
        "podTemplate": {"metadata": {"annotations": {f"a{n}": "x" * 16_000 for n in range(64)}}}}),
    Attack("4,096 nodes", {"nodes": {"min": 1, "max": 4096}, "lifecycle": {"suspend": True}}),
    Attack("64 nodes of the largest template", _WIDE | _template(
        containers=[{"name": "trainer", "env": _VARIABLES}])),
    Attack("a log of everything", {"run": {"preset": "micro", "logging": {"every_steps": 1}}}),
)  # fmt: skip
"""Jobs that cost more than others."""

DECEIVING = (
    Attack("line ends in an annotation", metadata={"annotations": {"a": "x\n{\"level\":\"error\"}\n"}}),
    Attack("line ends in a template", {
        "podTemplate": {"metadata": {"annotations": {"a": "x\r\n2026 INFO forged\x1b[2J"}}}}),
    Attack("line ends in a path", {"run": {"preset": "micro", "data": {"train": "a\nb"}}}),
    Attack("a time in the year 9999", metadata={"creationTimestamp": "9999-12-31T23:59:59Z"}),
    Attack("deleted in the year 9999", metadata={"deletionTimestamp": "9999-12-31T23:59:59Z"}),
    Attack("another's uid", metadata={"uid": "UID"}),
    Attack("owned by another's job", metadata={"ownerReferences": [{
        "apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining", "name": "quiet",
        "uid": "UID", "controller": True, "blockOwnerDeletion": True}]}),
    Attack("the operator's labels", metadata={"labels": {
        "app.kubernetes.io/managed-by": "fluxtrain-operator", "fluxtrain.dev/job": "quiet"}}),
    Attack("the operator's labels in a template", {"podTemplate": {"metadata": {"labels": {
        "fluxtrain.dev/job": "quiet"}}}}),
    Attack("the labels of another's service", {"podTemplate": {"metadata": {"labels": {
        "app": "shop"}}}}),
    Attack("another operator", {"managedBy": "example.com/other"}),
    Attack("after another's job", {"lifecycle": {"startAfter": ["quiet"]}}),
    Attack("after 16 jobs that do not exist", {"lifecycle": {"startAfter": [f"x{n}" for n in range(16)]}}),
    Attack("a status of its own"),
    Attack("a folder above the output", {"storage": {"outputFolder": "../quiet"}}),
    Attack("a literal token", {"network": {"env": [{"name": "HF_TOKEN", "value": "hf_" + "a" * 34}]}}),
    Attack("the operator's variables", {"network": {"env": [{"name": "FLUXTRAIN_CONFIG", "value": "/etc"}]}}),
    Attack("a Secret of another namespace", {"credentials": ["quiet/key"]}),
    Attack("a port of the node", {"run": {"preset": "micro", "logging": {"metrics_port": 22}}}),
    Attack("directives of patches", _template(**{"$patch": "replace"})),
    Attack("a container called like the operator's", _template(
        initContainers=[{"name": "flush-caches", "image": "own:1"}])),
    Attack("the key's volume", _template(volumes=[{"name": "rendezvous-key", "emptyDir": {}}])),
)  # fmt: skip
"""Jobs that pretend to be something else."""

MANY = (
    Attack("60 jobs", {"nodes": {"min": 1, "max": 1}}, count=60),
    Attack("30 jobs that are refused", {"network": {"mode": "Host"}}, count=30),
    Attack("5 jobs of 64 nodes", _WIDE, count=5),
)
"""Many jobs at once."""

STATUSES = tuple(Attack(f"a status: {what}", status=status) for what, status in FORGED.items())
"""Jobs whose statuses are forged, again and again."""

NETWORK = (
    Attack("the rendezvous' port for metrics", {
        "run": {"preset": "micro", "logging": {"metrics_port": 29500}}}),
    Attack("the labels of Prometheus in a template", {"podTemplate": {"metadata": {"labels": {
        "app.kubernetes.io/name": "prometheus"}}}}),
    Attack("the labels of the operator's pods in a template", {"podTemplate": {"metadata": {"labels": {
        "app.kubernetes.io/name": "fluxtrain-operator", "app.kubernetes.io/component": "operator"}}}}),
    Attack("a hundred addresses of a trainer", _template(
        hostAliases=[{"ip": "192.0.2.1", "hostnames": ["quiet-rendezvous.quiet.quiet.svc"]}] * 100)),
    Attack("name servers of the tenant", _template(
        dnsPolicy="None", dnsConfig={"nameservers": ["192.0.2.1"]})),
)  # fmt: skip
"""Jobs that want to be reached, or to reach others, by another name."""

ATTACKS = (*FORBIDDEN, *OVERSIZED, *DECEIVING, *NETWORK, *STATUSES, *MANY)
