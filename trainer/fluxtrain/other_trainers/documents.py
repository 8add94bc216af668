"""Read a small file of another trainer: TOML, JSON or YAML."""

from __future__ import annotations

import json
from pathlib import Path

from fluxtrain.contract.resource.document import parse_yaml, read_text
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.toml_text import parse_toml

_DEEPEST = 32


def read_document(path: Path) -> object:
    """Return what ``path`` holds, which is small.

    Raises ConfigError if it cannot be read, is malformed or too deep.
    """
    readers = {".toml": _toml, ".json": _json, ".yaml": parse_yaml, ".yml": parse_yaml}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise ConfigError(str(path), UNSET, f"must end in one of {', '.join(readers)}")
    document = read(read_text(path), str(path))
    if _is_deep(document):
        raise ConfigError(str(path), UNSET, f"is nested more than {_DEEPEST} levels deep")
    return document


def _toml(text: str, source: str) -> object:
    try:
        return parse_toml(text)
    except ValueError as error:  # TOMLDecodeError is one
        raise ConfigError(source, UNSET, f"invalid TOML: {_reason(error)}") from None


def _json(text: str, source: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        raise ConfigError(source, UNSET, f"invalid JSON: {_reason(error)}") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:60]!r}")
        found[key] = value
    return found


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a number of JSON")


def _reason(error: Exception) -> str:
    is_deep = isinstance(error, RecursionError)
    return "nested too deeply" if is_deep else str(error).splitlines()[0][:200]


def _is_deep(document: object) -> bool:
    """Return whether ``document`` has more than _DEEPEST levels; without recursion."""
    level = [document]
    for _ in range(_DEEPEST):
        lists = (list(it.values()) if isinstance(it, dict) else it for it in level)
        level = [below for it in lists if isinstance(it, list) for below in it]
    return bool(level)
