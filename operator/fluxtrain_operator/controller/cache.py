"""The informers' cache: jobs, their pods, nodes and supporting objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fluxtrain_operator import names
from fluxtrain_operator.controller.applied_objects import AppliedObjects
from fluxtrain_operator.controller.creation import job_of
from fluxtrain_operator.controller.kept_fields import label, node_of, trimmed
from fluxtrain_operator.controller.node_ledger import NodeLedger
from fluxtrain_operator.names import Key
from fluxtrain_operator.node_health import KNOWN_MARKS, NodeMarks
from fluxtrain_operator.planner.observed import TRANSITION, NodeView, Pod, newest_time
from fluxtrain_operator.planner.owner_references import is_controlled_by
from fluxtrain_operator.timestamps import seconds
from fluxtrain_operator.transition import Transition, transition

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
        self._deleted_nodes: set[str] = set()
        self.nodes: dict[str, NodeView] = {}
        self.ledger = NodeLedger(self.nodes)
        self.applied = AppliedObjects()

    def job(self, key: Key) -> Manifest | None:
        """Return the job, or None if there is none."""
        return self._jobs.get(key)

    @property
    def jobs(self) -> list[Key]:
        """Return the keys of all jobs."""
        return list(self._jobs)

    def pods(self, key: Key) -> list[Manifest]:
        """Return the pods that the job controls."""
        uid = self._uid(key)
        return [pod for pod in self._labelled(key) if is_controlled_by(pod, uid)]

    def foreign_pods(self, key: Key) -> list[Manifest]:
        """Return the pods with the job's label that it does not control, such as an earlier job's."""
        uid = self._uid(key)
        return [pod for pod in self._labelled(key) if not is_controlled_by(pod, uid)]

    def final_pod(self, key: Key) -> Manifest | None:
        """Return the pod that told rank 0's progress when it ended, and is gone; of several the last."""
        return self._final_pods.get(key)

    def _labelled(self, key: Key) -> list[Manifest]:
        return list(self._pods.get(key, {}).values())

    def _uid(self, key: Key) -> str:
        job = self._jobs.get(key)
        return str(job["metadata"].get("uid", "")) if job is not None else ""

    @property
    def num_pods(self) -> int:
        """Return the number of pods of all jobs."""
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
        if not (deleted and is_same) and not _is_newer(manifest, cached):
            return key
        for predecessor in _start_after(key[0], cached):
            self._dependents[predecessor].discard(key)
            if not self._dependents[predecessor]:
                del self._dependents[predecessor]
        uid = self._uid(key)
        self._jobs.pop(key, None)
        if deleted or uid != manifest["metadata"].get("uid"):
            self._final_pods.pop(key, None)
        self.ledger.set_job(key, None if deleted else manifest)
        if not deleted:
            self._jobs[key] = {**manifest, "metadata": _without_managed_fields(manifest)}
            for predecessor in _start_after(key[0], manifest):
                self._dependents.setdefault(predecessor, set()).add(key)
        return key

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
            self._keep_final(key, _with_transition(trimmed(manifest), cached, self._clock()))
        elif _is_newer(manifest, cached):
            self._replace_pod(key, name, _with_transition(trimmed(manifest), cached, self._clock()))
        return key

    def _keep_final(self, key: Key, pod: Manifest) -> None:
        """Keep the deleted ``pod`` if it is the job's and tells rank 0's progress; of several the last."""
        if not is_controlled_by(pod, self._uid(key)) or Pod.from_object(pod).final_progress is None:
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
            for pod in self._all_pods()
            if namespace in ("", pod["metadata"].get("namespace"))
            and pod["metadata"].get("uid") not in uids
            and (_version(pod) or 0) <= version
        ]
        keys = [self.set_pod(pod, deleted=True) for pod in unlisted]
        return [key for key in keys if key is not None]

    def _all_pods(self) -> Iterator[Manifest]:
        for pods in self._pods.values():
            yield from pods.values()

    def update_pod(self, key: Key, manifest: Manifest) -> None:
        """Store the response to a pod's deletion, unless a watch event has removed the pod already."""
        uid = manifest["metadata"]["uid"]
        if any(pod["metadata"]["uid"] == uid for pod in self._labelled(key)):
            self.set_pod(manifest)

    def remove_pod(self, key: Key, uid: str) -> None:
        """Remove the pod with ``uid``."""
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
            self.ledger.refresh(view.name)
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
            self.ledger.refresh(name)


def _with_transition(pod: Manifest, cached: Manifest | None, now: float) -> Manifest:
    """Return ``pod`` with its newest transition, which was watched if the ``cached`` pod is the same one."""
    told = newest_time(pod)
    if told is None:
        return pod
    metadata = pod["metadata"]
    is_known = cached is not None and cached["metadata"].get("uid") == metadata.get("uid")
    before = cached.get(TRANSITION) if cached is not None and is_known else None
    created = seconds(metadata.get("creationTimestamp")) or 0.0
    newest = transition(told, before, is_watched=is_known, earliest=created, now=now)
    return {**pod, TRANSITION: newest}


def _with_ready_time(view: NodeView, before: NodeView | None, now: float) -> NodeView:
    """Return ``view`` with the time of its change of ``ready``, watched if ``before`` is the same node."""
    if not view.told_since:
        return view
    is_known = before is not None and before.created == view.created and not before.gone
    known = Transition(before.told_since, before.since) if before is not None and is_known else None
    newest = transition(view.told_since, known, is_watched=is_known, earliest=view.created, now=now)
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


def _without_managed_fields(manifest: Manifest) -> Manifest:
    """Return the metadata without the managed fields, the longest part of most objects."""
    return {key: value for key, value in manifest["metadata"].items() if key != "managedFields"}


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
