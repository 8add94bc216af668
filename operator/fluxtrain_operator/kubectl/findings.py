"""The rules of ``why`` in order: the first that applies says what a job does or waits for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain.contract.progress import COMPUTE, DATA, STRAGGLER_TEXTS
from fluxtrain_operator import names
from fluxtrain_operator.durations import duration
from fluxtrain_operator.kubectl.facts import Facts
from fluxtrain_operator.kubectl.job_objects import group_of
from fluxtrain_operator.kubectl.pod_problems import PodProblem
from fluxtrain_operator.kubectl.remedies import remedy
from fluxtrain_operator.timestamps import seconds

_SOON_SECONDS = 15.0
"""An operator that runs takes up a new or changed job sooner."""
_OLD_SECONDS = 300.0
"""A step that is older deserves a word; evaluations and checkpoints may take this long."""
_NO_ANSWER = ("NoAnswer", "ReportedByAgents")
"""Reasons of a job none of whose trainers answers."""
_AGAIN = " again at "
"""In the message of a condition, before the time at which a failed job starts again."""
_OPERATOR = (
    "The operator may not be running, or may not watch this namespace: "
    "`kubectl get pods -A -l app.kubernetes.io/component=operator` and its log show more."
)


@dataclass(frozen=True)
class Finding:
    """What a job does or waits for, and what to do about it; sentences without and with a full stop."""

    text: str
    remedy: str = ""


Rule = Callable[[Facts], Finding | None]


def finding(facts: Facts) -> Finding:
    """Return the finding of the first rule that applies."""
    found = (rule(facts) for rule in RULES)
    return next((one for one in found if one is not None), _other(facts))


def deleted(facts: Facts) -> Finding | None:
    """A job that is being deleted."""
    time = facts.metadata.get("deletionTimestamp")
    if time is None:
        return None
    finalizers = ", ".join(facts.metadata.get("finalizers") or ())
    waits = f"; it waits for the finalizers {finalizers}" if finalizers else ""
    return Finding(f"was deleted {facts.ago(time)}, and is not gone yet{waits}")


def foreign(facts: Facts) -> Finding | None:
    """A job that another controller manages."""
    manager = facts.spec.get("managedBy", names.MANAGED_BY)
    if manager == names.MANAGED_BY:
        return None
    return Finding(f"is left to {manager} by spec.managedBy", "Ask that controller for its state.")


def unseen(facts: Facts) -> Finding | None:
    """A job of which the operator has not written a status."""
    if facts.phase or facts.conditions:
        return None
    age = facts.age(facts.metadata.get("creationTimestamp")) or 0.0
    text = f"was created {duration(age)} ago, and the operator has written no status"
    return Finding(text, _OPERATOR if age > _SOON_SECONDS else "That takes a few seconds.")


def complete(facts: Facts) -> Finding | None:
    """A job that is complete."""
    if facts.condition("Complete")["status"] != "True":
        return None
    time = facts.status.get("completionTime")
    return Finding(f"completed {facts.ago(time)}{_steps(facts)}")


def failed(facts: Facts) -> Finding | None:
    """A job that has failed, with exit code and error line."""
    condition = facts.condition("Failed")
    if condition["status"] != "True":
        return None
    message = condition["message"] or condition["reason"]
    last = str(facts.status.get("lastError") or "")
    error = f"; its last error: {last}" if last and last not in message else ""
    time = facts.ago(facts.status.get("completionTime"))
    text = f"failed {time}, {condition['reason']}: {message}{error}"
    return Finding(text, _remedy(facts, condition["reason"]))


def suspended(facts: Facts) -> Finding | None:
    """A job that is suspended, or about to be."""
    condition = facts.condition("Suspended")
    if condition["status"] != "True" and condition["reason"] != "Stopping":
        return None
    text = "is suspended by spec.lifecycle.suspend"
    if condition["status"] != "True":
        text = f"is about to be suspended: {condition['message']}"
    patch = '{"spec":{"lifecycle":{"suspend":false}}}'
    command = f"kubectl patch ft {facts.name} -n {facts.namespace} --type=merge -p '{patch}'"
    return Finding(text, f"`{command}` resumes it.")


def gated(facts: Facts) -> Finding | None:
    """A job whose pods wait at scheduling gates, such as Kueue's."""
    condition = facts.condition("Admitted")
    if (condition["status"], condition["reason"]) != ("False", "SchedulingGated"):
        return None
    if names.KUEUE_GATE not in condition["message"]:
        return Finding(f"waits: {condition['message']}", _remedy(facts, "SchedulingGated"))
    queue = (facts.spec.get("scheduling") or {}).get("queueName", "its queue")
    text = f"waits for Kueue to admit its pods in the queue {queue}{_kueue_reason(facts)}"
    group = group_of(facts.objects.job)
    return Finding(text, f"`kubectl describe workload {group} -n {facts.namespace}` shows more.")


def blocked(facts: Facts) -> Finding | None:
    """A job whose pods cannot be created, or that waits for other jobs."""
    condition = facts.condition("Admitted")
    if condition["status"] != "False" or facts.num_running >= facts.min_nodes:
        return None
    message = condition["message"] or condition["reason"]
    return Finding(f"waits: {message}", _remedy(facts, condition["reason"]))


def backing_off(facts: Facts) -> Finding | None:
    """A job that starts again at a time that a condition names."""
    condition = facts.condition("Ready")
    if condition["status"] == "True" or _AGAIN not in condition["message"]:
        return None
    time = seconds(condition["message"].rpartition(_AGAIN)[2])
    wait = "" if time is None else f", in {duration(time - facts.now)}"
    text = f"waits after a failure: {condition['message']}{wait}"
    return Finding(text, _remedy(facts, condition["reason"]))


def pods_waiting(facts: Facts) -> Finding | None:
    """A job with too few running pods."""
    if facts.phase not in ("Pending", "Restarting") or facts.num_running >= facts.min_nodes:
        return None
    count = f"waits for pods: {facts.num_running} of at least {facts.min_nodes} nodes are up"
    if not facts.problems:
        condition = facts.condition("Ready")
        message = "" if condition["message"].startswith("0 of") else condition["message"]
        return Finding(
            f"{count}; {message}" if message else count, _remedy(facts, condition["reason"])
        )
    first = facts.problems[0]
    return Finding(f"{count}; {_problem(facts, first)}", _remedy(facts, first.reason, first.pod))


def starting(facts: Facts) -> Finding | None:
    """A job whose pods run, but have made no step."""
    if facts.phase not in ("Pending", "Starting", "Restarting"):
        return None
    began = max((pod.started or 0.0 for pod, _ in facts.trainers if pod.running), default=0.0)
    since = f" for {duration(facts.now - began)}" if began else ""
    text = f"has {_count(facts.num_running, 'running pod')}{since}, but no step is made yet"
    store = next((p for p in facts.problems if names.is_rendezvous(facts.name, p.pod)), None)
    if store is not None:
        text = f"{text}: they wait for the rendezvous, and {_problem(facts, store)}"
        return Finding(text, _remedy(facts, store.reason, store.pod))
    if facts.condition("Progressing")["reason"] in _NO_ANSWER:
        return Finding(
            f"{text}; {facts.condition('Progressing')['message']}", _remedy(facts, "NoAnswer")
        )
    return Finding(text, f"They load weights or compile; {_logs(facts)} shows what they do.")


def running(facts: Facts) -> Finding | None:
    """A job that trains, perhaps on fewer nodes, perhaps with a last step that is old."""
    if facts.phase != "Running":
        return None
    last = facts.progress.get("lastStepTime")
    age = facts.age(last)
    text = f"trains on {_count(facts.num_running, 'node')}{_steps(facts)}"
    text += f"; its last step was {facts.ago(last)}"
    if eta := facts.status.get("eta"):
        text += f", and {eta} are left"
    if age is not None and age > _OLD_SECONDS:
        return Finding(text, _old_step(facts))
    straggler = _straggler(facts)
    text += straggler.text
    healthy = facts.condition("Healthy")
    if healthy["status"] != "False":
        return Finding(text, straggler.remedy)
    todo = f"{_remedy(facts, healthy['reason'])} {straggler.remedy}".strip()
    return Finding(f"{text}; {healthy['reason']}: {healthy['message']}", todo)


RULES: tuple[Rule, ...] = (
    deleted,
    foreign,
    unseen,
    complete,
    failed,
    suspended,
    gated,
    blocked,
    backing_off,
    pods_waiting,
    starting,
    running,
)


def _other(facts: Facts) -> Finding:
    """Return the conditions that say more than the phase, which this plugin does not know."""
    known = (
        f"{kind}={c.get('status')} ({c.get('reason')})" for kind, c in facts.conditions.items()
    )
    return Finding(f"has the conditions {', '.join(known)}", "A newer plugin may say more.")


def _old_step(facts: Facts) -> str:
    """Return what to do about a job that should train, but has not made a step for a while."""
    progressing = facts.condition("Progressing")
    if progressing["reason"] in _NO_ANSWER:
        message = progressing["message"]
        return f"{message[:1].upper()}{message[1:]} {_remedy(facts, 'NoAnswer')}"
    stacks = f"`kubectl fluxtrain stacks {facts.name} -n {facts.namespace}`"
    return (
        "A checkpoint, an evaluation or samples take this long, or the trainers hang; "
        f"{stacks} shows where they are, and the operator restarts trainers that hang. "
        f"If the pods' log goes on, the status is old. {_OPERATOR}"
    )


def _straggler(facts: Facts) -> Finding:
    """Return an addition about the rank that all others wait for; empty without one."""
    found = facts.progress.get("straggler")
    if not found:
        return Finding("")
    node = found.get("node")
    text = f"; rank {found.get('rank')} in {found.get('pod')} on {node}"
    slowdown, cause = f"{found.get('slowdown')} times as long", found.get("cause")
    does = STRAGGLER_TEXTS.get(cause, STRAGGLER_TEXTS[COMPUTE]).format(slowdown)
    if cause == DATA:
        todo = f"Check the storage and the free CPUs of {node}, or raise spec.run.data.num_workers."
        return Finding(f"{text} {does}", todo)
    todo = (
        f"Check clocks and temperatures of the GPUs of {node}, and what else runs there; "
        f"if it is cordoned and the pod deleted, another node takes over."
    )
    return Finding(f"{text} {does}", todo)


def _kueue_reason(facts: Facts) -> str:
    """Return the message of Kueue's workload about what is missing; empty without one."""
    workload = facts.objects.workload or {}
    conditions = (workload.get("status") or {}).get("conditions") or ()
    missing = (c for c in conditions if c.get("status") == "False" and c.get("message"))
    message = next((c["message"] for c in missing if c.get("type") in _KUEUE_CONDITIONS), "")
    return f": {message.rstrip('.')}" if message else ""


_KUEUE_CONDITIONS = ("QuotaReserved", "Admitted")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _problem(facts: Facts, problem: PodProblem) -> str:
    same = sum(other.reason == problem.reason for other in facts.problems) - 1
    others = f" (and {same} more like it)" if same else ""
    return f"{problem.pod}{others} {problem.message}"


def _steps(facts: Facts) -> str:
    """Return step, losses and goodput, as far as the status has them."""
    if not facts.progress:
        return ""
    parts = [f" at step {_of(facts.progress, 'step', 'steps')}"]
    if facts.progress.get("epoch") and facts.progress.get("epochs", 1) != 1:
        parts.append(f"epoch {_of(facts.progress, 'epoch', 'epochs')}")
    for key, text in (("trainLoss", "training loss"), ("evalLoss", "evaluation loss")):
        if (value := facts.progress.get(key)) is not None:
            parts.append(f"{text} {value:.4g}")
    if (target := facts.progress.get("targetSamples")) is not None:
        parts.append(f"target forecast at {target:,} samples")
    if (rate := facts.progress.get("samplesPerSecond")) is not None:
        parts.append(f"{rate:.4g} samples/s")
    if isinstance(goodput := facts.status.get("goodput"), int | float):
        parts.append(f"goodput {goodput:.1%}")
    return ", ".join(parts)


def _of(progress: Mapping[str, Any], name: str, total: str) -> str:
    known = f" of {progress[total]}" if progress.get(total) else ""
    return f"{progress.get(name, 0)}{known}"


def _logs(facts: Facts) -> str:
    return f"`kubectl fluxtrain logs {facts.name} -n {facts.namespace}`"


def _remedy(facts: Facts, reason: str, pod: str = "") -> str:
    return remedy(reason, facts.name, facts.namespace, pod)
