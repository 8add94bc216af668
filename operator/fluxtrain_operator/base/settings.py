"""JobPolicy: what the administrator lets jobs ask for; the chart's value ``jobs``."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.model_base import (
    ApiModel,
    LabelKey,
    LabelValue,
    Model,
    Rule,
    Subdomain,
    validate,
)
from fluxtrain.contract.resource.fluxtraining import EnvironmentVariable, Toleration
from fluxtrain.contract.resource.pod_template import UNIQUE_VARIABLES, RendezvousResources
from fluxtrain.errors import ConfigError

Pattern = Annotated[
    str,
    Field(
        pattern=r"^!?[^\s!*]*\*?$",
        min_length=1,
        max_length=1024,
        title="a value, the beginning of one followed by *, or either after ! to exclude it",
    ),
]


class JobPolicy(ApiModel):
    """What a job may ask for. A list allows values that match one of its patterns and no excluding one."""

    pod_template: Literal["none", "restricted", "any"] = "restricted"
    """Fields of ``spec.podTemplate``: none; those of Pod Security's level restricted; or any."""
    host_network: bool = False
    """Whether ``spec.network.mode: Host`` is allowed."""
    host_paths: Annotated[list[Pattern], Field(max_length=64)] = []
    """Folders of nodes that may be mounted."""
    images: Annotated[list[Pattern], Field(max_length=64)] = ["*"]
    """Images, as they are written; a job that names none runs the operator's, which needs no entry."""
    secrets: Annotated[list[Pattern], Field(max_length=64)] = ["*"]
    """Secrets whose content containers may get."""
    service_accounts: Annotated[list[Pattern], Field(max_length=64)] = ["default"]
    """Service accounts of the pods."""
    priority_classes: Annotated[list[Pattern], Field(max_length=64)] = ["*", "!system-*"]
    """Priority classes of the pods."""
    node_selectors: Annotated[list[Pattern], Field(max_length=64)] = ["*"]
    """Keys of node labels in node selectors and node affinities."""
    tolerations: Annotated[list[Pattern], Field(max_length=64)] = [
        "*",
        "!node-role.kubernetes.io/*",
        "!node.kubernetes.io/unschedulable",
    ]
    """Keys of tolerated taints. A toleration without a key needs ``*`` and no excluding pattern."""

    def allows(self, field: str, value: object) -> bool:
        """Return whether the list ``field``, by its name in the file, allows ``value``.

        An empty text stands for every value.
        """
        patterns: list[str] = self.look_up(field)
        excluded = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
        allowed = [pattern for pattern in patterns if not pattern.startswith("!")]
        if not isinstance(value, str):
            return False
        if not value:
            return "*" in allowed and not excluded
        return _matches(value, allowed) and not _matches(value, excluded)


DEFAULT_POLICY = JobPolicy()


def _matches(value: str, patterns: Iterable[str]) -> bool:
    """Return whether ``value`` is one of ``patterns``, or begins with one that ends in ``*``."""
    return any(
        value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern
        for pattern in patterns
    )


def parse_json(model: type[Model], text: str, field: str) -> Model:
    """Return the JSON ``text`` of the chart's value ``field`` as ``model``, its defaults if it is empty.

    Raises ConfigError with the path of what is wrong.
    """
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(field, text, f"must be JSON: {error}") from None
    return validate(model, values, field)


parse_job_policy = partial(parse_json, JobPolicy, field="jobs")


GroupId = Annotated[int, Field(ge=0, le=2**31 - 1)]  # the limit of Kubernetes


_POD_SECURITY = {
    "runAsNonRoot": True,
    # the user of our images; set here as other images need not have one
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 1000),
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


class RendezvousDefaults(ApiModel):
    """Defaults of the rendezvous pods of all jobs."""

    resources: RendezvousResources = RendezvousResources()
    """CPU and memory, which ``spec.resources.rendezvous`` overrides; a change affects every new pod."""


class PodDefaults(ApiModel):
    """Defaults of the pods of all jobs. They are not hashed: a change affects new pods only."""

    rules: ClassVar = (UNIQUE_VARIABLES,)

    image_pull_secrets: Annotated[list[Subdomain], Field(max_length=16)] = []
    """Names of secrets in the job's namespace, for all pods."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Tolerations of all pods, in addition to the job's."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = {}
    """Labels that the nodes of all pods must have."""
    env: Annotated[list[EnvironmentVariable], Field(max_length=64)] = []
    """Environment variables of the training container."""
    supplemental_groups: Annotated[list[GroupId], Field(max_length=64)] = []
    """Groups of training pods with GPUs: those of the nodes' device files."""
    security_context: dict[str, Any] | None = _POD_SECURITY
    """Security context of all pods, as a whole; null: none, as OpenShift chooses users itself."""
    flush_caches: bool = False
    """Whether pods of MLPerf's closed division empty their nodes' page caches, in a privileged container."""
    rendezvous: RendezvousDefaults = RendezvousDefaults()
    """Of the rendezvous pods."""


NO_DEFAULTS = PodDefaults()


parse_pod_defaults = partial(parse_json, PodDefaults, field="podDefaults")


# NetworkRules: who may reach the pods of jobs, and what these may reach, as administrators decide.


_MAX_PEERS = 32

Port = Annotated[int, Field(ge=1, le=65_535)]
_OCTET = r"(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f.:]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
Cidr = Annotated[
    str,
    Field(
        pattern=rf"^({_OCTET}(\.{_OCTET}){{3}}/(3[0-2]|[12]?[0-9])|{_IPV6})$",
        max_length=64,
        title="a range of addresses such as 10.20.0.0/16",
    ),
]


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


class LabelSelector(ApiModel):
    """Kubernetes' label selector; an empty one selects all."""

    match_labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=16)] = {}
    """Labels that all must be there."""


class IpBlock(ApiModel):
    """Kubernetes' range of addresses."""

    rules: ClassVar = (
        Rule(
            "cidr",
            "must be the first address of a range and its prefix length, such as 10.20.0.0/16",
            lambda block: _is_network(block.cidr),
            "true",
        ),
        Rule(
            "except",
            "must be ranges inside cidr",
            lambda block: not _is_network(block.cidr) or all(map(block.contains, block.excluded)),
            "true",
        ),
    )

    cidr: Cidr
    """The range."""
    excluded: Annotated[list[Cidr], Field(max_length=16, alias="except")] = []
    """Ranges inside it that do not count."""

    def contains(self, text: str) -> bool:
        """Return whether the range ``text`` is valid and inside this one."""
        if not _is_network(text):
            return False
        whole, part = ipaddress.ip_network(self.cidr), ipaddress.ip_network(text)
        return whole.version == part.version and part.subnet_of(whole)  # type: ignore[arg-type]


class Peer(ApiModel):
    """Kubernetes' NetworkPolicyPeer: pods by their labels and those of their namespaces, or addresses."""

    rules: ClassVar = (
        Rule(
            "ipBlock",
            "must be given alone, or namespaceSelector, podSelector or both: an empty peer is all or nothing",
            lambda peer: (
                (peer.ip_block is None)
                != (peer.namespace_selector is None and peer.pod_selector is None)
            ),
            "true",
        ),
    )

    namespace_selector: LabelSelector | None = None
    """Labels of the pods' namespace; if unset, the namespace of each job."""
    pod_selector: LabelSelector | None = None
    """Labels of the pods; if unset, all of the namespaces."""
    ip_block: IpBlock | None = None
    """Addresses outside the cluster, or those of nodes, whose host network pods have."""

    def manifest(self) -> dict[str, Any]:
        return self.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, exclude={"ports"}
        )


class Destination(Peer):
    """A peer that pods of jobs may connect to."""

    ports: Annotated[list[Port], Field(max_length=16)] = []
    """Its TCP ports; if empty, all ports of all protocols."""


Peers = Annotated[list[Peer], Field(max_length=_MAX_PEERS)]
_KUBE_SYSTEM = LabelSelector.model_validate(
    {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
)


class NetworkRules(ApiModel):
    """What the NetworkPolicies of all jobs admit; a change applies to running jobs at once."""

    operator: Annotated[list[Peer], Field(min_length=1, max_length=_MAX_PEERS)] | None = None
    """The operator itself, which reads the progress. If unset, all pods: it runs outside the cluster, at an
    address that it does not know."""
    metrics_from: Peers = []
    """Who else may reach the metrics port of the jobs: Prometheus."""
    egress: Literal["any", "restricted"] = "any"
    """``restricted``: pods reach each other, name servers and ``egressTo``, and nothing else."""
    dns: Peers = [Peer(namespaceSelector=_KUBE_SYSTEM)]
    """Name servers, at port 53."""
    egress_to: Annotated[list[Destination], Field(max_length=_MAX_PEERS)] = []
    """Stores of data, hubs and proxies, which pods reach although egress is restricted."""


NO_RULES = NetworkRules()


parse_network_rules = partial(parse_json, NetworkRules, field="network")
