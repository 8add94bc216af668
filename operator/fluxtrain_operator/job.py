"""Job: one FluxTraining as the planner and the resources see it, checked and resolved once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from fluxtrain.contract.describe import model_of
from fluxtrain.contract.launch import METRICS_PORT
from fluxtrain.contract.resource.fluxtraining import FluxTraining, Spec
from fluxtrain.contract.resource.status import Status, read_status
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.replicas import require_replicas
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.contract.strict_model import StrictModel
from fluxtrain.contract.validation import validate
from fluxtrain_operator.bounds import require_bounded
from fluxtrain_operator.names import MANAGED_BY
from fluxtrain_operator.timestamps import seconds

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

_NOT_OF_PODS = {"nodes", "restart", "lifecycle", "scheduling", "managed_by", "pod_template"}
_HASH_VERSION = "v2-"
_OF_PODS_ONCE = {"image", "gpus_per_node", "gpu_resource", "run", "storage", "network"}


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
    device_groups: tuple[int, ...] = ()
    """Groups of the nodes' GPU device files: the operator's own setting, so none of the hash."""
    unknown: tuple[str, ...] = ()
    """Fields of the spec that a newer definition has, and this operator leaves out."""

    @staticmethod
    def from_object(manifest: Mapping[str, Any], default_image: str) -> Job:
        """Return the job in ``manifest``, as the API server gives it.

        Raises ConfigError, with the paths, for a spec that no trainer would accept.

        The definition may be newer than this operator, and fills in its defaults in every job: fields that
        it alone knows are left out. Not so those of ``spec.run``, which only a person writes.
        """
        _require_bounded(manifest)
        written = {key: value for key, value in manifest.items() if key != "status"}
        unknown: list[str] = []
        training = validate(FluxTraining, _known(FluxTraining, written, "", unknown), "")
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
            unknown=tuple(unknown),
        )

    @property
    def name(self) -> str:
        """Return the job's name."""
        return self.training.metadata.name

    @property
    def namespace(self) -> str:
        """Return the job's namespace."""
        return self.training.metadata.namespace or "default"

    @property
    def spec(self) -> Spec:
        """Return what is wanted."""
        return self.training.spec

    @property
    def status(self) -> Status:
        """Return what the operator wrote last."""
        return self.training.status or Status()

    @property
    def is_ours(self) -> bool:
        """Return whether this operator reconciles the job."""
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
        """Return a hash of what the person wrote of the pods.

        Nothing that the operator adds is in it, nor a field at its default, whoever filled that in: so
        neither an upgrade of the operator nor one of the definition restarts a pod. It is why a default
        never changes.
        """
        written = self.spec.model_dump(
            mode="json", by_alias=True, exclude=_NOT_OF_PODS, exclude_defaults=True
        )
        template = self.spec.pod_template.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude_defaults=True
        )
        return _HASH_VERSION + digest({**written, "podTemplate": template})

    def is_made_for(self, spec_hash: str) -> bool:
        """Return whether a pod, or a config map, with ``spec_hash`` is of this spec."""
        if spec_hash and not spec_hash.startswith(_HASH_VERSION):
            return spec_hash == self.first_spec_hash
        return spec_hash in ("", self.spec_hash)

    @cached_property
    def first_spec_hash(self) -> str:
        """Return the hash with all defaults in it, which pods of 0.1.0's first operators carry.

        Goes when no job is left that one of those started.
        """
        written = self.spec.model_dump(mode="json", by_alias=True, include=_OF_PODS_ONCE)
        return digest({**written, "podTemplate": self.spec.pod_template.written})


def _known(model: type[StrictModel], values: Any, at: str, unknown: list[str]) -> Any:
    """Return ``values`` without the fields that ``model`` refuses as it does not know them.

    Their paths go to ``unknown``.
    """
    if isinstance(values, list):
        return [_known(model, item, f"{at}[{n}]", unknown) for n, item in enumerate(values)]
    if not isinstance(values, Mapping):
        return values
    kept, sections = {}, _sections(model)
    for name, value in values.items():
        path = f"{at}.{name}".strip(".")
        if name not in sections and model.model_config.get("extra") == "forbid":
            unknown.append(path)
            continue
        below = sections.get(name)
        kept[name] = value if below is None else _known(below, value, path, unknown)
    return kept


@cache
def _sections(model: type[StrictModel]) -> dict[str, type[StrictModel] | None]:
    """Return the fields of ``model`` as the file writes them, with the section that each is or lists."""
    fields = model.model_fields.items()
    return {field.alias or name: model_of(field.annotation) for name, field in fields}


def _require_bounded(manifest: Mapping[str, Any]) -> None:
    """Raise ConfigError for a spec that is too much for one job among many, before anything walks it."""
    spec = manifest.get("spec")
    require_bounded(spec, "spec")
    require_bounded(spec.get("podTemplate") if isinstance(spec, dict) else None, "spec.podTemplate")


def digest(value: object) -> str:
    """Return a short hash of ``value``, a tree of JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
