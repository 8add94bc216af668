"""Configurations that people published: each becomes what its trainer does, or is refused by its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.imports.published.table import render, rows

from fluxtrain.contract.run.config import value_at
from fluxtrain.errors import ConfigError
from fluxtrain.imports.files import import_file, refuse_lost
from fluxtrain.imports.table import Disposition

ROWS = rows()
RIGHT = [row for row in ROWS if row["verdict"] == "right"]
REFUSED = [row for row in ROWS if row["verdict"] == "refused"]


def source_of(row: Mapping[str, Any]) -> str:
    return str(row["source"])


def test_there_are_many_of_each_kind() -> None:
    assert len(RIGHT) + len(REFUSED) == len(ROWS) >= 230
    assert len({source_of(row) for row in ROWS}) == len(ROWS)
    forms = Counter(row["form"] for row in RIGHT)
    assert forms.keys() == {".toml", ".json", ".yaml", ".env", "command"}


@pytest.mark.slow
@pytest.mark.parametrize("row", RIGHT, ids=source_of)
def test_what_is_trained_is_what_was_published(row: Mapping[str, Any], tmp_path: Path) -> None:
    found = import_file(render(row, tmp_path), {}, row.get("processes", 1))
    values = found.config.model_dump() | {"preset": found.run["preset"]}
    assert {path: value_at(values, path) for path in row["becomes"]} == row["becomes"]
    lost = {
        line.option
        for disposition in (Disposition.MISSING, Disposition.UNKNOWN)
        for line in found.lines[disposition]
        if line.is_given
    }
    assert lost == {*row["lost"]}
    if lost:
        with pytest.raises(ConfigError, match="--strict"):
            refuse_lost(found, "published")


@pytest.mark.slow
@pytest.mark.parametrize("row", REFUSED, ids=source_of)
def test_what_is_no_training_of_flux_is_refused_by_its_kind(
    row: Mapping[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        import_file(render(row, tmp_path), {}, row.get("processes", 1))
    assert row["because"] in str(error.value)
