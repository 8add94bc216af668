"""docs/coming-from.md: a guide with the options and variables that the command line refuses or reads."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from fluxtrain.contract.run.torchtitan_options import (
    OPTIONS,
    READ_VARIABLES,
    VARIABLES,
    Replacement,
)

_TEMPLATE = files("fluxtrain_operator.generate") / "coming-from.template"


def coming_from_page() -> str:
    """Return docs/coming-from.md."""
    return _TEMPLATE.read_text().format(
        options=_table({f"--{name}": _text(row) for name, row in OPTIONS.items()}),
        read=_table(READ_VARIABLES),
        refused=_table({name: _text(row) for name, row in VARIABLES.items()}),
    )


def _table(rows: Mapping[str, str]) -> str:
    lines = [f"| `{there}` | {here} |" for there, here in rows.items()]
    return "\n".join(["| there | here |", "|---|---|", *lines])


def _text(row: Replacement) -> str:
    options = " and ".join(f"`--{option}`" for option in row.options)
    return ": ".join(part for part in (options, row.note) if part)
