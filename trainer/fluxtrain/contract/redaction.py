"""Texts without credentials, for the operator too."""

from fluxtrain.redaction import redacted

__all__ = ["redacted"]
