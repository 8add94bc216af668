"""PodDefaults: what the administrator of a cluster adds to the pods of every job; the job's values win."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar

from pydantic import Field

from fluxtrain.contract.resource.api_model import ApiModel, LabelKey, LabelValue, Subdomain
from fluxtrain.contract.resource.fluxtraining import EnvironmentVariable, Toleration
from fluxtrain.contract.resource.pod_template import UNIQUE_VARIABLES
from fluxtrain.contract.validation import validate
from fluxtrain.errors import ConfigError

GroupId = Annotated[int, Field(ge=0, le=2**31 - 1)]  # the limit of Kubernetes


class PodDefaults(ApiModel):
    """Defaults of the pods of all jobs. They are not hashed: a change affects new pods only."""

    rules: ClassVar = (UNIQUE_VARIABLES,)

    image_pull_secrets: Annotated[list[Subdomain], Field(max_length=16)] = []
    """Names of secrets in the job's namespace, for all pods."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Tolerations of all pods, in addition to the job's."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = {}
    """Labels that the nodes of training pods must have."""
    env: Annotated[list[EnvironmentVariable], Field(max_length=64)] = []
    """Environment variables of the training container."""
    supplemental_groups: Annotated[list[GroupId], Field(max_length=64)] = []
    """Groups of training pods with GPUs: those of the nodes' device files."""
    flush_caches: bool = False
    """Whether pods of MLPerf's closed division empty their nodes' page caches, in a privileged container."""


NO_DEFAULTS = PodDefaults()


def parse_pod_defaults(text: str) -> PodDefaults:
    """Return the defaults in the JSON ``text``; ConfigError with the field's path for wrong ones."""
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError("podDefaults", text, f"must be JSON: {error}") from None
    return validate(PodDefaults, values, "podDefaults")
