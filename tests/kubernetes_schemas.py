"""Validation by the schemas of Kubernetes, each of which is read once."""

from __future__ import annotations

from functools import cache
from typing import Any

from kubernetes_validate import utils

utils.schema_contents = cache(utils.schema_contents)  # reading takes 15 times as long as validating


def require_valid(manifest: dict[str, Any], version: str) -> None:
    """Raise ValidationError for an object that the API server of ``version`` rejects."""
    utils.validate(manifest, version, strict=True)
