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
from fluxtrain.other_trainers.ai_toolkit import AI_TOOLKIT
from fluxtrain.other_trainers.kohya import KOHYA
from fluxtrain.other_trainers.option import Fate, Option
from fluxtrain.other_trainers.simpletuner import SIMPLETUNER
from fluxtrain.other_trainers.variables import VARIABLES as GUIDE_VARIABLES

_TEMPLATE = files("fluxtrain_operator.generate") / "coming-from.template"


def coming_from_page() -> str:
    """Return docs/coming-from.md."""
    return _TEMPLATE.read_text().format(
        options=_table({f"--{name}": _text(row) for name, row in OPTIONS.items()}),
        read=_table(READ_VARIABLES),
        refused=_table({name: _text(row) for name, row in VARIABLES.items()}),
        guide=_table({name: _fate(row.meaning) for name, row in GUIDE_VARIABLES.items()}),
        kohya=_grouped(KOHYA.options),
        ai_toolkit=_grouped(AI_TOOLKIT.options),
        simpletuner=_grouped(SIMPLETUNER.options),
    )


def _table(rows: Mapping[str, str]) -> str:
    lines = [f"| `{there}` | {here} |" for there, here in rows.items()]
    return "\n".join(["| there | here |", "|---|---|", *lines])


def _text(row: Replacement) -> str:
    options = " and ".join(f"`--{option}`" for option in row.options)
    return ": ".join(part for part in (options, row.note) if part)


def _grouped(options: Mapping[str, Option]) -> str:
    """Return the table of ``options``, with one row for those of the same meaning."""
    names: dict[str, list[str]] = {}
    for name, option in options.items():
        names.setdefault(_fate(option), []).append(name)
    return _table({"`, `".join(those): text for text, those in names.items()})


def _fate(option: Option) -> str:
    """Return what becomes of ``option``."""
    fields = ", ".join(f"`{path}`" for path in option.fields)
    default = option.default
    unset = f"{default} there if it is not given" if option.fields and default is not None else ""
    fate = "" if option.fate is Fate.WRITTEN else option.fate.value
    what = ": ".join(part for part in (fields or fate, option.note) if part)
    return "; ".join(part for part in (what, unset) if part)
