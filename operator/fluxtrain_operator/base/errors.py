"""The operator's errors; an invalid resource is a ConfigError of the contract.

* ConfigError (fluxtrain.errors)
  * TemplateError   a part of spec.podTemplate has the wrong structure
  * NotPermittedError the administrator's policy does not permit a value
  * UnreadableError reading a job failed with an unexpected error
* ApiError          the API server refused a request or could not be reached
"""

from __future__ import annotations

from fluxtrain.errors import ConfigError


class TemplateError(ConfigError):
    """A part of ``spec.podTemplate`` has the wrong structure, such as a string instead of a list."""


class NotPermittedError(ConfigError):
    """The administrator's policy for jobs does not permit a value."""


class UnreadableError(ConfigError):
    """Reading a job failed with an unexpected error; another operator version, or a retry, may succeed."""


class ApiError(Exception):
    """The API server refused a request (``status`` is the HTTP code), or could not be reached (0)."""

    def __init__(
        self, status: int, message: str, reason: str = "", server_message: str = ""
    ) -> None:
        self.status, self.reason, self.server_message = status, reason, server_message
        super().__init__(message)
