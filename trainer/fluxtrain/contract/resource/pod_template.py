"""spec.podTemplate: a patch for a job's pods, and the fields that are reserved for the operator."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from fluxtrain.contract.model_base import (
    GROUP,
    ApiModel,
    Image,
    LabelKey,
    LabelValue,
    Name,
    Quantity,
    Rule,
    Subdomain,
)

_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTP", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTP", 1)},
}


def amount(quantity: str) -> Decimal:
    """Return the value of a Kubernetes quantity, such as 0.5 for 500m; it must match `Quantity`."""
    number = quantity.rstrip("mkMGTPKi")
    return Decimal(number) * _SUFFIXES[quantity.removeprefix(number)]


class Amounts(ApiModel):
    """Amounts of CPU and memory."""

    cpu: Quantity | None = None
    """CPUs, such as "16" or 500m."""
    memory: Quantity | None = None
    """Memory, such as 256Gi."""


def _at_most_the_limit(name: str) -> Rule:
    return Rule(
        f"requests.{name}",
        "must be at most the limit",
        lambda resources: _fits(resources, name),
        f"quantity(self.requests.{name}).compareTo(quantity(self.limits.{name})) <= 0",
        others=(f"limits.{name}",),
    )


def _fits(resources: Resources | RendezvousResources, name: str) -> bool:
    request, limit = getattr(resources.requests, name), getattr(resources.limits, name)
    return request is None or limit is None or amount(request) <= amount(limit)


class RendezvousResources(ApiModel):
    """CPU and memory of the rendezvous container."""

    rules: ClassVar = (_at_most_the_limit("cpu"), _at_most_the_limit("memory"))

    requests: Amounts = Amounts()
    """Requests; unset ones are 50m CPU and 256Mi, at most the limit; "0" requests nothing."""
    limits: Amounts = Amounts()
    """Limits; unset ones are 2Gi of memory, at least the request, and no limit of CPU."""


class Resources(ApiModel):
    """CPU and memory of the training container; its GPUs are ``spec.gpusPerNode``."""

    rules: ClassVar = (_at_most_the_limit("cpu"), _at_most_the_limit("memory"))

    requests: Amounts = Amounts()
    """Requests; unset ones are the limit, or 2 CPUs and 8Gi per GPU and the memory of snapshots; "0" requests
    nothing."""
    limits: Amounts = Amounts()
    """Limits; unset ones are unlimited. Shared memory and snapshots in memory count as memory."""
    shared_memory: Quantity | None = None
    """Maximum size of /dev/shm; if unset, computed from the batches that the data loaders keep in it."""
    rendezvous: RendezvousResources = RendezvousResources()
    """Those of the rendezvous container; unset ones are the chart's podDefaults.rendezvous.resources."""


_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
OutputFolder = Annotated[
    str,
    Field(
        pattern=f"^{_PART}(/{_PART})*$",
        max_length=253,
        title="a relative path of letters, digits, '.', '_', '-' and '/', such as july/run-03",
    ),
]


FetchPlace = Annotated[
    str,
    Field(
        pattern=r"^(hf://[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[A-Za-z0-9_.-]+)?|(s3|gs|az|https?)://[^/?#@ ]+|)"
        r"(/[^?#@]*)?$",
        min_length=1,
        max_length=1024,
        title="hf://ORG/NAME, a folder at s3://, gs://, az:// or https://, or an absolute path, without a "
        "user or a query",
    ),
]


class PersistentVolumeClaim(ApiModel):
    """A PersistentVolumeClaim in the job's namespace."""

    claim_name: Subdomain
    """Name of the claim."""
    read_only: bool = False
    """Mount it read-only."""


class HostPath(ApiModel):
    """A folder of the node; Pod Security's baseline and restricted levels refuse it."""

    rules: ClassVar = (
        Rule(
            "path",
            "must not contain '..', '.' or '//': patterns of allowed paths compare it as it is",
            lambda volume: (
                "//" not in volume.path and not {".", ".."}.intersection(volume.path.split("/"))
            ),
            "!self.path.contains('//') && !self.path.split('/').exists(part, part == '..' || part == '.')",
        ),
    )

    path: Annotated[
        str, Field(pattern=r"^/", max_length=1024, title="an absolute path, beginning with /")
    ]
    """Absolute path on the node."""


class EmptyDir(ApiModel):
    """An empty folder that is deleted with the pod."""

    size_limit: Quantity | None = None
    """Maximum size."""


_VOLUME_KINDS = ("persistentVolumeClaim", "hostPath", "emptyDir")


class Volume(ApiModel):
    """Exactly one kind of volume."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "",
            f"exactly one of {', '.join(_VOLUME_KINDS)} must be set",
            lambda volume: sum(volume.look_up(kind) is not None for kind in _VOLUME_KINDS) == 1,
            f"{' + '.join(f'(has(self.{kind}) ? 1 : 0)' for kind in _VOLUME_KINDS)} == 1",
        ),
    )

    persistent_volume_claim: PersistentVolumeClaim | None = None
    """A PersistentVolumeClaim."""
    host_path: HostPath | None = None
    """A folder of the node."""
    empty_dir: EmptyDir | None = None
    """An empty folder that is deleted with the pod."""


class ModelsVolume(Volume):
    """A volume of models, which the job may fill."""

    rules: ClassVar = (
        *Volume.rules,
        Rule(
            "fetch",
            "must be left out if the claim is readOnly: it writes the models to the volume",
            lambda it: not (it.fetch and it.look_up("persistentVolumeClaim.readOnly")),
            "!has(self.fetch) || !has(self.persistentVolumeClaim) || !self.persistentVolumeClaim.readOnly",
            others=("persistentVolumeClaim",),
        ),
    )

    fetch: FetchPlace | None = None
    """Where an init container fetches the models from that the run misses in the volume, resumed and
    verified: hf://ORG/NAME[@REVISION], such as hf://black-forest-labs/FLUX.1-dev, a folder at s3://, gs://,
    az:// or https://, or one in the pod. Tokens come from ``credentials``. If unset, nothing is fetched."""


class Storage(ApiModel):
    """Volumes mounted at /data, /models and /output; an emptyDir for each that is not set."""

    data: Volume | None = None
    """Mounted at /data, read-only but for prepare and preprocess, and for a data.cache in it: the root of
    relative data paths."""
    models: ModelsVolume | None = None
    """Mounted at /models, read-only: the root of relative model paths."""
    output: Volume | None = None
    """Mounted at /output: checkpoints, logs and images; if unset, they are lost with the pod."""
    output_folder: OutputFolder | None = None
    """Folder in the output volume that the job writes to, so that several jobs share a volume; created if it
    is missing; if unset, the volume's root."""
    isolated: bool = False
    """Mount only the folder NAMESPACE/NAME of the output volume at /output, as a ``subPath`` that the kubelet
    creates: a program of the job cannot reach the results of other jobs. ``outputFolder`` is within it."""


_NAMES = ("_TOKEN", "_SECRET", "_KEY", "_PASSWORD")
"""How the names of variables with credentials end: HF_TOKEN, AWS_SECRET_ACCESS_KEY, WANDB_API_KEY."""
_VALUES = ("hf_", "AKIA", "ASIA", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_")
"""How tokens of Hugging Face, AWS and GitHub begin; those have 20 characters or more."""
_MIN_LENGTH = 20


def _holds(variable: Any) -> bool:
    value = variable.value or ""
    is_reference = value.startswith("$(") and value.endswith(")")
    named = variable.name.upper().endswith(_NAMES)
    looks_like_one = len(value) >= _MIN_LENGTH and value.startswith(_VALUES)
    return not value or is_reference or not (named or looks_like_one)


_KEY_SECRET = "-key-[0-9a-f]{8}$"
"""How the names of the operator's Secrets with the keys of rendezvous services end."""

NO_RENDEZVOUS_KEY = Rule(
    "credentials",
    "must not end with -key- and eight hexadecimal digits: the operator's own Secrets have such names",
    lambda spec: not any(re.search(_KEY_SECRET, name) for name in spec.credentials),
    f"!self.credentials.exists(name, name.matches('{_KEY_SECRET}'))",
)
"""The rule of the spec: the key of one job is no variable of another."""


def _any(test: str, words: tuple[str, ...]) -> str:
    return " || ".join(f"{test}('{word}')" for word in words)


NO_LITERAL_CREDENTIAL = Rule(
    "value",
    "must not be a credential: put it into a Secret, and name that in spec.credentials or in valueFrom",
    _holds,
    "self.value == '' || (self.value.startsWith('$(') && self.value.endsWith(')')) || "
    f"!({_any('self.name.upperAscii().endsWith', _NAMES)} || "
    f"(self.value.size() >= {_MIN_LENGTH} && ({_any('self.value.startsWith', _VALUES)})))",
    others=("name",),
)
"""The rule of every environment variable: what is in a resource, can be read by whoever may view it."""


TRAINER = "trainer"
"""Name of the training container; a container with any other name is a sidecar."""
RESERVED_PREFIXES = ("PET_", "FLUXTRAIN_")
"""Prefixes of the environment variables that the operator sets."""
_RESERVED_KEYS = (f"{GROUP}/", "app.kubernetes.io/")
FETCH_CONTAINER = "fetch-models"
"""The operator's init container that fills the models volume."""
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
LongText = Annotated[str, Field(max_length=16_384)]
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


def _reserved(field: str, instead: str) -> Rule:
    message = f"must be left out: {instead}"
    return Rule(field, message, lambda part: part.look_up(field) is None, "false")


def _reserved_in_trainer(field: str, instead: str) -> Rule:
    return Rule(
        field,
        f"must be left out if name is {TRAINER}: {instead}",
        lambda container: container.name != TRAINER or container.look_up(field) is None,
        f"self.name != '{TRAINER}'",
        others=("name",),
    )


def _without_reserved_keys(field: str) -> Rule:
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
    annotations: Annotated[dict[LabelKey, LongText], Field(max_length=64)] | None = None
    """Annotations of the pods."""


class TemplateVariable(OpenModel):
    """An environment variable of a container, with value or valueFrom."""

    rules: ClassVar = (RESERVED_NAMES, NO_LITERAL_CREDENTIAL)

    name: VariableName
    """Name; PET_* and FLUXTRAIN_* are reserved for the operator."""
    value: LongText | None = None
    """Value; credentials belong in a Secret."""


class TemplateInitVariable(OpenModel):
    """An environment variable of an init container, with value or valueFrom."""

    rules: ClassVar = (NO_LITERAL_CREDENTIAL,)

    name: Annotated[str, Field(max_length=256)]
    """Name."""
    value: LongText | None = None
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
            f"must not be {FLUSH_CONTAINER} or {FETCH_CONTAINER}: those are the operator's",
            lambda container: container.name not in (FLUSH_CONTAINER, FETCH_CONTAINER),
            f"self.name != '{FLUSH_CONTAINER}' && self.name != '{FETCH_CONTAINER}'",
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
    """Patch of the pod's security context; null removes a field, such as ``runAsUser`` where the cluster
    chooses users."""
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
