"""What kubectl's messages mean, and the exit code of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from re import Match, Pattern

from fluxtrain.contract.resource.fluxtraining import PLURAL
from fluxtrain.errors import EXIT_ERROR, EXIT_USAGE

_KLOG = re.compile(r"^[EWIF]\d{4} ")
"""Beginning of a line that kubectl's libraries log for developers."""
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)"'
    r' in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]*)")?'
)
_PREFIX = re.compile(r"^(error: )?(Error from server(?: \(\w+\))?: )?", re.IGNORECASE)
_NO_SERVER = "localhost:8080"
"""kubectl's address if neither a kubeconfig nor an option names an API server."""


class KubectlError(Exception):
    """kubectl failed; the text is for people."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR, not_found: bool = False) -> None:
        """Keep ``message``, the ``exit_code`` of the plugin, and whether the object does not exist."""
        self.exit_code, self.not_found = exit_code, not_found
        super().__init__(message)


def error_of(stderr: str) -> KubectlError:
    """Return the error that kubectl's ``stderr`` reports."""
    lines = [line for line in stderr.splitlines() if line.strip() and not _KLOG.match(line)]
    text = "\n".join(line for line in lines if not line.startswith("Warning:"))
    for pattern, make in _ERRORS:
        if match := pattern.search(text):
            return make(match, text)
    return KubectlError(_plain(text) or "kubectl failed without a message")


def _plain(text: str) -> str:
    return _PREFIX.sub("", text.strip())


def _forbidden(match: Match[str], text: str) -> KubectlError:
    right = match["resource"] + (f".{match['group']}" if match["group"] else "")
    within = f" in namespace {match['namespace']}" if match["namespace"] else ""
    return KubectlError(
        f"forbidden: user {match['user']} lacks the right to {match['verb']} {right}{within}; "
        "ask for a role that grants it"
    )


def _unreachable(match: Match[str], text: str) -> KubectlError:
    if _NO_SERVER in text:
        message = "no API server: kubectl has no kubeconfig; set KUBECONFIG, or use --kubeconfig or --server"
        return KubectlError(message, EXIT_USAGE)
    return KubectlError(f"the API server cannot be reached: {_plain(text).splitlines()[-1]}")


def _kubeconfig(match: Match[str], text: str) -> KubectlError:
    return KubectlError(f"kubeconfig: {_plain(text)}", EXIT_USAGE)


def _option(match: Match[str], text: str) -> KubectlError:
    return KubectlError(_plain(text).splitlines()[0], EXIT_USAGE)


def _unauthorized(match: Match[str], text: str) -> KubectlError:
    return KubectlError("the API server does not accept the credentials of the kubeconfig")


def _no_definition(match: Match[str], text: str) -> KubectlError:
    if match[1] != PLURAL:
        return KubectlError(f"the cluster does not serve {match[1]}", not_found=True)
    return KubectlError(
        "the cluster does not know FluxTraining: install the operator's chart, which has its definition"
    )


def _not_found(match: Match[str], text: str) -> KubectlError:
    return KubectlError(_plain(text), not_found=True)


_ERRORS: tuple[tuple[Pattern[str], Callable[[Match[str], str], KubectlError]], ...] = (
    (_FORBIDDEN, _forbidden),
    (re.compile(r"was refused - did you specify|Unable to connect to the server"), _unreachable),
    (re.compile(r"i/o timeout|context deadline exceeded|request canceled"), _unreachable),
    (re.compile(r"You must be logged in to the server"), _unauthorized),
    (re.compile(r'the server doesn\'t have a resource type "([^"]+)"'), _no_definition),
    (re.compile(r"\(NotFound\)"), _not_found),
    (re.compile(r"Error in configuration|error loading config|^error: stat "), _kubeconfig),
    (re.compile(r"no server found for cluster|auth info .* does not exist"), _kubeconfig),
    (re.compile(r"context .* does not exist|unable to read client-"), _kubeconfig),
    (re.compile(r"Invalid timeout value|unknown flag|invalid argument"), _option),
)
"""Patterns of kubectl's messages in order: the first that occurs decides."""
