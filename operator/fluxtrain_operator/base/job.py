"""Job: a validated FluxTraining with its resolved config, as the planner and the resources read it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fluxtrain.contract.model_base import StrictModel, model_of, validate
from fluxtrain.contract.process import CONFIG_FILE, METRICS_PORT
from fluxtrain.contract.resource.fluxtraining import FluxTraining, Spec
from fluxtrain.contract.resource.status import Status, read_status
from fluxtrain.contract.run.config import RunConfig, require_replicas
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import MANAGED_BY, digest, mapping, require_bounded, seconds
from fluxtrain_operator.base.settings import NO_DEFAULTS, NO_RULES, NetworkRules, PodDefaults

# Revision: what the pods of a job are made from, frozen until the spec changes, named by its
# content.


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
        return self.data.get(_SPEC_HASH, "")

    @property
    def rendezvous_version(self) -> str:
        """Return the version of the messages of its agents and its rendezvous."""
        return self.data.get(_RENDEZVOUS, "")


Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

_NOT_HASHED = {"nodes", "restart", "lifecycle", "scheduling", "managed_by", "pod_template"}
_HASH_VERSION = "v2-"


@dataclass(frozen=True)
class Job:
    """A valid FluxTraining, its resolved config, and what the API server adds."""

    training: FluxTraining
    config: RunConfig
    uid: str
    generation: int
    created: float
    image: str
    deleting: bool = False
    rendezvous_image: str = ""
    """Image of the rendezvous pod; empty: that of the job. A setting of the operator, which is not hashed."""
    pod_defaults: PodDefaults = NO_DEFAULTS
    """What the pods get if the job does not set it. A setting of the operator, which is not hashed."""
    network_rules: NetworkRules = NO_RULES
    """What the network policy admits. A setting of the operator, which is not hashed."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that only a newer definition has; this operator ignores them."""
    pod_templates: Mapping[str, Manifest] = field(default_factory=dict)
    """Pods by component, without what differs between slots; they must not be changed."""
    spec_revision: Revision = field(default_factory=Revision)
    """What this operator makes of the spec; pods of the job may have an earlier revision."""

    @staticmethod
    def from_object(manifest: Mapping[str, Any], default_image: str) -> Job:
        """Return the job in ``manifest``. Raises ConfigError, with the paths, for an invalid spec.

        A definition that is newer than this operator adds its defaults to every job, so unknown fields are
        ignored; except in ``spec.run``, which has no defaults.
        """
        require_bounded(manifest.get("spec"), "spec")
        require_bounded(mapping(manifest, "spec").get("podTemplate"), "spec.podTemplate")
        spec = {key: value for key, value in manifest.items() if key != "status"}
        unknown: list[str] = []
        training = validate(FluxTraining, _known_fields(FluxTraining, spec, "", unknown), "")
        training = training.model_copy(update={"status": read_status(manifest.get("status"))})
        metadata = manifest["metadata"]
        config = resolve(training.spec.run)
        if config.task == "train":
            require_replicas(config, training.spec.rank_counts)
        return Job(
            training=training,
            config=config,
            uid=metadata.get("uid", ""),
            generation=metadata.get("generation", 1),
            created=seconds(metadata.get("creationTimestamp")) or 0.0,
            image=training.spec.image or default_image,
            deleting="deletionTimestamp" in metadata,
            unknown_fields=tuple(unknown),
        )

    def with_status(self, manifest: Mapping[str, Any]) -> Job:
        """Return the job with the status and generation of ``manifest``, which has the same spec."""
        job = copy.copy(self)  # keeps what was computed from the spec
        status = read_status(manifest.get("status"))
        training = self.training.model_copy(update={"status": status})
        generation = manifest["metadata"].get("generation", 1)
        vars(job).update(training=training, generation=generation)
        return job

    @property
    def name(self) -> str:
        return self.training.metadata.name

    @property
    def namespace(self) -> str:
        return self.training.metadata.namespace or "default"

    @property
    def spec(self) -> Spec:
        return self.training.spec

    @property
    def status(self) -> Status:
        """Return the status that was written last."""
        return self.training.status or Status()

    @property
    def is_managed(self) -> bool:
        return self.spec.managed_by == MANAGED_BY

    @property
    def metrics_port(self) -> int:
        """Return the port of /metrics and /progress in the training pods."""
        return self.config.logging.metrics_port or METRICS_PORT

    @cached_property
    def config_json(self) -> str:
        """Return the resolved config as the trainer reads it."""
        return self.config.model_dump_json(indent=2) + "\n"  # 40 µs; json.dumps takes 250 µs

    @cached_property
    def spec_hash(self) -> str:
        """Return a hash of the fields that determine the pods.

        Fields at their defaults, and what the operator adds, are left out: so no upgrade of the operator or
        of the definition restarts a pod. Therefore a default must never change.
        """
        fields = self.spec.model_dump(
            mode="json", by_alias=True, exclude=_NOT_HASHED, exclude_defaults=True
        )
        template = self.spec.pod_template.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude_defaults=True
        )
        return _HASH_VERSION + digest({**fields, "podTemplate": template})


def _known_fields(model: type[StrictModel], values: Any, at: str, unknown: list[str]) -> Any:
    """Return ``values`` without the unknown fields that ``model`` forbids; add their paths to ``unknown``."""
    if isinstance(values, list):
        return [_known_fields(model, item, f"{at}[{n}]", unknown) for n, item in enumerate(values)]
    if not isinstance(values, Mapping):
        return values
    known, sections = {}, _sections(model)
    for name, value in values.items():
        path = f"{at}.{name}".strip(".")
        if name not in sections and model.model_config.get("extra") == "forbid":
            unknown.append(path)
            continue
        section = sections.get(name)
        known[name] = value if section is None else _known_fields(section, value, path, unknown)
    return known


@cache
def _sections(model: type[StrictModel]) -> dict[str, type[StrictModel] | None]:
    """Return the fields of ``model`` by alias, each with its section, or that of its items."""
    fields = model.model_fields.items()
    return {field.alias or name: model_of(field.annotation) for name, field in fields}
