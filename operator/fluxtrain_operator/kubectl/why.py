"""``kubectl fluxtrain why NAME``: one paragraph on what a job does or waits for, and what to do about it."""

from __future__ import annotations

import time

from fluxtrain_operator import names
from fluxtrain_operator.distrust import HALF_LIFE_SECONDS, Fault, faults_of
from fluxtrain_operator.durations import duration
from fluxtrain_operator.kubectl.client import Kubectl
from fluxtrain_operator.kubectl.facts import Facts
from fluxtrain_operator.kubectl.findings import finding
from fluxtrain_operator.kubectl.job_objects import JobObjects, read_job

_ONGOING = ("Pending", "Starting", "Restarting", "Running")
_RECENT_FAULT_SECONDS = 4 * HALF_LIFE_SECONDS
"""A single fault counts for so long."""


def why(kubectl: Kubectl, name: str) -> str:
    """Return the paragraph about the job ``name``, as one line. Raises KubectlError."""
    return explanation(read_job(kubectl, name), time.time())


def explanation(objects: JobObjects, now: float) -> str:
    """Return the paragraph about the job of ``objects`` at the Unix time ``now``."""
    facts = Facts(objects, now)
    found = finding(facts)
    phase = f" ({facts.phase})" if facts.phase else ""
    sentences = [
        _sentence(f"{facts.namespace}/{facts.name}{phase} {found.text}"),
        found.remedy,
        _health(facts, found.text),
        _node_faults(facts),
        _excluded(facts),
        _restarts(facts),
        _unseen_change(facts),
        *(_sentence(f"Not read: {reason}") for reason in objects.unread),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _sentence(text: str) -> str:
    """Return ``text``, parts of which others wrote, on one line and with an end."""
    line = " ".join(text.split())
    return line if line.endswith(("?", "!")) else f"{line.rstrip('.')}."


def _health(facts: Facts, said: str) -> str:
    """Return the problem of a job that is about to train, unless it has been said."""
    healthy = facts.condition("Healthy")
    is_starting = facts.phase in ("Pending", "Starting", "Restarting")
    if healthy["status"] != "False" or not is_starting or healthy["message"] in said:
        return ""
    return _sentence(f"{healthy['reason']}: {healthy['message']}")


def _node_faults(facts: Facts) -> str:
    """Return the nodes with faults in the last hours, of a job that is not over."""
    if facts.phase not in _ONGOING:
        return ""
    by_node: dict[str, list[Fault]] = {}
    for fault in faults_of(facts.status):
        if 0 <= facts.now - fault.time < _RECENT_FAULT_SECONDS:
            by_node.setdefault(fault.node, []).append(fault)
    parts = [f"{node} ({_fault_text(faults, facts.now)})" for node, faults in by_node.items()]
    return _sentence(f"New pods avoid nodes with faults: {', '.join(parts)}") if parts else ""


def _fault_text(faults: list[Fault], now: float) -> str:
    newest = max(faults, key=lambda fault: fault.time)
    count = f"{len(faults)} faults, the last: " if len(faults) > 1 else ""
    return f"{count}{newest.reason} {duration(now - newest.time)} ago"


def _excluded(facts: Facts) -> str:
    """Return the nodes that pods which wait for a node exclude for their faults."""
    notes = (
        (manifest["metadata"].get("annotations") or {}).get(names.ANNOTATION_DISTRUSTED)
        for pod, manifest in facts.trainers
        if not pod.node and not pod.ended
    )
    excluded = next((note for note in notes if note), "")
    if not excluded:
        return ""
    text = "its waiting pods exclude these for two minutes at most"
    return _sentence(f"After several faults, {text}: {excluded.replace(',', ', ')}")


def _restarts(facts: Facts) -> str:
    """Return how often the job was restarted, and the last error, of a job that is not over."""
    if facts.phase not in _ONGOING:
        return ""
    counts = facts.status.get("restarts") or {}
    kinds = {"gang": "of all pods", "pod": "of single pods", "process": "of processes in place"}
    parts = [f"{counts[key]} {text}" for key, text in kinds.items() if counts.get(key)]
    if not parts:
        return ""
    error = facts.status.get("lastError")
    last = [_sentence(f"The last error: {error}")] if error else []
    return " ".join([f"Restarts so far: {', '.join(parts)}.", *last])


def _unseen_change(facts: Facts) -> str:
    seen, generation = facts.status.get("observedGeneration"), facts.metadata.get("generation")
    if seen is None or generation is None or seen >= generation:
        return ""
    return "The operator has not yet seen the newest change of the spec."
