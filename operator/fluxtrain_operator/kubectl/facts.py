"""Facts: one job's objects and the time, as the rules of ``why`` read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fluxtrain_operator import names
from fluxtrain_operator.durations import duration
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.kubectl.job_objects import JobObjects
from fluxtrain_operator.kubectl.pod_problems import PodProblem, problem_of
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.timestamps import seconds

_ABSENT: Mapping[str, Any] = {"status": "Unknown", "reason": "", "message": ""}


@dataclass(frozen=True)
class Facts:
    """What is known of a job at the Unix time ``now``."""

    objects: JobObjects
    now: float

    @property
    def metadata(self) -> Manifest:
        """Return the job's metadata."""
        result: Manifest = self.objects.job["metadata"]
        return result

    @property
    def name(self) -> str:
        """Return the job's name."""
        return str(self.metadata["name"])

    @property
    def namespace(self) -> str:
        """Return the job's namespace."""
        return str(self.metadata.get("namespace", "default"))

    @property
    def spec(self) -> Manifest:
        """Return the spec."""
        return self.objects.job.get("spec") or {}

    @property
    def status(self) -> Manifest:
        """Return the status; empty if the operator has written none."""
        return self.objects.job.get("status") or {}

    @property
    def phase(self) -> str:
        """Return the phase; empty without one."""
        return str(self.status.get("phase") or "")

    @property
    def progress(self) -> Manifest:
        """Return the progress; empty without one."""
        return self.status.get("progress") or {}

    @property
    def min_nodes(self) -> int:
        """Return ``spec.nodes.min``."""
        return int((self.spec.get("nodes") or {}).get("min", 1))

    @cached_property
    def conditions(self) -> dict[str, Mapping[str, Any]]:
        """Return the conditions by type."""
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
        found = (problem_of(pod, self.objects.events, self.now) for pod in present)
        return tuple(problem for problem in found if problem is not None)

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
