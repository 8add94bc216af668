"""``--help-fields``: the fields of ``spec.run`` that can be set on the command line, from the models."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from fluxtrain.contract.describe import iter_fields
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.validation import did_you_mean
from fluxtrain.errors import ConfigError

_PARAGRAPH = textwrap.TextWrapper(
    96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
)


def add_field_help(parser: argparse.ArgumentParser) -> None:
    """Let the command take overrides; add ``--help-fields`` and a note on them."""
    parser.set_defaults(takes_overrides=True)
    parser.add_argument(
        "--help-fields",
        nargs="?",
        action=_FieldHelp,
        default=argparse.SUPPRESS,
        metavar="PREFIX",
        help="list the fields of spec.run, or those below PREFIX such as optim, and exit",
    )
    parser.epilog = (
        "Every field of spec.run can be set, such as --optim.learning_rate=2e-4: see --help-fields."
    )


class _FieldHelp(argparse.Action):
    """Prints the fields of ``spec.run`` and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(field_help(str(values or "")))
        parser.exit()


def field_help(prefix: str) -> str:
    """Return the fields of ``spec.run`` at or below ``prefix``, each with description, values and default.

    Raises ConfigError if there are none.
    """
    prefix = prefix.removeprefix("--")
    fields = [
        field
        for field in iter_fields(RunConfig)
        if "[]" not in field.path  # of entries of a list, which are given as a whole
        and f"{field.path}.".startswith(f"{prefix}." if prefix else "")
    ]
    if not fields:
        hint = did_you_mean(prefix, RunConfig.model_fields)
        raise ConfigError("--help-fields", prefix, f"no such field{hint}")
    lines = [
        "Fields of spec.run. A preset overrides the defaults; the file and options override both."
    ]
    for field in fields:
        lines += ["", f"--{field.path}=VALUE"]
        for text in (
            field.description.replace("``", "`"),
            f"allowed: {field.allowed}",
            _default(field.info.get_default()),
        ):
            lines += _PARAGRAPH.wrap(text)
    return "\n".join(lines)


def _default(value: Any) -> str:
    try:
        return f"default: {json.dumps(value)}"
    except TypeError:  # PydanticUndefined
        return "required"
