"""The operator's own errors; what a person wrote wrongly is a ConfigError of the contract.

* ConfigError (fluxtrain.errors)
  * TemplateError   a part of spec.podTemplate has a form that no pod has
* ApiError          the API server refused a request, or could not be reached
"""

from __future__ import annotations

from fluxtrain.errors import ConfigError


class TemplateError(ConfigError):
    """A part of ``spec.podTemplate`` has a form that no pod has, such as text where a list must be."""


class ApiError(Exception):
    """The API server refused a request (``status`` is its HTTP code), or could not be reached (0)."""

    def __init__(self, status: int, message: str) -> None:
        """Keep the HTTP ``status`` beside the ``message``."""
        self.status = status
        super().__init__(message)
