"""What the watches last said: jobs, their pods, and nodes. Read by reconcile, never by waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain_operator import names
from fluxtrain_operator.observed import NodeView
from fluxtrain_operator.work_queue import Key

Manifest = Mapping[str, Any]


class Store:
    """Objects by name, the newest version of each."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._jobs: dict[Key, Manifest] = {}
        self._pods: dict[Key, dict[str, Manifest]] = {}
        self.nodes: dict[str, NodeView] = {}

    def job(self, key: Key) -> Manifest | None:
        """Return the job, or None where there is none."""
        return self._jobs.get(key)

    def jobs(self) -> list[Manifest]:
        """Return all jobs."""
        return list(self._jobs.values())

    def pods(self, key: Key) -> list[Manifest]:
        """Return the pods of a job."""
        return list(self._pods.get(key, {}).values())

    def set_job(self, manifest: Manifest, gone: bool = False) -> Key:
        """Remember, or forget, a job; return its key."""
        key = _key(manifest, str(manifest["metadata"]["name"]))
        if gone:
            self._jobs.pop(key, None)
        elif _newer(manifest, self._jobs.get(key)):
            self._jobs[key] = manifest
        return key

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
            pods[name] = manifest
        if not pods:
            del self._pods[key]
        return key

    def set_node(self, manifest: Manifest, gone: bool = False) -> list[Key]:
        """Remember a node; return the keys of the jobs on it where it matters to them.

        A node that is gone is remembered as not ready: its pods are lost, and still say that they run.
        """
        view = NodeView.from_object(manifest)
        view = NodeView(view.name, ready=False) if gone else view
        before, self.nodes[view.name] = self.nodes.get(view.name), view
        if before == view:
            return []
        return [
            key
            for key, pods in self._pods.items()
            if any(pod.get("spec", {}).get("nodeName") == view.name for pod in pods.values())
        ]


def _key(manifest: Manifest, name: str) -> Key:
    return str(manifest["metadata"].get("namespace", "default")), name


def _newer(manifest: Manifest, known: Manifest | None) -> bool:
    """Return whether ``manifest`` is not older than what is ``known``: watches may lag behind writes."""
    if known is None or known["metadata"].get("uid") != manifest["metadata"].get("uid"):
        return True
    new, old = (_version(object_) for object_ in (manifest, known))
    return new is None or old is None or new >= old


def _version(manifest: Manifest) -> int | None:
    text = str(manifest["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else None  # comparable numbers since Kubernetes 1.35
