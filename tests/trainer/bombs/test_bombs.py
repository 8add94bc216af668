"""Small files that would need much memory are refused, or read within a bound, in a limited process."""

from __future__ import annotations

import pytest
from tests.trainer.bombs.limited import Outcome, outcomes
from tests.trainer.bombs.rows import ROWS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def read() -> list[Outcome]:
    return list(outcomes(len(ROWS)))


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_a_bomb_is_refused_or_read_within_its_bound(read: list[Outcome], number: int) -> None:
    assert number < len(read), f"the process ended at {ROWS[len(read)].name}"
    bomb, outcome = ROWS[number], read[number]
    print(f"{bomb.name}: {outcome.input_kib} KiB, peak {outcome.peak_mib} MiB: {outcome.answer}")
    assert outcome.is_error == bool(bomb.refusal), outcome.answer
    assert bomb.refusal in outcome.answer
    assert not outcome.answer.startswith("uncaught")
    assert len(outcome.answer.splitlines()) <= 1
    assert len(outcome.answer) <= 600
    assert outcome.peak_mib <= bomb.bound_mib
