"""What the watches last said: jobs, their pods, and nodes. Read by reconcile, never by waiting."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from fluxtrain_operator import names
from fluxtrain_operator.observed import NodeView
from fluxtrain_operator.owners import is_of
from fluxtrain_operator.work_queue import Key

Manifest = Mapping[str, Any]


class Store:
    """Objects by name, the newest version of each; of pods only what is looked at, a tenth of the memory."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._jobs: dict[Key, Manifest] = {}
        self._waiting: dict[Key, set[Key]] = {}
        self._pods: dict[Key, dict[str, Manifest]] = {}
        self._gone: set[str] = set()
        self._doubted: set[Key] = set()
        self.nodes: dict[str, NodeView] = {}
        self.is_filled = False  # with everything that there was at the start

    def job(self, key: Key) -> Manifest | None:
        """Return the job, or None where there is none."""
        return self._jobs.get(key)

    def pods(self, key: Key) -> list[Manifest]:
        """Return the job's own pods: those that the job that is there now controls."""
        uid = self._uid(key)
        return [pod for pod in self._labelled(key) if is_of(pod, uid)]

    def strangers(self, key: Key) -> list[Manifest]:
        """Return the pods that only say that they are the job's: of an earlier one, or of nobody."""
        uid = self._uid(key)
        return [pod for pod in self._labelled(key) if not is_of(pod, uid)]

    def _labelled(self, key: Key) -> list[Manifest]:
        return list(self._pods.get(key, {}).values())

    def _uid(self, key: Key) -> str:
        job = self._jobs.get(key)
        return str(job["metadata"].get("uid", "")) if job is not None else ""

    def set_job(self, manifest: Manifest, gone: bool = False) -> Key:
        """Remember, or forget, a job; return its key."""
        key = _key(manifest, str(manifest["metadata"]["name"]))
        known = self._jobs.get(key)
        if not gone and not _newer(manifest, known):
            return key
        for before in _start_after(key[0], known):
            self._waiting[before].discard(key)
            if not self._waiting[before]:
                del self._waiting[before]
        self._jobs.pop(key, None)
        if not gone:
            self._jobs[key] = {**manifest, "metadata": _without_managers(manifest)}
            for before in _start_after(key[0], manifest):
                self._waiting.setdefault(before, set()).add(key)
        return key

    def waiting_for(self, key: Key) -> list[Key]:
        """Return the keys of the jobs that start after the job of ``key``, which need not exist."""
        return sorted(self._waiting.get(key, ()))

    def knows(self, manifest: Manifest) -> bool:
        """Return whether this very version of a job is known: our own write, that is, heard back."""
        metadata = manifest["metadata"]
        known = self._jobs.get(_key(manifest, str(metadata["name"])))
        return known is not None and all(
            known["metadata"].get(key) == metadata.get(key) for key in ("uid", "resourceVersion")
        )

    def set_pod(self, manifest: Manifest, gone: bool = False) -> Key | None:
        """Remember, or forget, a pod; return the key of its job, None where it has none."""
        metadata = manifest["metadata"]
        job = metadata.get("labels", {}).get(names.LABEL_JOB)
        if job is None:
            return None
        key = _key(manifest, str(job))
        pods, name = self._pods.setdefault(key, {}), str(metadata["name"])
        known = pods.get(name)
        if gone:
            if known is None or known["metadata"].get("uid") == metadata.get("uid"):
                pods.pop(name, None)
        elif _newer(manifest, known):
            pods[name] = _essence(manifest)
        if not pods:
            del self._pods[key]
            self._doubted.discard(key)
        if gone:
            self._forget_node(_node_of(manifest))
        return key

    def doubt(self, key: Key) -> None:
        """Note that a watch began anew: what went in between, nobody told."""
        self._doubted.add(key)

    def doubts(self, key: Key) -> bool:
        """Return whether pods of the job may be gone that are remembered here."""
        return key in self._doubted

    def keep_pods(self, key: Key, uids: Container[str], version: int) -> None:
        """Forget the pods of a job that are not among ``uids``, all that there were at ``version``."""
        for pod in self._labelled(key):
            changed = _version(pod)
            made_since = changed is not None and changed > version
            if pod["metadata"]["uid"] not in uids and not made_since:
                self.set_pod(pod, gone=True)
        self._doubted.discard(key)

    def drop_pod(self, key: Key, uid: str) -> None:
        """Forget the pod of that ``uid``, which is no more."""
        for pod in self._labelled(key):
            if pod["metadata"]["uid"] == uid:
                self.set_pod(pod, gone=True)

    def set_node(self, manifest: Manifest, gone: bool = False) -> list[Key]:
        """Remember a node; return the keys of the jobs on it where it matters to them.

        A node that is gone is remembered as not ready as long as there are pods on it: they are lost, and
        still say that they run.
        """
        view = NodeView.from_object(manifest)
        view = NodeView(view.name, ready=False, gone=True) if gone else view
        before, self.nodes[view.name] = self.nodes.get(view.name), view
        (self._gone.add if gone else self._gone.discard)(view.name)
        self._forget_node(view.name)
        return [] if before == view else self._on(view.name)

    def _on(self, node: str) -> list[Key]:
        """Return the jobs that have pods on ``node``."""
        return [
            key
            for key, pods in self._pods.items()
            if any(_node_of(pod) == node for pod in pods.values())
        ]

    def _forget_node(self, name: str) -> None:
        """Forget a node that is gone, and has no pods any more."""
        if name in self._gone and not self._on(name):
            self._gone.discard(name)
            del self.nodes[name]


def _key(manifest: Manifest, name: str) -> Key:
    return str(manifest["metadata"].get("namespace", "default")), name


def _start_after(namespace: str, job: Manifest | None) -> list[Key]:
    lifecycle = job.get("spec", {}).get("lifecycle") if job is not None else None
    names = lifecycle.get("startAfter") if isinstance(lifecycle, Mapping) else None
    return [(namespace, str(name)) for name in names or ()]


def _essence(pod: Manifest) -> Manifest:
    """Return what ``observed`` reads of a pod."""
    kept = {key: pod[key] for key in ("kind", "status") if key in pod}
    gates = pod.get("spec", {}).get("schedulingGates")
    spec = {"nodeName": _node_of(pod), **({"schedulingGates": gates} if gates else {})}
    return {**kept, "metadata": _without_managers(pod), "spec": spec}


def _without_managers(manifest: Manifest) -> Manifest:
    """Return the metadata without the list of who wrote which field: the longest part of most objects."""
    return {key: value for key, value in manifest["metadata"].items() if key != "managedFields"}


def _node_of(pod: Manifest) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")


def _newer(manifest: Manifest, known: Manifest | None) -> bool:
    """Return whether ``manifest`` is not older than what is ``known``: watches may lag behind writes."""
    if known is None or known["metadata"].get("uid") != manifest["metadata"].get("uid"):
        return True
    new, old = (_version(object_) for object_ in (manifest, known))
    return new is None or old is None or new >= old


def _version(manifest: Manifest) -> int | None:
    text = str(manifest["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else None  # comparable numbers since Kubernetes 1.35
