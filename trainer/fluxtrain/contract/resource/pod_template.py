"""spec.podTemplate: a patch for a job's pods, and the fields that are reserved for the operator."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from fluxtrain.contract.resource.api_model import GROUP, ApiModel, Image, LabelKey, LabelValue, Name
from fluxtrain.contract.resource.credentials import NO_LITERAL_CREDENTIAL
from fluxtrain.contract.strict_model import Rule

TRAINER = "trainer"
"""Name of the training container; a container with any other name is a sidecar."""
RESERVED_PREFIXES = ("PET_", "FLUXTRAIN_")
"""Prefixes of the environment variables that the operator sets."""
_RESERVED_KEYS = (f"{GROUP}/", "app.kubernetes.io/")
FLUSH_CONTAINER, FLUSHED_VOLUME = "flush-caches", "flushed"
"""The operator's privileged init container, and the volume that it writes a file into as root."""
KEY_VOLUME = "rendezvous-key"
_RESERVED_VOLUMES = ("config", "data", "models", "output", KEY_VOLUME, FLUSHED_VOLUME)

VariableName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=256,
        title="a variable's name: letters, digits and '_', no digit first",
    ),
]
AnnotationValue = Annotated[str, Field(max_length=16_384)]
VariableValue = Annotated[str, Field(max_length=16_384)]
Text = Annotated[str, Field(max_length=4096)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=64)]
"""Kubernetes objects that are passed on unchecked; the bound is above what any pod has."""

RESERVED_NAMES = Rule(
    "name",
    f"must not begin with {' or '.join(RESERVED_PREFIXES)}: the operator sets those",
    lambda variable: not variable.name.startswith(RESERVED_PREFIXES),
    " && ".join(f"!self.name.startsWith('{begin}')" for begin in RESERVED_PREFIXES),
)
"""The rule of every environment variable."""
UNIQUE_VARIABLES = Rule(
    "env",
    "must not contain a name twice",
    lambda owner: len({variable.name for variable in owner.env}) == len(owner.env),
    "self.env.all(one, self.env.exists_one(other, other.name == one.name))",
)
"""The rule of what has a list ``env`` of environment variables."""


def _reserved(field: str, instead: str) -> Rule:
    """Return the rule that ``field`` of the pod is not set."""
    message = f"must be left out: {instead}"
    return Rule(field, message, lambda part: part.look_up(field) is None, "false")


def _reserved_in_trainer(field: str, instead: str) -> Rule:
    """Return the rule that ``field`` of the training container is not set."""
    return Rule(
        field,
        f"must be left out if name is {TRAINER}: {instead}",
        lambda container: container.name != TRAINER or container.look_up(field) is None,
        f"self.name != '{TRAINER}'",
        others=("name",),
    )


def _without_reserved_keys(field: str) -> Rule:
    """Return the rule that the mapping ``field`` has no key reserved for the operator."""
    return Rule(
        field,
        f"must have no keys that begin with {' or '.join(_RESERVED_KEYS)}: the operator sets those",
        lambda metadata: (
            not any(key.startswith(_RESERVED_KEYS) for key in metadata.look_up(field) or ())
        ),
        f"self.{field}.all(key, "
        + " && ".join(f"!key.startsWith('{begin}')" for begin in _RESERVED_KEYS)
        + ")",
    )


class OpenModel(ApiModel):
    """A model whose other fields are passed on to Kubernetes unchecked."""

    model_config = ConfigDict(extra="allow")


class TemplateMetadata(ApiModel):
    """Additional labels and annotations."""

    rules: ClassVar = (_without_reserved_keys("labels"), _without_reserved_keys("annotations"))

    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] | None = None
    """Labels of the pods."""
    annotations: Annotated[dict[LabelKey, AnnotationValue], Field(max_length=64)] | None = None
    """Annotations of the pods."""


class TemplateVariable(OpenModel):
    """An environment variable of a container, with value or valueFrom."""

    rules: ClassVar = (RESERVED_NAMES, NO_LITERAL_CREDENTIAL)

    name: VariableName
    """Name; PET_* and FLUXTRAIN_* are reserved for the operator."""
    value: VariableValue | None = None
    """Value; credentials belong in a Secret."""


class TemplateInitVariable(OpenModel):
    """An environment variable of an init container, with value or valueFrom."""

    rules: ClassVar = (NO_LITERAL_CREDENTIAL,)

    name: Annotated[str, Field(max_length=256)]
    """Name."""
    value: VariableValue | None = None
    """Value; credentials belong in a Secret."""


class TemplateMount(OpenModel):
    """A volume mount of a container."""

    rules: ClassVar = (
        Rule(
            "name",
            f"must not be {FLUSHED_VOLUME}: only the operator's containers mount it",
            lambda mount: mount.name != FLUSHED_VOLUME,
            f"!has(self.name) || self.name != '{FLUSHED_VOLUME}'",
        ),
    )

    name: Text | None = None
    """Name of the volume."""


Mounts = Annotated[list[TemplateMount], Field(max_length=64)]


class TemplateContainer(OpenModel):
    """A container: ``trainer`` patches the training container, any other name adds a sidecar."""

    rules: ClassVar = (
        _reserved_in_trainer("image", "set spec.image"),
        _reserved_in_trainer("command", "the operator sets the command"),
        _reserved_in_trainer("args", "the operator sets the command"),
        Rule(
            "name",
            f"must be {TRAINER}, or the container must have an image",
            lambda container: container.name == TRAINER or container.image is not None,
            f"self.name == '{TRAINER}' || has(self.image)",
        ),
    )

    name: Name
    """Name; ``trainer`` is the training container."""
    image: Image | None = None
    """Image of a sidecar."""
    command: Annotated[list[Text], Field(max_length=256)] | None = None
    """Command of a sidecar."""
    args: Annotated[list[Text], Field(max_length=256)] | None = None
    """Arguments of a sidecar."""
    env: Annotated[list[TemplateVariable], Field(max_length=128)] | None = None
    """Additional environment variables."""
    env_from: Objects | None = None
    """Sources of additional environment variables."""
    ports: Objects | None = None
    """Additional ports."""
    volume_mounts: Mounts | None = None
    """Additional volume mounts."""


class TemplateInitContainer(OpenModel):
    """An init container."""

    rules: ClassVar = (
        Rule(
            "name",
            f"must not be {FLUSH_CONTAINER}: that is the operator's",
            lambda container: container.name != FLUSH_CONTAINER,
            f"self.name != '{FLUSH_CONTAINER}'",
        ),
    )

    name: Name
    """Name of the container."""
    image: Image
    """Image of the container."""
    command: Annotated[list[Text], Field(max_length=256)] | None = None
    """Command of the container."""
    args: Annotated[list[Text], Field(max_length=256)] | None = None
    """Arguments of the container."""
    env: Annotated[list[TemplateInitVariable], Field(max_length=128)] | None = None
    """Environment variables."""
    env_from: Objects | None = None
    """Sources of additional environment variables."""
    ports: Objects | None = None
    """Ports of a sidecar."""
    volume_mounts: Mounts | None = None
    """Volume mounts."""


class TemplateVolume(OpenModel):
    """A volume with any volume source of Kubernetes."""

    rules: ClassVar = (
        Rule(
            "name",
            f"must not be {', '.join(_RESERVED_VOLUMES)}: set spec.storage for data, models and output",
            lambda volume: volume.name not in _RESERVED_VOLUMES,
            f"!(self.name in {list(_RESERVED_VOLUMES)})",
        ),
    )

    name: Name
    """Name; ``shm`` and ``tmp`` replace the operator's volumes."""


class TemplateSpec(OpenModel):
    """Fields of a PodSpec, merged into the operator's by the rules of a strategic merge patch."""

    rules: ClassVar = (
        _reserved("hostname", "the other pods resolve it"),
        _reserved("subdomain", "the other pods resolve it"),
        _reserved("restartPolicy", "the operator restarts pods"),
        _reserved("hostNetwork", "set spec.network.mode"),
        _reserved("nodeName", "set spec.scheduling.nodeSelector"),
        _reserved("schedulingGroup", "set spec.scheduling.gang"),
    )

    containers: Annotated[list[TemplateContainer], Field(max_length=16)] | None = None
    """Patch of the container ``trainer``, and sidecars."""
    init_containers: Annotated[list[TemplateInitContainer], Field(max_length=16)] | None = None
    """Additional init containers."""
    volumes: Annotated[list[TemplateVolume], Field(max_length=64)] | None = None
    """Additional volumes."""
    host_aliases: Objects | None = None
    """Entries of /etc/hosts."""
    image_pull_secrets: Objects | None = None
    """Secrets for pulling images."""
    tolerations: Objects | None = None
    """Tolerations in addition to those of spec.scheduling."""
    topology_spread_constraints: Objects | None = None
    """Topology spread constraints."""
    scheduling_gates: Objects | None = None
    """Scheduling gates, removed by another controller."""
    security_context: dict[str, Any] | None = None
    """Patch of the pod's security context."""
    hostname: Text | None = None
    """Reserved: the other pods resolve it."""
    subdomain: Text | None = None
    """Reserved: the other pods resolve it."""
    restart_policy: Text | None = None
    """Reserved: the operator restarts pods."""
    host_network: bool | None = None
    """Reserved: set spec.network.mode."""
    node_name: Text | None = None
    """Reserved: set spec.scheduling.nodeSelector."""
    scheduling_group: dict[str, Any] | None = None
    """Reserved: set spec.scheduling.gang."""


class PodTemplate(ApiModel):
    """Strategic merge patch for the pods, without directives; applied last, for what no field covers."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations."""
    spec: TemplateSpec | None = None
    """Patch of the PodSpec."""

    @cached_property
    def written(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON with the names of the file."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
