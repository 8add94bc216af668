"""The table of bad jobs against the validation of ``fluxtrain run`` and the operator."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from tests.contract.bad_specs import (
    BAD_SPECS,
    CLOSED_DIVISION,
    GOOD,
    ONLY_HERE,
    ONLY_THERE,
    Bad,
    changed,
    check,
)
from tests.contract.updates import ALLOWED, FORBIDDEN, LIVING
from tests.paths import ROOT

from fluxtrain.contract.model_base import iter_fields, validate
from fluxtrain.contract.resource.fluxtraining import Spec
from fluxtrain.contract.run.config import IMMUTABLE_PATHS
from fluxtrain.errors import ConfigError

IMMUTABLE = {f"spec.{field.path}" for field in iter_fields(Spec) if field.immutable} | {
    f"spec.run.{path}" for path in IMMUTABLE_PATHS
}

REFUSED = re.compile(
    r"\S+: (no such field; .+|must be given: .+|exactly one of .+"
    r"|got .+; (must|may|not yet:|the closed division) .+)"
)


def title(row: tuple[Any, ...]) -> str:
    return f"{row[0]} = {row[1]!r}"[:80]


@pytest.mark.slow
@pytest.mark.parametrize("row", BAD_SPECS, ids=title)
def test_a_bad_job_is_refused_with_the_path_of_the_api_server(row: Bad) -> None:
    with pytest.raises(ConfigError) as refused:
        check(changed(GOOD, row.path, row.value))
    lines = str(refused.value).splitlines()
    assert (row.here or row.named) in [line.partition(":")[0] for line in lines]
    assert [line for line in lines if not REFUSED.fullmatch(line)] == []
    assert row not in CLOSED_DIVISION or row.says in str(refused.value)


@pytest.mark.parametrize("row", ONLY_HERE, ids=title)
def test_jobs_that_only_the_models_refuse(row: tuple[str, Any, str]) -> None:
    with pytest.raises(ConfigError):
        check(changed(GOOD, row[0], row[1]))


@pytest.mark.parametrize("row", ONLY_THERE, ids=title)
def test_jobs_that_only_the_api_server_refuses(row: tuple[str, Any, str]) -> None:
    check(changed(GOOD, row[0], row[1]))


@pytest.mark.parametrize("row", FORBIDDEN, ids=title)
def test_forbidden_updates_are_of_immutable_fields(row: tuple[str, Any]) -> None:
    assert row[0] in IMMUTABLE


@pytest.mark.parametrize("row", ALLOWED, ids=title)
def test_allowed_updates_are_of_mutable_fields(row: tuple[str, Any]) -> None:
    assert not any(f"{path}.".startswith(f"{row[0]}.") for path in IMMUTABLE)


def test_the_job_of_the_updates_is_valid() -> None:
    check(LIVING)


def test_the_table_has_no_duplicates_and_enough_rows() -> None:
    rows = Counter((row.path, repr(row.value)) for row in BAD_SPECS)
    assert rows.most_common(1)[0][1] == 1
    assert len(BAD_SPECS) + len(FORBIDDEN) >= 120
    text = f"{len(BAD_SPECS)} bad specs and {len(FORBIDDEN)} changes"
    assert text in (ROOT / "docs" / "proof.md").read_text()
    assert len(FORBIDDEN) >= 15


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (None, (1, 1)),
        ({}, (1, 1)),
        ({"min": 4}, (4, 4)),
        ({"max": 4}, (1, 4)),
        ({"min": 2, "max": 4}, (2, 4)),
    ],
)
def test_the_maximum_of_nodes_follows_the_minimum(
    nodes: dict[str, int] | None, expected: tuple[int, int]
) -> None:
    spec = {"run": {"preset": "micro"}, **({} if nodes is None else {"nodes": nodes})}
    parsed = validate(Spec, spec, "spec").nodes
    assert (parsed.min, parsed.max) == expected


def test_a_wrong_minimum_of_nodes_is_the_only_error() -> None:
    with pytest.raises(ConfigError) as error:
        validate(Spec, {"run": {"preset": "micro"}, "nodes": {"min": 0}}, "spec")
    assert str(error.value).startswith("spec.nodes.min: got 0")
    assert "nodes.max" not in str(error.value)
