"""Statuses that the planner makes, and what programs that wait for a job make of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.operator.planner.pods import (
    LONG_AGO,
    NOW,
    PENDING,
    SUCCEEDED,
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    plan_with,
    progress,
    rendezvous,
    running,
    started,
    with_status,
)

from fluxtrain.contract.resource.status import Status
from fluxtrain.errors import ConfigError
from fluxtrain_operator.base.errors import NotPermittedError, UnreadableError
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.planner.observed import CreateFailure, NodeView, Observed, Pod
from fluxtrain_operator.planner.plan import plan, plan_invalid

CURRENT, IN_PROGRESS, FAILED = "Current", "InProgress", "Failed"
ARGO = {CURRENT: "Healthy", IN_PROGRESS: "Progressing", FAILED: "Degraded"}
FULL = "Unschedulable: 0/2 nodes are available: 2 Insufficient amd.com/gpu."
GATED = {**PENDING, "gated": True, "gates": ("kueue.x-k8s.io/admission",), "node": ""}
SUSPEND = {"suspend": True}


@dataclass(frozen=True)
class Case:
    """A status, the generation of its job, and what kstatus and Argo CD's script are to make of it."""

    status: Status
    verdict: str
    argo: str = ""
    generation: int = 1

    def manifest(self, name: str) -> Manifest:
        """Return the job as the API server has it."""
        status = self.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "apiVersion": "fluxtrain.dev/v1alpha1",
            "kind": "FluxTraining",
            "metadata": {"name": name, "namespace": "team", "generation": self.generation},
            "spec": {"run": {"preset": "micro"}},
            "status": status,
        }


def _edited(job: Job, **spec: object) -> Job:
    """Return ``job`` with another spec, as its next generation."""
    return replace(with_status(make_job(**spec), job.status), generation=2)


def _trains(job: Job, *pods: Pod, **changes: object) -> Status:
    return plan_with(job, *pods, **{"progress": progress(), **changes}).status


def _rejected(job: Job, error: ConfigError) -> Status:
    manifest = Case(job.status, "", generation=2).manifest("job")
    return plan_invalid(manifest, error, Observed(), NOW).status


def _waiting() -> Iterator[tuple[str, Status]]:
    new, refused = make_job(), CreateFailure("Pod", "job-0", "QuotaExceeded", "no", NOW + 5)
    yield "is new", plan(new, Observed(), NOW).status
    yield "waits for nodes", plan_with(started(), *make_pods(**PENDING, waiting=FULL)).status
    yield "waits in a queue", plan_with(started(), *make_pods(**GATED)).status
    after = make_job(lifecycle={"startAfter": ["data"]})
    yield "waits for a job", plan(after, Observed(predecessors={"data": None}), NOW).status
    yield "is refused", plan_with(started(), create_failures=(refused,)).status
    pulling = rendezvous(**PENDING, waiting="ImagePullBackOff: no such image")
    yield "has no rendezvous", plan_with(started(), *make_pods(), rendezvous=pulling).status
    yield "starts", plan_with(started(), *make_pods(), now=LONG_AGO + 60).status


def _restarting() -> Iterator[tuple[str, Status]]:
    job = running()
    other = _edited(job, image="trainer:2")
    yield "restarts for its spec", plan_with(other, *make_pods(2, job)).status
    pods = [failed(index, job=job) for index in range(2)]
    yield "restarts after an error", plan_with(job, *pods).status
    suspended = with_status(job, plan_with(_edited(job, lifecycle=SUSPEND)).status)
    yield "is resumed", plan_with(suspended).status


def _scaling() -> Iterator[tuple[str, Status]]:
    job = running()
    more = _edited(job, nodes={"min": 1, "max": 3})
    creating = make_pod(2, more, **PENDING, waiting="ContainerCreating")
    present = make_pods(2, more)
    yield "is to grow", _trains(more, *present)
    yield "grows", _trains(more, *present, creating)
    yield "replaces a node", _trains(job, make_pod(0, job), make_pod(1, job, deleting=True))
    less = _edited(job, nodes={"min": 1, "max": 1})
    yield "is to shrink", _trains(less, *make_pods(2, less))
    yield "shrinks", _trains(less, make_pod(0, less), make_pod(1, less, deleting=True))


def _ready() -> Iterator[tuple[str, Status]]:
    job = running()
    yield "trains", job.status
    first = make_pod(0, job)
    full = make_pod(1, job, **PENDING, waiting=FULL)
    yield "trains on the nodes that there are", _trains(job, first, full)
    yield "trains on the nodes of its queue", _trains(job, first, make_pod(1, job, **GATED))
    refused = CreateFailure("Pod", "job-1", "QuotaExceeded", "no", NOW + 5)
    yield "trains on the nodes of its quota", _trains(job, first, create_failures=(refused,))
    store = rendezvous(job, **PENDING, waiting="ImagePullBackOff: no such image")
    yield "trains without a rendezvous pod", _trains(job, *make_pods(2, job), rendezvous=store)
    others = [make_pod(index, job) for index in (1, 2)]
    kept = failed(0, job=job, deleting=True, finalizers=("example.org/audit",))
    yield "trains while a finalizer keeps a pod", _trains(job, kept, *others)
    dead = _trains(
        job, make_pod(0, job), *others, nodes={**lost("node-0"), "node-2": NodeView("node-2")}
    )
    yield "trains while a pod stays on a lost node", dead
    yield "ends", _trains(job, make_pod(0, job, **SUCCEEDED), make_pod(1, job))
    done = [make_pod(index, job, **SUCCEEDED) for index in range(2)]
    yield "is complete", _trains(job, *done)


def _cases() -> Iterator[tuple[str, Case]]:
    job, error = running(), ConfigError("spec.run.optim.beta1", 2, "must be below 1")
    suspend = _edited(job, lifecycle=SUSPEND)
    suspended = _trains(suspend)
    complete = with_status(job, dict(_ready())["is complete"])
    yield "is not seen", Case(Status(observedGeneration=-1), IN_PROGRESS)
    yield "is changed", Case(job.status, IN_PROGRESS, generation=2)
    for name, status in (*_waiting(), *_restarting(), *_scaling()):
        yield name, Case(status, IN_PROGRESS, generation=status.observed_generation or 0)
    for name, status in _ready():
        yield name, Case(status, CURRENT, generation=status.observed_generation or 0)
    leaving = make_pods(2, suspend, deleting=True)
    yield "is suspended soon", Case(_trains(suspend, *leaving), IN_PROGRESS, generation=2)
    yield "is suspended", Case(suspended, CURRENT, "Suspended", generation=2)
    later = _edited(complete, lifecycle={"ttlSecondsAfterFinished": 10**6})
    yield "is changed after its end", Case(plan_with(later).status, CURRENT, generation=2)
    late = _rejected(complete, error)
    yield "has an invalid change after its end", Case(late, CURRENT, generation=2)
    yield "has failed", Case(plan_with(job, failed(code=2, job=job)).status, FAILED)
    yield "is invalid", Case(_rejected(make_job(), error), FAILED, generation=2)
    banned = NotPermittedError("spec.image", "x", "must be permitted")
    yield "trains with a change that is invalid", Case(_rejected(job, error), FAILED, generation=2)
    yield "trains with one that is forbidden", Case(_rejected(job, banned), FAILED, generation=2)
    newer = UnreadableError("spec.run.model", "x", "must be known")
    yield "is of a newer operator", Case(_rejected(make_job(), newer), IN_PROGRESS, generation=2)


CASES = dict(_cases())
