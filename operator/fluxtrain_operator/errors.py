"""The operator's own errors; what a person wrote wrongly is a ConfigError of the contract.

* ConfigError (fluxtrain.errors)
  * TemplateError   a part of spec.podTemplate has a form that no pod has
  * UnreadableError the operator stumbles over a job, for whatever reason
* ApiError          the API server refused a request, or could not be reached
"""

from __future__ import annotations

from fluxtrain.errors import ConfigError


class TemplateError(ConfigError):
    """A part of ``spec.podTemplate`` has a form that no pod has, such as text where a list must be."""


class UnreadableError(ConfigError):
    """The operator stumbles over a job; another version of it, or a moment later, it may not."""


class ApiError(Exception):
    """The API server refused a request (``status`` is its HTTP code), or could not be reached (0)."""

    def __init__(self, status: int, message: str, reason: str = "", said: str = "") -> None:
        """Keep the HTTP ``status``; ``reason`` and ``said`` are the API server's own."""
        self.status, self.reason, self.said = status, reason, said
        super().__init__(message)
