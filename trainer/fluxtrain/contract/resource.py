"""FluxTraining: the resource that a cluster and a laptop read alike."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from fluxtrain.contract.config import Section


class Part(Section):
    """A group of fields that are written in camelCase, as Kubernetes does."""

    model_config = ConfigDict(alias_generator=to_camel)


class Metadata(Part):
    """Name and labels; everything else that Kubernetes puts there is left alone."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class Nodes(Part):
    """How many nodes train: one pod and one torchrun agent each."""

    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Start when this many are up."""
    max: Annotated[int, Field(ge=1, le=4096)] = 1
    """Use at most this many."""


class Spec(Part):
    """What is wanted."""

    model_config = ConfigDict(extra="allow")

    nodes: Nodes = Nodes()
    """Size of the job."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each node; 0 trains on the CPU."""
    run: dict[str, Any]
    """The training itself."""


class FluxTraining(Part):
    """One training job."""

    api_version: Literal["fluxtrain.dev/v1alpha1"]
    kind: Literal["FluxTraining"]
    metadata: Metadata
    spec: Spec
