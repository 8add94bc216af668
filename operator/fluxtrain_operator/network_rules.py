"""NetworkRules: who may reach the pods of jobs, and what these may reach, as administrators decide."""

from __future__ import annotations

import ipaddress
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fluxtrain.contract.resource.api_model import ApiModel, LabelKey, LabelValue
from fluxtrain.contract.strict_model import Rule
from fluxtrain.contract.validation import validate
from fluxtrain.errors import ConfigError

_MAX_PEERS = 32

Port = Annotated[int, Field(ge=1, le=65_535)]
Cidr = Annotated[
    str,
    Field(
        pattern=r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$",
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
        """Return the peer as Kubernetes reads it."""
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


def parse_network_rules(text: str) -> NetworkRules:
    """Return the rules in the JSON ``text``; ConfigError with the field's path for wrong ones."""
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError("network", text, f"must be JSON: {error}") from None
    return validate(NetworkRules, values, "network")
