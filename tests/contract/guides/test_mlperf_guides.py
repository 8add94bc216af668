"""Every command, option, variable and number of MLPerf's two guides has a row, whose counterpart exists."""

from __future__ import annotations

import argparse
import re

import pytest
from tests.contract.guides.mlperf import PORT, REFERENCE, TORCHTITAN
from tests.paths import ROOT

from fluxtrain.cli.commands import make_parser
from fluxtrain.contract.model_base import iter_fields
from fluxtrain.contract.resource.fluxtraining import FluxTraining
from fluxtrain.contract.run.config import RunConfig, value_at
from fluxtrain.contract.run.presets import PRESETS
from fluxtrain.contract.run.resolve import resolve

FACTS = {**REFERENCE, **PORT, **TORCHTITAN}
PRESET = resolve({"preset": "mlperf-schnell"}).model_dump(mode="json")
FIELDS = {field.path for field in iter_fields(RunConfig)}
PAGE = (ROOT / "docs/coming-from.md").read_text("utf-8").partition("\n## A container for kohya")[0]
LINES = PAGE.splitlines()
ROWS = [
    re.split(r" \| ", line.strip("| "), maxsplit=1) for line in LINES if line.startswith("| ")
] + [[line, line] for line in LINES if line.startswith("Not read: ")]
WITHOUT = re.compile(
    r"no counterpart|not needed|nothing|passed on|the same|fixed|11,891|the first argument|whole archives"
    r"|autoencoder's|spec\.run\.seed|parent of the cache|as many|2\.45 TB|Rank 0"
)
"""What a row says that has no field, option or target: why, or that there is nothing to do."""


def rows_of(fact: str) -> list[list[str]]:
    """Return the rows about ``fact``: in backticks, or, of a number, in words."""
    word = re.compile(rf"(?<![\w.,~/]){re.escape(fact)}(?![\w.,]?\w)")
    return [
        row for row in ROWS if f"`{fact}`" in row[0] or ("`" not in row[0] and word.search(row[0]))
    ]


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = make_parser()
    for name in command.split():
        (below,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = below.choices[name]
    return parser


def said(counterpart: str, text: str) -> bool:
    """Return whether ``text`` names ``counterpart``, which must exist."""
    kind, _, name = counterpart.partition(" ")
    match kind:
        case "none":
            return WITHOUT.search(text) is not None
        case "field":
            assert name in FIELDS
            return bool(re.search(rf"`(--)?{re.escape(name)}[`=]", text)) or f"--{name}" in text
        case "value":
            path, _, value = name.partition("=")
            assert str(value_at(PRESET, path)) == value
            return f"`{path}` {value}" in text
        case "preset":
            assert name in PRESETS
            return f"`preset: {name}`" in text
        case "option":
            command, _, option = name.partition(" --")
            option, _, value = option.partition("=")
            (found,) = (a for a in parser_of(command)._actions if f"--{option}" in a.option_strings)
            assert not value or found.default == int(value)
            named = f"--{option}" in text or bool(value)
            return named and (command == "run" or command in text)
        case "make":
            target = name.split()[0]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
            return f"`make {name}`" in text
        case "variable":
            sources = (
                "Makefile",
                "trainer/fluxtrain/contract/run/overrides.py",
                "docs/credentials.md",
            )
            assert any(name in (ROOT / source).read_text() for source in sources)
            return f"`{name}" in text
        case "file":
            return (ROOT / name).is_file() and name in text
        case "spec":
            assert name in {field.path.removeprefix("spec.") for field in iter_fields(FluxTraining)}
            return f"`spec.{name}`" in text
    raise AssertionError(counterpart)


@pytest.mark.parametrize("fact", FACTS)
def test_a_guide_s_fact_has_a_row_with_its_counterparts(fact: str) -> None:
    rows = rows_of(fact)
    assert rows, f"docs/coming-from.md has no row of {fact}"
    missing = [c for c in FACTS[fact].split("; ") if not any(said(c, right) for _, right in rows)]
    assert not missing, rows
