"""Situation: one job's pods sorted once, for the planner's rules to look at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from fluxtrain.contract.progress import RUNNING
from fluxtrain.contract.resource.status import Condition, ProgressStatus, Restarts
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.planner.failures import Failure, failure_of
from fluxtrain_operator.planner.node_health import GRACE_SECONDS, cannot_see, cannot_tell_gpus
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.resources import supporting
from fluxtrain_operator.resources.pod_group import APIS
from fluxtrain_operator.timestamps import seconds

_OVERDUE_SECONDS = 30.0
"""A pod that is still there this long after the end of its grace has no kubelet that obeys."""
_FRESH_SECONDS = 60.0
"""A sign of progress that is not older says that the nodes of the present world live."""
_TRAINING = ("", RUNNING)
"""Phases in which steps are made; older trainers name none."""


@dataclass(frozen=True)
class Situation:
    """A job, what there is of it, and the time. Pods of ``attempt`` are current, others are old."""

    job: Job
    observed: Observed
    now: float
    attempt: int

    @staticmethod
    def of(job: Job, observed: Observed, now: float) -> Situation:
        """Return the situation in the attempt that the status names.

        A job whose status was lost takes the attempt of the pods that it finds.
        """
        attempt = job.status.attempt
        if job.status.phase is None:
            attempt = max((pod.attempt for pod in observed.pods), default=0)
        return Situation(job, observed, now, attempt)

    def at(self, attempt: int) -> Situation:
        """Return the same as it looks in another attempt."""
        return replace(self, attempt=attempt)

    @property
    def stale(self) -> bool:
        """Return whether there are pods of a later attempt: the status was read too early."""
        return any(pod.attempt > self.attempt for pod in self.observed.pods)

    @cached_property
    def current(self) -> tuple[Pod, ...]:
        """Return the pods of this attempt, by index."""
        found = (pod for pod in self.observed.pods if pod.attempt == self.attempt)
        return tuple(sorted(found, key=lambda pod: pod.index))

    @cached_property
    def old(self) -> tuple[Pod, ...]:
        """Return the pods of earlier attempts."""
        return tuple(pod for pod in self.observed.pods if pod.attempt < self.attempt)

    @cached_property
    def kept(self) -> tuple[Pod, ...]:
        """Return the current pods that live and may go on living, by index."""
        return tuple(
            pod
            for pod in self.current
            if not (pod.ended or pod.deleting or self.unreachable(pod) or self.condemned(pod))
        )

    @cached_property
    def running(self) -> tuple[Pod, ...]:
        """Return the kept pods whose agent runs."""
        return tuple(pod for pod in self.kept if pod.running)

    @cached_property
    def counted_by_queue(self) -> tuple[Pod, ...]:
        """Return the current pods that are lost to training and that Kueue yet counts as of their group.

        It takes those out of reach for running, and those that ended well for done: others in their stead
        it would delete as too many.
        """
        lost = (pod for pod in self.current if pod.succeeded or self.unreachable(pod))
        return tuple(pod for pod in lost if pod.queued)

    @property
    def enough(self) -> bool:
        """Return whether as many run as training needs."""
        return len(self.running) >= self.job.spec.nodes.min

    @cached_property
    def faults(self) -> tuple[Failure, ...]:
        """Return why current pods failed, the program's own faults first."""
        found = (fault for pod in self.current if (fault := failure_of(pod)) is not None)
        return tuple(sorted(found, key=lambda fault: (fault.infrastructure, fault.pod.index)))

    @cached_property
    def support(self) -> tuple[Manifest, ...]:
        """Return the objects around the pods, as they should be."""
        return tuple(supporting(self.job, self.gang))

    @cached_property
    def restarts(self) -> Restarts:
        """Return the restarts so far: pods and progress carry the counts, the status keeps the largest."""
        before = self.job.status.restarts or Restarts()
        words = self.words
        return Restarts(
            process=max(before.process, words.process_restarts if words else 0),
            pod=max([before.pod, *(pod.replacement for pod in self.observed.pods)]),
            gang=before.gang,
        )

    @property
    def gang(self) -> str:
        """Return the kind of pod group, ``none`` where the cluster does not serve its API."""
        wanted = self.job.spec.scheduling.gang
        return "none" if APIS.get(wanted) in self.observed.missing_apis else wanted

    @cached_property
    def words(self) -> Progress | None:
        """Return what rank 0 says, or said last as it ended: an answer may be from before that."""
        said = [self.observed.progress, *(pod.last_words for pod in self.observed.pods)]
        heard = [words for words in said if words is not None]
        return max(heard, key=lambda words: words.status.last_step_time or "", default=None)

    @property
    def progress(self) -> ProgressStatus | None:
        """Return how far the training is: what was said last, by living processes or earlier ones."""
        before, words = self.job.status.progress, self.words
        if words is None or words.status.last_step_time is None:
            return before
        known = before.last_step_time if before else None
        is_news = self.observed.progress is not None or words.status.last_step_time >= (known or "")
        return words.status if is_news else before

    @property
    def last_step(self) -> float | None:
        """Return the Unix time of the last step that is known."""
        return seconds(self.progress.last_step_time) if self.progress else None

    @property
    def stepping(self) -> bool:
        """Return whether the current processes have made a step, as far as is known."""
        now = self.observed.progress
        if not self.enough or self.last_step is None:
            return False
        if now is not None and now.status.last_step_time is None:
            return False
        began = sorted(pod.started or 0.0 for pod in self.running)[self.job.spec.nodes.min - 1]
        return self.last_step >= began

    @property
    def last_sign(self) -> float | None:
        """Return the Unix time of the newest sign of progress, a step or another, that is told."""
        return self.observed.witness.alive if self.observed.witness else None

    @property
    def trains(self) -> bool:
        """Return whether the present processes make steps, and nothing else at the moment."""
        now = self.observed.witness
        return now is not None and now.status.last_step_time is not None and now.phase in _TRAINING

    @cached_property
    def suspects(self) -> tuple[Pod, ...]:
        """Return the current pods that run on nodes that are not ready, as far as the control plane knows."""
        return tuple(pod for pod in self._up if not self._node(pod).ready)

    @cached_property
    def cannot_see(self) -> str:
        """Return why the control plane is not believed about nodes that are not ready; empty: it is."""
        return cannot_see(self.observed.nodes.values(), self.now)

    @cached_property
    def cannot_tell_gpus(self) -> str:
        """Return why it is not believed that GPUs are unhealthy; empty: it is."""
        return cannot_tell_gpus(self.observed.nodes.values())

    @property
    def untold_gpus(self) -> bool:
        """Return whether the job's pods run on GPUs that are called unhealthy as most are."""
        named = any(self._node(pod).unhealthy for pod in self._up)
        return named and self.job.spec.gpus_per_node > 0 and bool(self.cannot_tell_gpus)

    @property
    def judged_at(self) -> float | None:
        """Return the Unix time at which a node that is not ready is judged anew; None where none is.

        Other nodes decide whether the control plane is believed, and no event tells the job of those.
        """
        if self.untold_gpus or (self.suspects and self.cannot_see):
            return self.now + GRACE_SECONDS
        waiting = [self._node(pod).since + GRACE_SECONDS for pod in self.suspects]
        fresh = None if self._newest_sign is None else self._newest_sign + _FRESH_SECONDS
        return earliest(
            time for time in [*waiting, fresh if waiting else None] if time and time > self.now
        )

    @cached_property
    def avoid(self) -> tuple[str, ...]:
        """Return the nodes that are ready, and yet no good."""
        return tuple(sorted(n for n in self.observed.nodes if self._untrusted(n)))

    def unreachable(self, pod: Pod) -> bool:
        """Return whether nobody can say if ``pod`` still runs: its node is lost, or does not obey."""
        return self.out_of_reach(pod) and not pod.ended

    def out_of_reach(self, pod: Pod) -> bool:
        """Return whether the kubelet of ``pod`` is gone, or does not obey."""
        overdue = self.overdue_at(pod)
        return self._is_lost(pod) or (overdue is not None and overdue <= self.now)

    def overdue_at(self, pod: Pod) -> float | None:
        """Return the Unix time from which a pod that is being deleted counts as unreachable."""
        if pod.deletion_deadline is None or not pod.node:
            return None
        return pod.deletion_deadline + _OVERDUE_SECONDS

    def condemned(self, pod: Pod) -> bool:
        """Return whether ``pod`` runs on GPUs that cannot be trusted."""
        return not pod.ended and self._untrusted(pod.node)

    def condition(self, kind: str) -> Condition | None:
        """Return a condition of the status as it was written last."""
        return next((c for c in self.job.status.conditions if c.type == kind), None)

    def _untrusted(self, name: str) -> bool:
        node = self.observed.nodes.get(name)
        if node is None or not node.unhealthy or self.job.spec.gpus_per_node == 0:
            return False
        return not self.cannot_tell_gpus

    def _is_lost(self, pod: Pod) -> bool:
        """Return whether the node of ``pod`` is lost: not ready, and no sign that the pod lives."""
        node = self._node(pod)
        if node.ready or node.gone:
            return node.gone
        takes_part = pod in self._up or pod is self.observed.rendezvous
        if self.cannot_see or (takes_part and self._world_includes_suspects):
            return False
        given_up = takes_part and self._world_excludes_suspects
        return given_up or self.now >= node.since + GRACE_SECONDS

    @property
    def _world_includes_suspects(self) -> bool:
        """Return whether as many nodes train together, just now, as run: those that are not ready, too.

        One of them may be a pod that was told to go and is out of reach. A lost one is replaced when that
        pod is gone: until then as many train as should.
        """
        size = self._world_size
        return size is not None and size >= len(self._up)

    @property
    def _world_excludes_suspects(self) -> bool:
        """Return whether the others train on without those that are not ready."""
        size = self._world_size
        return (
            size is not None and bool(self.suspects) and size <= len(self._up) - len(self.suspects)
        )

    @property
    def _world_size(self) -> int | None:
        """Return how many nodes train together; None where the last sign of progress is too old to say."""
        sign, said = self._newest_sign, self.observed.witness
        if sign is None or said is None or self.now >= sign + _FRESH_SECONDS:
            return None
        return said.num_nodes

    @property
    def _newest_sign(self) -> float | None:
        """Return the Unix time of the newest step, or other sign, of the processes that answer."""
        said = self.observed.witness
        if said is None:
            return None
        signs = (said.alive, seconds(said.status.last_step_time))
        return max((sign for sign in signs if sign is not None), default=None)

    @cached_property
    def _up(self) -> tuple[Pod, ...]:
        """Return the current pods that run and are not on their way out, whatever their nodes are."""
        return tuple(pod for pod in self.current if pod.running and not pod.deleting)

    def _node(self, pod: Pod) -> NodeView:
        return self.observed.nodes.get(pod.node) or NodeView(pod.node)


def since(condition: Condition | None) -> float | None:
    """Return the Unix time from which a condition has been true; None where it is not."""
    if condition is None or condition.status != "True":
        return None
    return seconds(condition.last_transition_time)


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the first of ``times``, None where there is none."""
    return min((time for time in times if time is not None), default=None)
