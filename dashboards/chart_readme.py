"""The chart's README: a table of all values, from the comments of values.yaml in the form of helm-docs.

A comment that begins with ``--`` describes the key after it. That key may be commented out: then null is a
value of its own, and the key is not set.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).resolve().parents[1] / "charts" / "fluxtrain-operator"
DOCUMENTATION = "https://fluxtrain.dev/docs/operator.md"
_KEY = re.compile(r"( *)(\w+):")
_ABSENT = re.compile(r"( *)# (\w+):$")
_COMMENT = re.compile(r" *# ?(-- )?(.*)")
_TYPES = {bool: "bool", int: "int", str: "string", list: "list", dict: "object"}


class Value(NamedTuple):
    """A row of the table."""

    key: str
    type: str
    default: str
    description: str


def documented() -> list[Value]:
    """Return the described values of values.yaml, in its order."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    rows: list[Value] = []
    owners: list[tuple[int, str]] = []
    words: list[str] = []
    for line in text.splitlines():
        absent = _ABSENT.match(line) if words else None
        if key := absent or _KEY.match(line):
            depth = len(key[1])
            owners = [*(owner for owner in owners if owner[0] < depth), (depth, key[2])]
            path = [name for _, name in owners]
            if words:
                kind, default = ("object", "not set") if absent else _default(values, path)
                rows.append(Value(".".join(path), kind, default, " ".join(words)))
            words = []
        elif comment := _COMMENT.match(line):
            words = [*words, comment[2]] if words or comment[1] else []
        else:
            words = []
    return rows


def _default(values: Any, path: list[str]) -> tuple[str, str]:
    """Return the type and the default of the value at ``path``."""
    for name in path:
        values = values[name]
    return _TYPES[type(values)], f"`{json.dumps(values)}`"


def readme() -> str:
    """Return the page."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    rows = [
        f"| {row.key} | {row.type} | {row.default} | {row.description} |" for row in documented()
    ]
    install = f"$ helm install {chart['name']} oci://REGISTRY/charts/{chart['name']}"
    parts = [
        f"# {chart['name']}",
        f"{chart['description']} Needs Kubernetes {chart['kubeVersion'].removesuffix('-0')}.",
        f"```console\n{install} --namespace fluxtrain-system --create-namespace\n```",
        f"{DOCUMENTATION} says how to operate it. `make chart` writes this page from values.yaml.",
        "## Values",
        "\n".join(
            [
                "| Key | Type | Default | Description |",
                "|-----|------|---------|-------------|",
                *rows,
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"
