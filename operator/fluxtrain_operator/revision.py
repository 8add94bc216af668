"""Revision: what the pods of a job are made from, frozen until the spec changes, named by its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluxtrain.contract.launch import CONFIG_FILE
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain_operator import names
from fluxtrain_operator.digest import digest

MAX_BYTES = 1 << 20
"""The limit of Kubernetes for the data of a config map."""
_PODS_FILE, _SPEC_HASH, _RENDEZVOUS = "pods.json", "spec-hash", "rendezvous-version"

PodSpecs = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Revision:
    """What all pods run that are created for one spec; stored in an immutable config map."""

    name: str = ""
    """Name of the config map: it ends in the hash of the content."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Content of the config map: the resolved config, the pod specs, and the hash of the spec."""
    pod_specs: PodSpecs = field(default_factory=dict)
    """By component, without what differs between slots and without placement; they must not be changed."""

    @staticmethod
    def of(job: str, spec_hash: str, config: str, pod_specs: PodSpecs) -> Revision:
        """Return the revision of the ``job``'s spec. Raises ConfigError if no config map can hold it."""
        pods = json.dumps(pod_specs, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        data = {
            CONFIG_FILE: config,
            _PODS_FILE: pods,
            _SPEC_HASH: spec_hash,
            _RENDEZVOUS: names.RENDEZVOUS_VERSION,
        }
        size = sum(len(text.encode()) for text in data.values())
        if size > MAX_BYTES:
            text = f"the resolved config and the pods have {size >> 10} KiB as JSON"
            raise ConfigError("spec", UNSET, f"{text}; a config map holds {MAX_BYTES >> 10} KiB")
        return Revision(names.revision(job, digest(data)), data, pod_specs)

    @staticmethod
    def from_object(job: str, config_map: Mapping[str, Any]) -> Revision | None:
        """Return the revision in ``config_map``; None if its name does not end in the hash of its content."""
        name, data = config_map["metadata"]["name"], config_map.get("data") or {}
        if names.revision(job, digest(data)) != name:
            return None
        return Revision(name, data, json.loads(data[_PODS_FILE]))

    @property
    def spec_hash(self) -> str:
        """Return the hash of the spec that it was made from."""
        return self.data.get(_SPEC_HASH, "")

    @property
    def rendezvous_version(self) -> str:
        """Return the version of the messages of its agents and its rendezvous."""
        return self.data.get(_RENDEZVOUS, "")
