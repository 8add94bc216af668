"""Published configurations, by their options alone: rendered as the file or the command that held them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("table.jsonl")
"""A row a line: source, form, options (texts and long paths are shortened), and what becomes of them."""


def rows() -> list[dict[str, Any]]:
    """Return the rows of the table."""
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def render(row: Mapping[str, Any], folder: Path) -> Path:
    """Write the options of ``row`` to a file in ``folder`` in its form; return its path."""
    form, options = row["form"], row["options"]
    path = folder / row.get("name", f"published{'.sh' if form == 'command' else form}")
    writers = {".toml": _toml, ".json": json.dumps, ".yaml": yaml.safe_dump, ".env": _variables}
    text = _command(row["script"], options) if form == "command" else writers[form](options)
    path.write_text(text, encoding="utf-8")
    for name, content in row.get("beside", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return path


def _toml(options: Mapping[str, Any]) -> str:
    return "\n".join(_line(name, value) for name, value in options.items())


def _line(name: str, value: object) -> str:
    return f"{json.dumps(name)} = {_inline(value)}"


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(_line(key, below) for key, below in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value)


def _command(script: str, options: Mapping[str, Any]) -> str:
    words = ["accelerate launch" if script.endswith(".py") else "", script]
    for name, value in options.items():
        values: Sequence[object] = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(json.dumps(str(it)) for it in values if it is not True)]
    return " \\\n  ".join(words)


def _variables(options: Mapping[str, Any]) -> str:
    return "\n".join(f"export {name}={json.dumps(str(value))}" for name, value in options.items())
