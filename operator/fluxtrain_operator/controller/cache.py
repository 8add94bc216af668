"""What the watches last said: jobs, their pods, and nodes. Read by reconcile, never by waiting."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluxtrain_operator import names
from fluxtrain_operator.names import Key
from fluxtrain_operator.planner.observed import NodeView
from fluxtrain_operator.planner.owners import controller, is_of

Manifest = Mapping[str, Any]

_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "annotations",
    "finalizers",
    "ownerReferences",
)
_STATUS = ("phase", "reason", "message", "podIP", "conditions", "containerStatuses")
_CONDITION = ("type", "status", "reason", "message")
_CONTAINER = ("name", "state")
"""What is looked at: of a pod, of its status, of a condition and of a container in it."""


class Applied(NamedTuple):
    """An object around the pods, as it was found or made."""

    uid: str
    hashed: str
    """Hash of what the operator had wanted."""

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> Applied:
        """Return what matters of ``manifest``."""
        metadata = manifest["metadata"]
        notes = metadata.get("annotations") or {}
        return Applied(str(metadata.get("uid", "")), str(notes.get(names.ANNOTATION_APPLIED, "")))


@dataclass
class Support:
    """What was around the pods of all jobs, as it was listed last."""

    at: float = float("-inf")
    """When the list was begun, by the monotonic clock."""
    _found: dict[tuple[str, str], dict[tuple[str, str], Applied]] = field(default_factory=dict)
    """By namespace and uid of the job; by kind and name."""
    _jobs: dict[tuple[str, str], Key] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of jobs around whose pods there is something."""
        return len(self._found)

    def add(self, kind: str, manifest: Manifest) -> None:
        """Take in an object of ``kind``; one that no job controls is nobody's."""
        metadata, uid = manifest["metadata"], controller(manifest).get("uid")
        job = (metadata.get("labels") or {}).get(names.LABEL_JOB)
        if job is None or not uid:
            return
        place = str(metadata.get("namespace", "default")), str(uid)
        self._jobs[place] = (place[0], str(job))
        self._found.setdefault(place, {})[kind, str(metadata["name"])] = Applied.of(manifest)

    def of(self, namespace: str, uid: str) -> dict[tuple[str, str], Applied]:
        """Return what is around a job's pods, by kind and name."""
        return dict(self._found.get((namespace, uid), {}))

    def differs(self, before: Support) -> list[Key]:
        """Return the jobs around whose pods something is not as it was ``before``."""
        places = self._found.keys() | before._found.keys()
        jobs = {**before._jobs, **self._jobs}
        changed = (p for p in places if self._found.get(p) != before._found.get(p))
        return sorted({jobs[place] for place in changed})


class Cache:
    """Objects by name, the newest version of each; of pods only what is looked at, a tenth of the memory."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._jobs: dict[Key, Manifest] = {}
        self._waiting: dict[Key, set[Key]] = {}
        self._pods: dict[Key, dict[str, Manifest]] = {}
        self._on: dict[str, set[tuple[Key, str]]] = {}  # by node: keys of jobs and names of pods
        self._gone: set[str] = set()
        self.nodes: dict[str, NodeView] = {}
        self.support = Support()

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

    def is_short(self, key: Key) -> bool:
        """Return whether a job has fewer pods than were asked for, that of the rendezvous included."""
        nodes = (self._jobs.get(key, {}).get("status") or {}).get("nodes") or {}
        return len(self.pods(key)) <= int(nodes.get("desired", 0))

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
        pods, name = self._pods.get(key, {}), str(metadata["name"])
        known = pods.get(name)
        if gone:
            if known is not None and known["metadata"].get("uid") == metadata.get("uid"):
                self._put(key, name, None)
            self._forget_node(_node_of(manifest))
        elif _newer(manifest, known):
            self._put(key, name, _essence(manifest))
        return key

    def _put(self, key: Key, name: str, pod: Manifest | None) -> None:
        """Have ``pod`` in the place of the job's pod of that name; None: have none there."""
        pods = self._pods.setdefault(key, {})
        if (before := pods.pop(name, None)) is not None:
            there = self._on[_node_of(before)]
            there.discard((key, name))
            if not there:
                del self._on[_node_of(before)]
        if pod is not None:
            pods[name] = pod
            self._on.setdefault(_node_of(pod), set()).add((key, name))
        if not pods:
            del self._pods[key]

    def keep_pods(self, uids: Container[str], version: int, namespace: str = "") -> list[Key]:
        """Forget the pods that are not among ``uids``, all that there were at ``version``; return whose.

        A ``namespace``: they were all that there were in it.
        """
        missing = [
            pod
            for pod in self._all_pods()
            if namespace in ("", pod["metadata"].get("namespace"))
            and pod["metadata"].get("uid") not in uids
            and (_version(pod) or 0) <= version
        ]
        keys = [self.set_pod(pod, gone=True) for pod in missing]
        return [key for key in keys if key is not None]

    def _all_pods(self) -> Iterator[Manifest]:
        for pods in self._pods.values():
            yield from pods.values()

    def update_pod(self, key: Key, manifest: Manifest) -> None:
        """Take in the answer to a pod's deletion, unless a watch has told already that the pod is gone."""
        if any(
            pod["metadata"]["uid"] == manifest["metadata"]["uid"] for pod in self._labelled(key)
        ):
            self.set_pod(manifest)

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
        return [] if before == view else sorted({key for key, _ in self._on.get(view.name, ())})

    def _forget_node(self, name: str) -> None:
        """Forget a node that is gone, and has no pods any more."""
        if name in self._gone and name not in self._on:
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
    gates = pod.get("spec", {}).get("schedulingGates")
    spec = {"nodeName": _node_of(pod), **({"schedulingGates": gates} if gates else {})}
    kept = {"kind": pod["kind"]} if "kind" in pod else {}
    status = {"status": _status(pod["status"])} if "status" in pod else {}
    return {**kept, "metadata": _only(pod["metadata"], _METADATA), "spec": spec, **status}


def _status(status: Manifest) -> Manifest:
    kept: dict[str, Any] = _only(status, _STATUS)
    for key, fields in (("conditions", _CONDITION), ("containerStatuses", _CONTAINER)):
        if isinstance(items := kept.get(key), list):
            kept[key] = [_only(item, fields) for item in items]
    return kept


def _only(of: Any, keys: tuple[str, ...]) -> Any:
    """Return what a mapping has of ``keys``; what is no mapping as it is."""
    return {key: of[key] for key in keys if key in of} if isinstance(of, Mapping) else of


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
