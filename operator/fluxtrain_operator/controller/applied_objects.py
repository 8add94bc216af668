"""The supporting objects of all jobs, such as services and pod groups, from metadata alone."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator import names
from fluxtrain_operator.names import Key
from fluxtrain_operator.planner.owner_references import controller_of

Kind = tuple[str, str]
"""API version and kind: three schedulers have a kind PodGroup."""
Name = tuple[str, str]
"""Kind and name of an object in the job's namespace."""


class Applied(NamedTuple):
    """A supporting object in the cluster."""

    uid: str
    applied_hash: str
    """Hash of the manifest that the operator applied last."""
    version: int = 0
    """Its resource version; 0 if unknown."""

    @staticmethod
    def from_object(manifest: Mapping[str, Any]) -> Applied:
        """Return uid, hash and version of the object in ``manifest``."""
        metadata = manifest["metadata"]
        annotations = metadata.get("annotations") or {}
        applied_hash = str(annotations.get(names.ANNOTATION_APPLIED, ""))
        version = str(metadata.get("resourceVersion", ""))
        number = int(version) if version.isdecimal() else 0
        return Applied(str(metadata.get("uid", "")), applied_hash, number)


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
        """Return the number of objects."""
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
        """Return an object of a job."""
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
        return [] if before is not None and _same(before, entry) else _jobs(before, entry)

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

    def _drop(self, at: tuple[Kind, str, str]) -> list[Key]:
        entry = self._entries.pop(at, None)
        if entry is None:
            return []
        objects = self._by_owner[entry.owner_uid]
        del objects[at[0], at[2]]
        if not objects:
            del self._by_owner[entry.owner_uid]
        return [entry.job]


def _same(before: _Entry, after: _Entry) -> bool:
    """Return whether nothing has changed that the planner compares."""
    return (before.owner_uid, *before.applied[:2]) == (after.owner_uid, *after.applied[:2])


def _jobs(before: _Entry | None, after: _Entry) -> list[Key]:
    return sorted({after.job} if before is None else {before.job, after.job})
