"""Calls of kubectl, with the user's own configuration."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from fluxtrain.errors import UNSET, ConfigError

_TIMEOUT_SECONDS = 180.0


def kubectl(namespace: str | None, *arguments: str, stdin: str = "") -> str:
    """Return the output of kubectl in ``namespace`` (None: its default); ConfigError if it fails."""
    if (program := shutil.which("kubectl")) is None:
        raise ConfigError("kubectl", UNSET, "needs kubectl on the PATH")
    options = [] if namespace is None else [f"--namespace={namespace}"]
    verb, *rest = arguments
    try:
        completed = subprocess.run(
            [program, verb, *options, *rest],
            input=stdin.encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"kubectl timed out after {_TIMEOUT_SECONDS:.0f} seconds"
        raise ConfigError("kubectl", " ".join(arguments), text) from None
    if completed.returncode:
        text = completed.stderr.decode("utf-8", "replace").strip()
        raise ConfigError("kubectl", " ".join(arguments), text)
    return completed.stdout.decode("utf-8", "replace")


def items(kind: str, selector: str, namespace: str | None) -> list[dict[str, Any]]:
    """Return the objects of a kind with the labels ``selector``, by name; ConfigError for an empty one."""
    if not selector.strip():  # of all objects
        raise ConfigError("--selector", selector, "must not be empty, such as campaign=NAME")
    text = kubectl(namespace, "get", kind, f"--selector={selector}", "--output=json")
    found: list[dict[str, Any]] = json.loads(text)["items"]
    return sorted(found, key=lambda item: str(item["metadata"]["name"]))
