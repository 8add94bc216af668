"""JobPolicy: what the administrator lets jobs ask for; the chart's value ``jobs``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.contract.resource.api_model import ApiModel
from fluxtrain.contract.validation import validate
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
    """Whether ``spec.network.mode: host`` is allowed."""
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


def parse_job_policy(text: str) -> JobPolicy:
    """Return the policy in the JSON ``text``; ConfigError with the field's path for a wrong one."""
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError("jobs", text, f"must be JSON: {error}") from None
    return validate(JobPolicy, values, "jobs")
