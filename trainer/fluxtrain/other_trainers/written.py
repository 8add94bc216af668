"""The file that an import writes, and its report: every option with what became of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.document import dump_yaml, parse_yaml
from fluxtrain.contract.resource.fluxtraining import KIND, VERSION, FluxTraining
from fluxtrain.contract.validation import validate
from fluxtrain.other_trainers.imported import Imported, Line
from fluxtrain.other_trainers.option import Fate
from fluxtrain.redaction import redacted

_LISTED = (Fate.MISSING, Fate.UNKNOWN, Fate.INERT, Fate.ELSEWHERE)
"""What the file itself names, in comments; reports have everything."""
_LONGEST = 60
_SECTIONS = ("preset", "task", "seed", "initial_weights")


def file_text(imported: Imported, name: str, source: str, gpus: int) -> str:
    """Return the FluxTraining ``name`` on ``gpus`` GPUs of a node, as YAML; ``source`` is named in it.

    Raises ConfigError if ``name`` cannot be the name of a job.
    """
    first = [key for key in _SECTIONS if key in imported.run]
    run = {key: imported.run[key] for key in [*first, *imported.run]}
    document: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"nodes": {"min": 1, "max": 1}, "gpusPerNode": gpus, "run": run},
    }
    validate(FluxTraining, document, "")
    body = dump_yaml(document)
    text = "".join(f"# {line}\n".replace("# \n", "#\n") for line in _header(imported, source))
    assert parse_yaml(text + body, "file") == document, "the file is what was resolved"
    return text + body


def report(imported: Imported) -> Iterator[str]:
    """Yield the lines that say what became of every option, by its fate."""
    for fate, lines in imported.lines.items():
        if lines:
            yield f"{fate.value}:"
            yield from (f"  {_describe(line)}" for line in lines)


def _header(imported: Imported, source: str) -> Iterator[str]:
    yield f"By fluxtrain import-config from {_plain(source)}: options of {imported.trainer}."
    for fate in _LISTED:
        if lines := imported.lines[fate]:
            yield f"{fate.value}:"
            yield from (f"  {_describe(line)}" for line in lines)


def _describe(line: Line) -> str:
    value = "" if line.value is None else f"={_brief(line.value)}"
    given = f"{_plain(line.option)}{value}{'' if line.is_given else ' (not given)'}"
    fields = ", ".join(f"{path}={_brief(value)}" for path, value in line.values.items())
    text = "; ".join(part for part in (fields, line.note) if part)
    return f"{given}: {text}" if text else given


def _brief(value: object) -> str:
    """Return ``value`` on one line, without credentials, cut if it is long."""
    value = redacted(value) if isinstance(value, str) else value
    if isinstance(value, str) and re.fullmatch(r"[\w./@:+,-]{1,60}", value, re.ASCII):
        return value
    text = redacted(json.dumps(value, default=str, ensure_ascii=True))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _plain(name: str) -> str:
    return name if re.fullmatch(r"[\w.$\[\] /-]{1,200}", name, re.ASCII) else _brief(name)
