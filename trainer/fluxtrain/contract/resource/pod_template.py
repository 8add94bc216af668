"""spec.podTemplate: what a person may lay over a job's pods, and which fields stay the operator's."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from fluxtrain.contract.resource.part import GROUP, Image, LabelKey, LabelValue, Name, Part
from fluxtrain.contract.section import Rule

TRAINER = "trainer"
"""Name of the container that trains; overrides of any other make it a sidecar."""
OUR_VARIABLES = ("PET_", "FLUXTRAIN_")
"""Beginnings of the environment variables that the operator sets."""
_OUR_KEYS = (f"{GROUP}/", "app.kubernetes.io/")
_OUR_VOLUMES = ("config", "data", "models", "output")

VariableName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=256,
        title="a variable's name: letters, digits and '_', no digit first",
    ),
]
Note = Annotated[str, Field(max_length=16_384)]
Word = Annotated[str, Field(max_length=4096)]
Others = Annotated[list[dict[str, Any]], Field(max_length=64)]
"""Entries that Kubernetes alone knows; so many of them that no pod has more."""

NOT_OURS = Rule(
    "name",
    (),
    f"must not begin with {' or '.join(OUR_VARIABLES)}: the operator sets those",
    lambda variable: not variable.name.startswith(OUR_VARIABLES),
    " && ".join(f"!self.name.startsWith('{begin}')" for begin in OUR_VARIABLES),
)
"""The rule of every list of variables that a person may write."""


def _belongs_to_us(field: str, instead: str) -> Rule:
    """Return the rule that ``field`` of a pod is left out."""
    return Rule(
        field,
        (),
        f"must be left out: {instead}",
        lambda part: part.look_up(field) is None,
        "false",
    )


def _belongs_to_our_container(field: str, instead: str) -> Rule:
    """Return the rule that ``field`` of the container that trains is left out."""
    return Rule(
        field,
        ("name",),
        f"must be left out where name is {TRAINER}: {instead}",
        lambda container: container.name != TRAINER or container.look_up(field) is None,
        f"self.name != '{TRAINER}'",
    )


def _without_our_keys(field: str) -> Rule:
    """Return the rule that no key of the mapping ``field`` is the operator's."""
    return Rule(
        field,
        (),
        f"must have no keys that begin with {' or '.join(_OUR_KEYS)}: the operator writes those",
        lambda metadata: (
            not any(key.startswith(_OUR_KEYS) for key in metadata.look_up(field) or ())
        ),
        f"self.{field}.all(key, "
        + " && ".join(f"!key.startsWith('{begin}')" for begin in _OUR_KEYS)
        + ")",
    )


class Overrides(Part):
    """A group of a pod's fields; Kubernetes knows more than those named here, and they are passed on."""

    model_config = ConfigDict(extra="allow")


class TemplateMetadata(Part):
    """Labels and annotations beside the operator's own."""

    rules: ClassVar = (_without_our_keys("labels"), _without_our_keys("annotations"))

    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] | None = None
    """Labels of the pods."""
    annotations: Annotated[dict[LabelKey, Note], Field(max_length=64)] | None = None
    """Annotations of the pods."""


class TemplateVariable(Overrides):
    """One variable of a container's environment, with value or valueFrom."""

    rules: ClassVar = (NOT_OURS,)

    name: VariableName
    """Name; PET_* and FLUXTRAIN_* belong to the operator."""


class TemplateContainer(Overrides):
    """A container: ``trainer`` is ours and is changed, any other is a sidecar and is added."""

    rules: ClassVar = (
        _belongs_to_our_container("image", "set spec.image"),
        _belongs_to_our_container("command", "the operator starts the launcher"),
        _belongs_to_our_container("args", "the operator starts the launcher"),
        Rule(
            "name",
            (),
            f"must be {TRAINER}, or the container must have an image",
            lambda container: container.name == TRAINER or container.image is not None,
            f"self.name == '{TRAINER}' || has(self.image)",
        ),
    )

    name: Name
    """Name; ``trainer`` is the one that trains."""
    image: Image | None = None
    """Image of a sidecar."""
    command: Annotated[list[Word], Field(max_length=256)] | None = None
    """Command of a sidecar."""
    args: Annotated[list[Word], Field(max_length=256)] | None = None
    """Arguments of a sidecar."""
    env: Annotated[list[TemplateVariable], Field(max_length=128)] | None = None
    """Variables, added to ours."""
    env_from: Others | None = None
    """Sources of more variables."""
    ports: Others | None = None
    """Ports beside ours."""
    volume_mounts: Others | None = None
    """Where volumes are mounted, beside ours."""


class TemplateInitContainer(Overrides):
    """A container that runs to its end before the others start."""

    name: Name
    """Name."""
    image: Image
    """Image."""
    command: Annotated[list[Word], Field(max_length=256)] | None = None
    """Command."""
    args: Annotated[list[Word], Field(max_length=256)] | None = None
    """Arguments."""
    env: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    """Variables."""
    env_from: Others | None = None
    """Sources of more variables."""
    ports: Others | None = None
    """Ports of a sidecar."""
    volume_mounts: Others | None = None
    """Where volumes are mounted."""


class TemplateVolume(Overrides):
    """A volume, with one of Kubernetes' sources."""

    rules: ClassVar = (
        Rule(
            "name",
            (),
            f"must not be {', '.join(_OUR_VOLUMES)}: set spec.storage for data, models and output",
            lambda volume: volume.name not in _OUR_VOLUMES,
            f"!(self.name in {list(_OUR_VOLUMES)})",
        ),
    )

    name: Name
    """Name; ``shm`` and ``tmp`` are ours and may have another source."""


class TemplateSpec(Overrides):
    """Fields of a PodSpec, laid over the operator's as a strategic merge does."""

    rules: ClassVar = (
        _belongs_to_us("hostname", "peers find the pod by it"),
        _belongs_to_us("subdomain", "peers find the pod by it"),
        _belongs_to_us("restartPolicy", "the operator decides about restarts"),
        _belongs_to_us("hostNetwork", "set spec.network.mode"),
        _belongs_to_us("nodeName", "set spec.scheduling.nodeSelector"),
        _belongs_to_us("schedulingGroup", "set spec.scheduling.gang"),
    )

    containers: Annotated[list[TemplateContainer], Field(max_length=16)] | None = None
    """Changes of the container ``trainer``, and sidecars."""
    init_containers: Annotated[list[TemplateInitContainer], Field(max_length=16)] | None = None
    """Containers that run before."""
    volumes: Annotated[list[TemplateVolume], Field(max_length=64)] | None = None
    """Volumes beside ours."""
    host_aliases: Others | None = None
    """Lines of /etc/hosts."""
    image_pull_secrets: Others | None = None
    """Secrets with which images are fetched."""
    tolerations: Others | None = None
    """Taints that are tolerated, beside those of spec.scheduling."""
    topology_spread_constraints: Others | None = None
    """How pods are spread."""
    scheduling_gates: Others | None = None
    """Gates that others open."""
    security_context: dict[str, Any] | None = None
    """Changes of the pod's security context."""
    hostname: Word | None = None
    """The operator's: peers find the pod by it."""
    subdomain: Word | None = None
    """The operator's: peers find the pod by it."""
    restart_policy: Word | None = None
    """The operator's: it decides about restarts."""
    host_network: bool | None = None
    """The operator's: set spec.network.mode."""
    node_name: Word | None = None
    """The operator's: set spec.scheduling.nodeSelector."""
    scheduling_group: dict[str, Any] | None = None
    """The operator's: set spec.scheduling.gang."""


class PodTemplate(Part):
    """Strategic overrides of the pods, applied last, for what the other fields do not name."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations."""
    spec: TemplateSpec | None = None
    """Fields of the PodSpec."""

    @cached_property
    def written(self) -> dict[str, Any]:
        """Return the fields that the person wrote, as JSON with the names of the file."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
