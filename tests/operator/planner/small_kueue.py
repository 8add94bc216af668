"""Kueue's pod groups in a small cluster: gates, quota, evictions, finalizers; as Kueue 0.9 treats pods.

A group is admitted as a whole. Its pods keep a finalizer until they are replaced or the group ends, with its
last pod, as our pods are not retriable. For Kueue a pod of a lost node runs: a replacement is an excess pod.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.planner.observed import Pod

Delete = Callable[[Pod], None]
Put = Callable[[Pod, Pod | None], None]
ENOUGH = 1000
"""A quota, in pods, that admits all groups."""


@dataclass
class Group:
    """The workload of a pod group."""

    total: int
    is_admitted: bool = False
    is_evicted: bool = False
    has_finished: bool = False


class SmallKueue:
    """One queue. Pods are changed by ``put`` and deleted by ``delete``, as by the API server."""

    def __init__(self, put: Put, delete: Delete) -> None:
        self._put, self._delete = put, delete
        self.quota = ENOUGH
        self.groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}
        """Names of groups by the uid of their members."""
        self._totals: dict[str, int] = {}
        """How many pods the group has, as each of its members tells, by uid."""
        self.num_excess = 0
        """Pods that were deleted as a group had more than its number."""

    def mutate(self, pod: Pod, manifest: Manifest) -> Pod:
        """Return the new ``pod`` after the webhook: with a gate and a finalizer, if it is of a group."""
        metadata = manifest["metadata"]
        group = metadata["labels"].get(names.KUEUE_GROUP)
        if group is None:
            return pod
        assert metadata["annotations"][names.KUEUE_RETRIABLE] == "false"
        self._totals[pod.uid] = int(metadata["annotations"][names.KUEUE_COUNT])
        self._group_of[pod.uid] = group
        gate, finalizer = (names.KUEUE_GATE,), (names.KUEUE_FINALIZER,)
        gated = replace(pod, gated=True, gates=gate, waiting="SchedulingGated")
        return replace(gated, finalizers=finalizer)

    def group_of(self, pod: Pod) -> str:
        """Return the name of the pod's group; empty without one."""
        return self._group_of.get(pod.uid, "")

    def act(self, pods: Collection[Pod]) -> None:
        """Reconcile all groups of ``pods`` once; workloads without pods are garbage collected."""
        members: dict[str, list[Pod]] = {}
        for pod in pods:
            if group := self.group_of(pod):
                members.setdefault(group, []).append(pod)
        self.groups = {name: group for name, group in self.groups.items() if name in members}
        for name in sorted(members):
            self._reconcile(name, members[name])

    def evict(self) -> None:
        """Evict the admitted groups, as for one of a higher priority."""
        for group in self.groups.values():
            group.is_evicted = group.is_admitted and not group.has_finished

    def delete_workloads(self, pods: Collection[Pod]) -> None:
        """Delete the workloads: Kueue deletes their pods, and manages them no more."""
        for pod in pods:
            if self.group_of(pod) in self.groups:
                self._delete(pod)
        self.groups = {}

    def _reconcile(self, name: str, pods: list[Pod]) -> None:
        group = self.groups.get(name)
        active = [pod for pod in pods if _is_active(pod)]
        inactive = [pod for pod in pods if not _is_active(pod)]
        if group is None and all(pod.ended for pod in pods):
            return self._release(pods)  # as of a group that has ended
        if group is None:
            self._release(inactive)
            inactive = []
            totals = {self._totals[pod.uid] for pod in active}
            if len(totals) != 1 or len(active) < max(totals):
                return  # not whole, or its pods tell two numbers
            group = self.groups[name] = Group(max(totals))
        if group.has_finished:
            return self._release(pods)
        self._remove_excess(active, group.total)
        num_replaced = len(inactive) + len(active) - group.total
        inactive.sort(key=lambda pod: pod.finished or pod.deletion_deadline or pod.created)
        self._release(inactive[: max(0, num_replaced)])
        if all(pod.phase in ("Failed", "Succeeded") for pod in pods):
            group.has_finished = True
        elif group.is_evicted:
            self._stop(group, active)
        else:
            self._admit(group, active[: group.total])

    def _remove_excess(self, active: list[Pod], total: int) -> None:
        active.sort(key=lambda pod: (not pod.finalizers, pod.gated, int(pod.uid)))
        for pod in active[total:]:
            self.num_excess += 1
            self._put(pod, kept := replace(pod, finalizers=()))
            self._delete(kept)
        del active[total:]

    def _stop(self, group: Group, active: list[Pod]) -> None:
        for pod in active:
            if not (pod.gated or pod.deleting):
                self._delete(pod)
        if not any(pod.phase == "Running" for pod in active):
            group.is_admitted = group.is_evicted = False

    def _admit(self, group: Group, active: list[Pod]) -> None:
        used = sum(other.total for other in self.groups.values() if other.is_admitted)
        if not group.is_admitted and used + group.total <= self.quota:
            group.is_admitted = True
        for pod in active if group.is_admitted else ():
            if pod.gated and not pod.deleting:
                self._put(pod, replace(pod, gated=False, gates=(), waiting=""))

    def _release(self, pods: list[Pod]) -> None:
        """Remove the finalizer of ``pods``: those that are being deleted and do not run are gone."""
        for pod in pods:
            is_gone = pod.deleting and (pod.ended or pod.forced or not pod.node)
            if pod.finalizers:
                self._put(pod, None if is_gone else replace(pod, finalizers=()))


def _is_active(pod: Pod) -> bool:
    """Return whether Kueue counts ``pod``: it runs, will run or has succeeded."""
    return pod.phase != "Failed" and bool(pod.node or not pod.deleting)
