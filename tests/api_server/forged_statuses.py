"""What a tenant who may write statuses could forge in those of their own jobs: a table.

Kubernetes' roles edit and admin do not include the right; an administrator may have given it.
"""

from __future__ import annotations

from typing import Any

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
