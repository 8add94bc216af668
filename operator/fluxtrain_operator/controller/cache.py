"""The informers' cache: jobs, their pods, nodes and supporting objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import Key, Transition, items, mapping, seconds, transition
from fluxtrain_operator.base.node_health import (
    KNOWN_MARKS,
    NO_DISTRUST,
    Distrust,
    Fault,
    NodeMarks,
    Score,
    faults_of,
    ordered,
    score,
)
from fluxtrain_operator.controller.kept_fields import job_of, label, node_of, trimmed
from fluxtrain_operator.planner.observed import (
    TRANSITION,
    NodeView,
    Pod,
    controller_of,
    is_controlled_by,
    newest_time,
)
from fluxtrain_operator.resources.scheduling import NO_STATE, GroupState, group_state

Manifest = Mapping[str, Any]


class Cache:
    """The newest version of each object; of pods only the fields in use, a tenth of the memory."""

    def __init__(
        self, marks: NodeMarks = KNOWN_MARKS, clock: Callable[[], float] = time.time
    ) -> None:
        """Start empty; ``marks`` tell which nodes are unhealthy, ``clock`` the Unix time of a change."""
        self._marks, self._clock = marks, clock
        self._jobs: dict[Key, Manifest] = {}
        self._dependents: dict[Key, set[Key]] = {}
        self._pods: dict[Key, dict[str, Manifest]] = {}
        self._key_of_pod: dict[str, Key] = {}  # by the pod's uid
        self._on_node: dict[str, set[tuple[Key, str]]] = {}  # job keys and pod names by node
        self._final_pods: dict[Key, Manifest] = {}
        self._gone_pods: dict[Key, dict[str, Manifest]] = {}  # by short uid
        self._outdated_jobs: set[Key] = set()  # of before a rollback of etcd
        self._deleted_nodes: set[str] = set()
        self.nodes: dict[str, NodeView] = {}
        self.fault_history = FaultHistory(self.nodes)
        self.applied = AppliedObjects()

    def job(self, key: Key) -> Manifest | None:
        return self._jobs.get(key)

    @property
    def jobs(self) -> list[Key]:
        return list(self._jobs)

    def active_namespaces(self) -> set[str]:
        return {
            namespace
            for (namespace, _), job in self._jobs.items()
            if mapping(job, "status").get("phase") not in ("Complete", "Failed")
        }

    def pods(self, key: Key) -> list[Manifest]:
        """Return the pods that the job controls."""
        uid = self._uid(key)
        return [pod for pod in self._labelled(key) if is_controlled_by(pod, uid)]

    def foreign_pods(self, key: Key) -> list[Manifest]:
        """Return the pods with the job's label that it does not control, such as an earlier job's."""
        uid = self._uid(key)
        return [pod for pod in self._labelled(key) if not is_controlled_by(pod, uid)]

    def final_pod(self, key: Key) -> Manifest | None:
        """Return the pod that reported rank 0's progress when it ended, and is gone; of several the last."""
        return self._final_pods.get(key)

    def gone_pods(self, key: Key) -> list[Manifest]:
        """Return the pods that are gone and were disrupted, until the job's status counts them."""
        return list(self._gone_pods.get(key, {}).values())

    def _labelled(self, key: Key) -> list[Manifest]:
        return list(self._pods.get(key, {}).values())

    def _uid(self, key: Key) -> str:
        job = self._jobs.get(key)
        return str(job["metadata"].get("uid", "")) if job is not None else ""

    @property
    def num_pods(self) -> int:
        return len(self._key_of_pod)

    def misses_pods(self, key: Key) -> bool:
        """Return whether a job has fewer pods than desired, including that of the rendezvous."""
        nodes = (self._jobs.get(key, {}).get("status") or {}).get("nodes") or {}
        return len(self.pods(key)) <= int(nodes.get("desired", 0))

    def set_job(self, manifest: Manifest, deleted: bool = False) -> Key:
        """Store a job, or remove one that is ``deleted``; return its key."""
        key = _key(manifest, str(manifest["metadata"]["name"]))
        cached = self._jobs.get(key)
        is_same = self._uid(key) == manifest["metadata"].get("uid")
        is_newer = key in self._outdated_jobs or _is_newer(manifest, cached)
        if not (deleted and is_same) and not is_newer:
            return key
        self._outdated_jobs.discard(key)
        for predecessor in _start_after(key[0], cached):
            self._dependents[predecessor].discard(key)
            if not self._dependents[predecessor]:
                del self._dependents[predecessor]
        uid = self._uid(key)
        self._jobs.pop(key, None)
        if deleted or uid != manifest["metadata"].get("uid"):
            self._final_pods.pop(key, None)
            self._gone_pods.pop(key, None)
        self._drop_counted(key, manifest)
        self.fault_history.set_job(key, None if deleted else manifest)
        if not deleted:
            metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
            self._jobs[key] = {**manifest, "metadata": metadata}  # they are the longest part
            for predecessor in _start_after(key[0], manifest):
                self._dependents.setdefault(predecessor, set()).add(key)
        return key

    def retain_jobs(self, uids: Container[str], version: int, namespace: str = "") -> list[Key]:
        """Remove the jobs that were not listed; return their keys. As `retain_pods`."""
        unlisted = [
            job
            for key, job in self._jobs.items()
            if namespace in ("", key[0]) and job["metadata"].get("uid") not in uids
            if key in self._outdated_jobs or (_version(job) or 0) <= version
        ]
        return [self.set_job(job, deleted=True) for job in unlisted]

    def before_job_list(self, namespace: str = "") -> Callable[[int], None]:
        """Return what to call with the version of the list that begins now; see `before_pod_list`."""
        cached = {
            key: version
            for key, job in self._jobs.items()
            if namespace in ("", key[0]) and (version := _version(job)) is not None
        }

        def forget(listed: int) -> None:
            for key, version in cached.items():
                job = self._jobs.get(key)
                if version > listed and job is not None and _version(job) == version:
                    self._outdated_jobs.add(key)

        return forget

    def jobs_after(self, key: Key) -> list[Key]:
        """Return the keys of the jobs that start after the job of ``key``, which may not exist."""
        return sorted(self._dependents.get(key, ()))

    def has_version(self, manifest: Manifest) -> bool:
        """Return whether this version of a job is cached: the event is then of our own write."""
        metadata = manifest["metadata"]
        cached = self._jobs.get(_key(manifest, str(metadata["name"])))
        return cached is not None and all(
            cached["metadata"].get(key) == metadata.get(key) for key in ("uid", "resourceVersion")
        )

    def set_pod(self, manifest: Manifest, deleted: bool = False) -> Key | None:
        """Store a pod, or remove one that is ``deleted``; return the key of its job, None if it has none.

        A pod of a job stays so whatever happens to its labels.
        """
        metadata = manifest["metadata"]
        job = job_of(manifest) or label(manifest, names.LABEL_JOB)
        key, name = _key(manifest, job) if job else None, str(metadata["name"])
        before = self._key_of_pod.get(str(metadata.get("uid", "")), key)
        known = self._pods.get(before, {}).get(name) if before is not None else None
        has_moved = before != key  # another owner, or a stranger's with another label
        if before is not None and has_moved and _is_newer(manifest, known):
            self._replace_pod(before, name, None)
        if key is None:
            return before
        cached = self._pods.get(key, {}).get(name)
        if deleted:
            if cached is not None and cached["metadata"].get("uid") == metadata.get("uid"):
                self._replace_pod(key, name, None)
            self._drop_deleted_node(node_of(manifest))
            self._keep_last(key, _with_transition(trimmed(manifest), cached, self._clock()))
        elif _is_newer(manifest, cached):
            self._replace_pod(key, name, _with_transition(trimmed(manifest), cached, self._clock()))
        return key

    def _drop_counted(self, key: Key, job: Manifest) -> None:
        """Forget the pods that are gone and counted in the status of ``job``, or of an earlier attempt."""
        if key not in self._gone_pods:
            return
        status = mapping(job, "status")
        counted = set(items(mapping(status, "restarts"), "countedPods"))
        attempt = status.get("attempt") or 0
        self._gone_pods[key] = {
            uid: pod
            for uid, pod in self._gone_pods[key].items()
            if uid not in counted and Pod.from_object(pod).attempt >= attempt
        }
        if not self._gone_pods[key]:
            del self._gone_pods[key]

    def _keep_last(self, key: Key, pod: Manifest) -> None:
        """Keep the deleted ``pod`` of the job if it was disrupted, or reports rank 0's progress last."""
        if not is_controlled_by(pod, self._uid(key)):
            return
        read = Pod.from_object(pod)
        if read.disruption or read.queue_stop:
            self._gone_pods.setdefault(key, {})[names.short_uid(read.uid)] = pod
            self._drop_counted(key, self._jobs[key])
        if read.final_progress is None:
            return
        known = self._final_pods.get(key)
        if known is None or (newest_time(pod) or 0.0) >= (newest_time(known) or 0.0):
            self._final_pods[key] = pod

    def _replace_pod(self, key: Key, name: str, pod: Manifest | None) -> None:
        """Store ``pod`` under the job's key and its name; None removes it."""
        pods = self._pods.setdefault(key, {})
        if (before := pods.pop(name, None)) is not None:
            self._key_of_pod.pop(str(before["metadata"].get("uid", "")), None)
            on_node = self._on_node[node_of(before)]
            on_node.discard((key, name))
            if not on_node:
                del self._on_node[node_of(before)]
        if pod is not None:
            pods[name] = pod
            self._key_of_pod[str(pod["metadata"].get("uid", ""))] = key
            self._on_node.setdefault(node_of(pod), set()).add((key, name))
        if not pods:
            del self._pods[key]

    def retain_pods(self, uids: Container[str], version: int, namespace: str = "") -> list[Key]:
        """Remove the pods that were not listed; return the keys of their jobs.

        ``uids`` are all pods that existed in ``namespace``, or in all, at ``version``.
        """
        unlisted = [
            pod
            for pods in self._pods.values()
            for pod in pods.values()
            if namespace in ("", pod["metadata"].get("namespace"))
            and pod["metadata"].get("uid") not in uids
            and (_version(pod) or 0) <= version
        ]
        keys = [self.set_pod(pod, deleted=True) for pod in unlisted]
        return [key for key in keys if key is not None]

    def before_pod_list(self, namespace: str = "") -> Callable[[int], None]:
        """Return what to call with the version of the list that begins now, before its pods are stored.

        What was cached before a list is as old as the list, if it was not written since. With a greater
        version it is of before a rollback of etcd: the pods of the list replace it, jobs of any version too.
        """
        pods = [pod for pods in self._pods.values() for pod in pods.values()]
        cached = {
            str(pod["metadata"].get("uid", "")): version
            for pod in pods
            if namespace in ("", pod["metadata"].get("namespace"))
            and (version := _version(pod)) is not None
        }

        def forget(listed: int) -> None:
            is_rolled_back = False
            for uid, version in cached.items():
                if version > listed and (key := self._key_of_pod.get(uid)) is not None:
                    is_rolled_back |= self._forget_version(key, uid, version)
            if is_rolled_back:
                self._outdated_jobs = set(self._jobs)

        return forget

    def _forget_version(self, key: Key, uid: str, version: int) -> bool:
        """Let any version replace the pod with ``uid`` if it has ``version`` still; return whether it has."""
        for name, pod in self._pods[key].items():
            if pod["metadata"].get("uid") == uid and _version(pod) == version:
                metadata = {k: v for k, v in pod["metadata"].items() if k != "resourceVersion"}
                self._pods[key][name] = {**pod, "metadata": metadata}
                return True
        return False

    def update_pod(self, key: Key, manifest: Manifest) -> None:
        """Store the response to a pod's deletion, unless a watch event has removed the pod already."""
        uid = manifest["metadata"]["uid"]
        if any(pod["metadata"]["uid"] == uid for pod in self._labelled(key)):
            self.set_pod(manifest)

    def remove_pod(self, key: Key, uid: str) -> None:
        for pod in self._labelled(key):
            if pod["metadata"]["uid"] == uid:
                self.set_pod(pod, deleted=True)

    def set_node(self, manifest: Manifest, deleted: bool = False) -> list[Key]:
        """Store a node; return the keys of the jobs on it if its view changed.

        A node that is ``deleted`` is kept as not ready while it has pods: they are lost, although their
        status is still Running.
        """
        view = NodeView.from_object(manifest, self._marks)
        view = NodeView(view.name, ready=False, gone=True) if deleted else view
        before = self.nodes.get(view.name)
        now = self._clock()
        view = _with_mark_times(_with_ready_time(view, before, now), before, now)
        self.nodes[view.name] = view
        if before is None or (before.created, before.gone) != (view.created, view.gone):
            self.fault_history.refresh(view.name)
        (self._deleted_nodes.add if deleted else self._deleted_nodes.discard)(view.name)
        self._drop_deleted_node(view.name)
        if before == view:
            return []
        return sorted({key for key, _ in self._on_node.get(view.name, ())})

    def _drop_deleted_node(self, name: str) -> None:
        """Remove a deleted node without pods."""
        if name in self._deleted_nodes and name not in self._on_node:
            self._deleted_nodes.discard(name)
            del self.nodes[name]
            self.fault_history.refresh(name)


def _with_transition(pod: Manifest, cached: Manifest | None, now: float) -> Manifest:
    """Return ``pod`` with its newest transition, which was watched if the ``cached`` pod is the same one."""
    reported = newest_time(pod)
    if reported is None:
        return pod
    metadata = pod["metadata"]
    is_known = cached is not None and cached["metadata"].get("uid") == metadata.get("uid")
    before = cached.get(TRANSITION) if cached is not None and is_known else None
    created = seconds(metadata.get("creationTimestamp")) or 0.0
    newest = transition(reported, before, is_watched=is_known, earliest=created, now=now)
    return {**pod, TRANSITION: newest}


def _with_ready_time(view: NodeView, before: NodeView | None, now: float) -> NodeView:
    """Return ``view`` with the time of its change of ``ready``, watched if ``before`` is the same node."""
    if not view.reported_since:
        return view
    is_known = before is not None and before.created == view.created and not before.gone
    known = (
        Transition(before.reported_since, before.since) if before is not None and is_known else None
    )
    newest = transition(
        view.reported_since, known, is_watched=is_known, earliest=view.created, now=now
    )
    return replace(view, since=newest.time)


def _with_mark_times(view: NodeView, before: NodeView | None, now: float) -> NodeView:
    """Return ``view`` with the times since which it is marked: those of the view ``before``, or ``now``."""
    if view.unhealthy:
        since = before.unhealthy_since if before and before.unhealthy else now
        view = replace(view, unhealthy_since=since)
    if view.problem:
        since = before.problem_since if before and before.problem else now
        view = replace(view, problem_since=since)
    return view


def _key(manifest: Manifest, name: str) -> Key:
    return str(manifest["metadata"].get("namespace", "default")), name


def _start_after(namespace: str, job: Manifest | None) -> list[Key]:
    lifecycle = job.get("spec", {}).get("lifecycle") if job is not None else None
    names = lifecycle.get("startAfter") if isinstance(lifecycle, Mapping) else None
    return [(namespace, name) for name in dict.fromkeys(map(str, names or ()))]


def _is_newer(manifest: Manifest, cached: Manifest | None) -> bool:
    """Return whether ``manifest`` is not older than the ``cached`` version, or object of the same name.

    Watches lag behind writes, and responses to writes behind watches.
    """
    if cached is None:
        return True
    new, old = _version(manifest), _version(cached)
    return new is None or old is None or new >= old


def _version(manifest: Manifest) -> int | None:
    text = str(manifest["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else None  # comparable numbers since Kubernetes 1.35


Kind = tuple[str, str]
"""API version and kind: three schedulers have a kind PodGroup."""
Name = tuple[str, str]
"""Kind and name of an object in the job's namespace."""


class Applied(NamedTuple):
    """A supporting object in the cluster."""

    uid: str
    applied_hash: str
    """Hash of the manifest that the operator applied last."""
    state: GroupState = NO_STATE
    """What its scheduler reports, if it is a pod group of one that reports it."""
    version: int = 0
    """Its resource version; 0 if unknown."""

    @staticmethod
    def from_object(manifest: Mapping[str, Any]) -> Applied:
        metadata = manifest["metadata"]
        annotations = metadata.get("annotations") or {}
        applied_hash = str(annotations.get(names.ANNOTATION_APPLIED, ""))
        version = str(metadata.get("resourceVersion", ""))
        number = int(version) if version.isdecimal() else 0
        uid = str(metadata.get("uid", ""))
        return Applied(uid, applied_hash, group_state(manifest), number)


class _Entry(NamedTuple):
    """An object with its owner, a FluxTraining."""

    job: Key
    owner_uid: str
    applied: Applied


@dataclass
class AppliedObjects:
    """Objects whose controller is a FluxTraining, by its uid; another owner's cost a look-up each."""

    _entries: dict[tuple[Kind, str, str], _Entry] = field(default_factory=dict)
    """By kind, namespace and name."""
    _by_owner: dict[str, dict[tuple[Kind, str], Applied]] = field(default_factory=dict)
    """By the uid of the job, then by kind and name."""

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, uid: str, kinds: Mapping[str, str]) -> dict[Name, Applied]:
        """Return the objects of a job by kind and name; ``kinds`` are API versions by kind."""
        objects = self._by_owner.get(uid, {}).items()
        return {
            (kind, name): applied
            for ((version, kind), name), applied in objects
            if kinds.get(kind) == version
        }

    def get(self, uid: str, kind: Kind, name: str) -> Applied | None:
        return self._by_owner.get(uid, {}).get((kind, name))

    def set(self, kind: Kind, manifest: Mapping[str, Any]) -> list[Key]:
        """Store the newest version of an object; return the jobs for which it has changed."""
        metadata, owner = manifest["metadata"], controller_of(manifest)
        at = kind, str(metadata.get("namespace", "default")), str(metadata["name"])
        before, applied = self._entries.get(at), Applied.from_object(manifest)
        if before is not None and 0 < applied.version < before.applied.version:
            return []  # the watch lags behind our own writes
        if owner.get("kind") != KIND or not owner.get("uid"):
            return self._drop(at)
        entry = _Entry((at[1], str(owner.get("name", ""))), str(owner["uid"]), applied)
        if before is not None and before.owner_uid != entry.owner_uid:
            self._drop(at)
        self._entries[at] = entry
        self._by_owner.setdefault(entry.owner_uid, {})[kind, at[2]] = applied
        if before is None:
            return [entry.job]
        compared = [(each.owner_uid, *each.applied[:3]) for each in (before, entry)]
        return sorted({before.job, entry.job}) if compared[0] != compared[1] else []

    def remove(self, kind: Kind, manifest: Mapping[str, Any]) -> list[Key]:
        """Remove an object, if it has the uid in ``manifest``; return the jobs that have lost it."""
        metadata = manifest["metadata"]
        at = kind, str(metadata.get("namespace", "default")), str(metadata["name"])
        before = self._entries.get(at)
        if before is None or before.applied.uid != str(metadata.get("uid", "")):
            return []
        return self._drop(at)

    def discard(self, uid: str, kind: Kind, namespace: str, name: str) -> None:
        """Forget an object that the job with ``uid`` had under ``name``."""
        at = kind, namespace, name
        if (before := self._entries.get(at)) is not None and before.owner_uid == uid:
            self._drop(at)

    def retain(self, kind: Kind, uids: Container[str], version: int, namespace: str) -> list[Key]:
        """Remove the objects of ``kind`` that were not listed; return the jobs that have lost one.

        ``uids`` are all that existed in ``namespace``, or in all, at ``version``.
        """
        unlisted = [
            at
            for at, entry in self._entries.items()
            if at[0] == kind
            and namespace in ("", at[1])
            and entry.applied.uid not in uids
            and entry.applied.version <= version
        ]
        return [key for at in unlisted for key in self._drop(at)]

    def before_list(self, kind: Kind, namespace: str) -> Callable[[int], None]:
        """Return what to call with the version of the list that begins now; see ``Cache.before_pod_list``."""
        cached = {
            at: entry
            for at, entry in self._entries.items()
            if at[0] == kind and namespace in ("", at[1])
        }

        def forget(listed: int) -> None:
            for at, entry in cached.items():
                if entry.applied.version > listed and self._entries.get(at) is entry:
                    unknown = entry.applied._replace(version=0)
                    self._entries[at] = entry._replace(applied=unknown)
                    self._by_owner[entry.owner_uid][at[0], at[2]] = unknown

        return forget

    def _drop(self, at: tuple[Kind, str, str]) -> list[Key]:
        entry = self._entries.pop(at, None)
        if entry is None:
            return []
        objects = self._by_owner[entry.owner_uid]
        del objects[at[0], at[2]]
        if not objects:
            del self._by_owner[entry.owner_uid]
        return [entry.job]


_REFRESH_SECONDS = 10.0
"""Distrust decays slowly: without new faults it is not computed more often."""


@dataclass
class FaultHistory:
    """Keeps the distrust of nodes; what does not change is not summed again."""

    nodes: Mapping[str, NodeView]
    """The existing nodes; faults of others do not count."""
    _jobs: dict[Key, tuple[object, tuple[Fault, ...]]] = field(default_factory=dict)
    """The list in the status of each job, and its valid faults."""
    _faults: dict[str, dict[Key, list[Fault]]] = field(default_factory=dict)
    """By node and job."""
    _scores: dict[str, Score] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    """Nodes to sum again."""
    _latest: Distrust = NO_DISTRUST

    def __len__(self) -> int:
        """Return the number of jobs with faults of nodes."""
        return len(self._jobs)

    def set_job(self, key: Key, manifest: Mapping[str, Any] | None) -> None:
        """Take the faults in the status of a job; None removes those of a deleted one."""
        status = manifest.get("status") if manifest is not None else None
        listed = status.get("nodeFaults") if isinstance(status, Mapping) else None
        before, old = self._jobs.get(key, (None, ()))
        if (listed or None) == before:
            return
        self._jobs.pop(key, None)
        new = faults_of(status)
        if listed:
            self._jobs[key] = listed, new
        for fault in old:
            if self._faults.get(fault.node, {}).pop(key, None) is not None:
                self.refresh(fault.node)
            if not self._faults.get(fault.node, True):
                del self._faults[fault.node]
        for fault in new:
            self._faults.setdefault(fault.node, {}).setdefault(key, []).append(fault)
            self.refresh(fault.node)

    def refresh(self, node: str) -> None:
        """Sum the faults of ``node`` again: one was added or removed, or the node is a new one."""
        if node in self._faults or node in self._scores:
            self._changed.add(node)

    def distrust(self, now: float) -> Distrust:
        is_fresh = 0.0 <= now - self._latest.now < _REFRESH_SECONDS
        if is_fresh and not self._changed:
            return self._latest
        for name in self._changed:
            view, faults = self.nodes.get(name), self._faults.get(name, {})
            self._scores.pop(name, None)
            if view is not None and not view.gone and faults:
                listed = (fault for of_job in faults.values() for fault in of_job)
                self._scores[name] = score(listed, now, view.created)
        self._changed.clear()
        self._latest = ordered(self._scores, now)
        return self._latest
