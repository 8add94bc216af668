"""``kubectl fluxtrain why NAME``: one paragraph on what a job does or waits for, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fluxtrain.contract.process import COMPUTE, DATA, STRAGGLER_TEXTS
from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import duration, seconds
from fluxtrain_operator.base.node_health import HALF_LIFE_SECONDS, Fault, faults_of
from fluxtrain_operator.kubectl.client import (
    JobObjects,
    Kubectl,
    event_time,
    group_of,
    read_claim,
    read_job,
)
from fluxtrain_operator.kubectl.problems import PodProblem, problem_of, reason_of, remedy
from fluxtrain_operator.planner.observed import Pod

_RECENT_SECONDS = 600.0
_ONGOING = ("Pending", "Starting", "Restarting", "Running")
_RECENT_FAULT_SECONDS = 4 * HALF_LIFE_SECONDS
"""A single fault counts for so long."""


def why(kubectl: Kubectl, name: str) -> str:
    """Return the paragraph about the job ``name``, as one line. Raises KubectlError."""
    objects = read_job(kubectl, name)
    return explanation(replace(objects, claim=read_claim(kubectl)), time.time())


def explanation(objects: JobObjects, now: float) -> str:
    """Return the paragraph about the job of ``objects`` at the Unix time ``now``."""
    facts = Facts(objects, now)
    first = finding(facts)
    phase = f" ({facts.phase})" if facts.phase else ""
    sentences = [
        _sentence(f"{facts.namespace}/{facts.name}{phase} {first.text}"),
        first.remedy,
        _health(facts, first),
        _interruption(facts, first),
        _lapsed_claim(facts),
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


def _health(facts: Facts, first: Finding) -> str:
    """Return the problem of a job that is about to train, and what to do, unless it has been said."""
    healthy = facts.condition("Healthy")
    is_starting = facts.phase in ("Pending", "Starting", "Restarting")
    message, said = healthy["message"].rstrip("."), first.text
    is_said = message in said or message.removeprefix(f"{names.rendezvous(facts.name)}: ") in said
    if healthy["status"] != "False" or not is_starting or is_said:
        return ""
    todo = _remedy_of(facts, healthy)
    text = _sentence(f"{healthy['reason']}: {healthy['message']}")
    return text if todo in ("", first.remedy) else f"{text} {todo}"


def _interruption(facts: Facts, first: Finding) -> str:
    """Return what has taken a pod from a job that is not over, now or lately, unless it has been said."""
    causes = (facts.status.get("restarts") or {}).get("causes") or {}
    told = [(p.reason, f"{p.pod} {p.message}", p.message) for p in facts.problems]
    for event in reversed(facts.objects.events):
        age, reason, text = facts.now - event_time(event), event.get("reason"), event.get("message")
        if age < _RECENT_SECONDS and (event.get("involvedObject") or {}).get("kind") == KIND:
            cause = str(text).partition(": ")[2].removesuffix("; replaced")
            told.append((str(reason), f"{reason} {duration(age)} ago: {text}", cause))
    reason, text, cause = next((one for one in told if one[0] in causes), ("", "", ""))
    is_said = cause in f"{first.text} {facts.condition('Healthy')['message']}"
    if is_said or facts.phase not in _ONGOING:
        return ""
    return f"{_sentence(text)} {_remedy(facts, reason)}".strip()


def _lapsed_claim(facts: Facts) -> str:
    """Return that the release which claims the namespace of a job that is not over no longer renews that."""
    claim, age = _claim(facts), facts.claim_age or 0.0
    if claim is None or age < names.CLAIM_SECONDS or facts.phase in ("", "Complete", "Failed"):
        return ""
    return f"{_sentence(claim.text)} {claim.remedy}"


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
    """Return how often the job was restarted, the last error and all causes, of a job that is not over."""
    if facts.phase not in _ONGOING:
        return ""
    counts = facts.status.get("restarts") or {}
    kinds = {"gang": "of all pods", "pod": "of single pods", "process": "of processes in place"}
    parts = [f"{counts[key]} {text}" for key, text in kinds.items() if counts.get(key)]
    causes = [f"{name} ({number})" for name, number in (counts.get("causes") or {}).items()]
    error = facts.status.get("lastError") if parts else ""
    sentences = (
        f"Restarts so far: {', '.join(parts)}." if parts else "",
        _sentence(f"The last error: {error}") if error else "",
        f"Causes of restarts so far: {', '.join(causes)}." if causes else "",
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _unseen_change(facts: Facts) -> str:
    seen, generation = facts.status.get("observedGeneration"), facts.metadata.get("generation")
    if not facts.conditions or seen is None or generation is None or seen >= generation:
        return ""
    return "The operator has not yet seen the newest change of the spec."


_ABSENT: Mapping[str, Any] = {"status": "Unknown", "reason": "", "message": ""}


@dataclass(frozen=True)
class Facts:
    """What is known of a job at the Unix time ``now``."""

    objects: JobObjects
    now: float

    @property
    def metadata(self) -> Manifest:
        result: Manifest = self.objects.job["metadata"]
        return result

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace", "default"))

    @property
    def spec(self) -> Manifest:
        return self.objects.job.get("spec") or {}

    @property
    def status(self) -> Manifest:
        return self.objects.job.get("status") or {}

    @property
    def phase(self) -> str:
        return str(self.status.get("phase") or "")

    @property
    def progress(self) -> Manifest:
        return self.status.get("progress") or {}

    @property
    def claim(self) -> Manifest:
        """Return the spec of the Lease by which a release claims the namespace; empty if it is unknown."""
        return (self.objects.claim or {}).get("spec") or {}

    @property
    def claim_age(self) -> float | None:
        """Return the seconds since a release renewed its claim of the namespace; None if unknown."""
        return self.age(self.claim.get("renewTime")) if self.claim.get("holderIdentity") else None

    @property
    def min_nodes(self) -> int:
        return int((self.spec.get("nodes") or {}).get("min", 1))

    @cached_property
    def conditions(self) -> dict[str, Mapping[str, Any]]:
        return {c.get("type", ""): c for c in self.status.get("conditions") or ()}

    def condition(self, kind: str) -> Mapping[str, Any]:
        """Return a condition; one of status Unknown and without a reason if there is none."""
        return {**_ABSENT, **self.conditions.get(kind, {})}

    @cached_property
    def trainers(self) -> tuple[tuple[Pod, Manifest], ...]:
        """Return the training pods of the present attempt, each with its object."""
        pods = ((Pod.from_object(manifest), manifest) for manifest in self.objects.pods)
        attempt = self.status.get("attempt", 0)
        return tuple(
            (pod, manifest)
            for pod, manifest in pods
            if _component(manifest) == names.TRAINER and pod.attempt == attempt
        )

    @cached_property
    def num_running(self) -> int:
        """Return the number of training pods whose agent runs."""
        return sum(pod.running and not pod.deleting for pod, _ in self.trainers)

    @cached_property
    def problems(self) -> tuple[PodProblem, ...]:
        """Return why pods of this attempt, or the rendezvous pod, do not run; the first of each kind."""
        present = [manifest for _, manifest in self.trainers]
        present += [m for m in self.objects.pods if _component(m) == names.RENDEZVOUS]
        problems = (problem_of(pod, self.objects.events, self.now) for pod in present)
        return tuple(problem for problem in problems if problem is not None)

    def age(self, time: object) -> float | None:
        """Return the seconds since the timestamp ``time``; None if it is none."""
        moment = seconds(time)
        return None if moment is None else self.now - moment

    def ago(self, time: object) -> str:
        """Return how long ago the timestamp ``time`` is, in words."""
        age = self.age(time)
        return "at an unknown time" if age is None else f"{duration(age)} ago"


def _component(manifest: Manifest) -> str | None:
    labels = manifest["metadata"].get("labels") or {}
    component: str | None = labels.get(names.LABEL_COMPONENT)
    return component


_SOON_SECONDS = 15.0
"""An operator that runs takes up a new or changed job sooner."""
_OLD_SECONDS = 300.0
"""A step that is older deserves a word; evaluations and checkpoints may take this long."""
_NO_ANSWER = ("NoAnswer", "ReportedByAgents")
"""Reasons of a job none of whose trainers answers."""
_COUNT = " nodes are up"
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
    findings = (rule(facts) for rule in RULES)
    return next((one for one in findings if one is not None), _other(facts))


def deleted(facts: Facts) -> Finding | None:
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
    if age <= _SOON_SECONDS:
        return Finding(text, "That takes a few seconds.")
    if claim := _claim(facts):
        return Finding(f"{text}; {claim.text}", claim.remedy)
    is_free = facts.objects.claim == {}
    return Finding(f"{text}{'; no operator claims the namespace' if is_free else ''}", _OPERATOR)


def _claim(facts: Facts) -> Finding | None:
    """Return which release claims the namespace, and when it renewed that last; None if that is unknown."""
    if facts.claim_age is None:
        return None
    holder = str(facts.claim.get("holderIdentity"))
    namespace, _, name = holder.partition("/")
    log = f"`kubectl logs -n {namespace} deployment/{name}`"
    return Finding(
        f"{holder} claims the namespace, and renewed that {duration(facts.claim_age)} ago",
        f"That release reconciles the jobs there, unless it does not run or lacks rights: {log}.",
    )


def complete(facts: Facts) -> Finding | None:
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
    return Finding(text, _remedy_of(facts, condition))


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
    if not any(gate in condition["message"] for gate in names.KUEUE_GATES):
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
    return Finding(f"waits: {message}", _remedy_of(facts, condition))


def backing_off(facts: Facts) -> Finding | None:
    """A job that starts again at a time that a condition names."""
    condition = facts.condition("Training")
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
    count = f"waits for pods: {facts.num_running} of at least {facts.min_nodes}{_COUNT}"
    if not facts.problems:
        healthy, training = facts.condition("Healthy"), facts.condition("Training")
        condition = healthy if healthy["status"] == "False" else training
        message = condition["message"].rpartition(_COUNT)[2].removeprefix("; ")
        return Finding(f"{count}; {message}" if message else count, _remedy_of(facts, condition))
    first = min(facts.problems, key=lambda problem: problem.is_passing)
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
    training = facts.condition("Training")
    if facts.phase == "Pending" and training["message"]:
        text = f"{text}: they wait for the rendezvous; {training['message']}"
        return Finding(text, _remedy_of(facts, training))
    if facts.condition("Progressing")["reason"] in _NO_ANSWER:
        return Finding(
            f"{text}; {facts.condition('Progressing')['message']}", _remedy(facts, "NoAnswer")
        )
    logs = f"`kubectl fluxtrain logs {facts.name} -n {facts.namespace}`"
    return Finding(text, f"They load weights or compile; {logs} shows what they do.")


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
    todo = f"{_remedy_of(facts, healthy)} {straggler.remedy}".strip()
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
        f"If the pods' log continues, the status is old. {_OPERATOR}"
    )


def _straggler(facts: Facts) -> Finding:
    """Return an addition about the rank that all others wait for; empty without one."""
    slowest = facts.progress.get("straggler")
    if not slowest:
        return Finding("")
    node = slowest.get("node")
    text = f"; rank {slowest.get('rank')} in {slowest.get('pod')} on {node}"
    slowdown, cause = f"{slowest.get('slowdown')} times as long", slowest.get("cause")
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


def _remedy_of(facts: Facts, condition: Mapping[str, Any]) -> str:
    return _remedy(facts, reason_of(condition["reason"], condition["message"]))


def _remedy(facts: Facts, reason: str, pod: str = "") -> str:
    return remedy(reason, facts.name, facts.namespace, pod)
