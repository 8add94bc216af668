"""The table of bad jobs, before the check that ``fluxtrain run`` and the operator make."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.contract.bad_specs import BAD_SPECS, GOOD, ONLY_HERE, ONLY_THERE, Bad, changed, check
from tests.contract.updates import ALLOWED, FORBIDDEN, LIVING

from fluxtrain.contract.describe import walk
from fluxtrain.contract.resource.fluxtraining import Spec
from fluxtrain.contract.run.fixed_fields import FIXED_PATHS
from fluxtrain.errors import ConfigError

FIXED = {f"spec.{facts.path}" for facts in walk(Spec) if facts.fixed} | {
    f"spec.run.{path}" for path in FIXED_PATHS
}


def title(row: tuple[Any, ...]) -> str:
    return f"{row[0]} = {row[1]!r}"[:80]


@pytest.mark.parametrize("row", BAD_SPECS, ids=title)
def test_a_bad_job_is_refused_here_with_the_path_that_the_api_server_names(row: Bad) -> None:
    with pytest.raises(ConfigError) as refused:
        check(changed(GOOD, row.path, row.value))
    named = [line.partition(":")[0] for line in str(refused.value).splitlines()]
    assert (row.here or row.named) in named


@pytest.mark.parametrize("row", ONLY_HERE, ids=title)
def test_what_the_api_server_cannot_refuse_is_refused_here(row: tuple[str, Any, str]) -> None:
    with pytest.raises(ConfigError):
        check(changed(GOOD, row[0], row[1]))


@pytest.mark.parametrize("row", ONLY_THERE, ids=title)
def test_what_means_nothing_on_a_laptop_is_left_to_the_api_server(
    row: tuple[str, Any, str],
) -> None:
    check(changed(GOOD, row[0], row[1]))


@pytest.mark.parametrize("row", FORBIDDEN, ids=title)
def test_what_may_not_change_is_marked_in_the_models(row: tuple[str, Any]) -> None:
    assert row[0] in FIXED


@pytest.mark.parametrize("row", ALLOWED, ids=title)
def test_what_may_change_is_not_marked(row: tuple[str, Any]) -> None:
    assert not any(f"{path}.".startswith(f"{row[0]}.") for path in FIXED)


def test_the_job_that_lives_is_a_good_one() -> None:
    check(LIVING)


def test_no_bad_job_stands_twice_and_there_are_enough() -> None:
    rows = Counter((row.path, repr(row.value)) for row in BAD_SPECS)
    assert rows.most_common(1)[0][1] == 1
    assert len(BAD_SPECS) + len(FORBIDDEN) >= 120
    assert len(FORBIDDEN) >= 15
