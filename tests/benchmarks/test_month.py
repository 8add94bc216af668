"""The simulated month: with measured times of recovery too, and few days lost in either case."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.operator.month import OURS, PEER, Month, Recovery, measured

FAULTS = Path(__file__).parents[2] / "docs" / "faults.md"
TABLE = """
| fault | detected | replaced | lost | pause | result |
| --- | --- | --- | --- | --- | --- |
| `rank-killed`: SIGKILL of a rank | 1.5, generation 2 | – | 8 | 21.5 | ok, 2e-07 |
| `power-off`: a node loses its power | 0.6, condition Healthy=False | 7.0 | 0 | 32.0 | ok, 2e-07 |
| `dns-lost`: no name resolves for 20 s | – | – | 0 | 0.7 | ok, 2e-07 |
"""


def test_times_of_recovery_are_those_of_the_table() -> None:
    found = measured(TABLE)
    assert (found.detect_process, found.detect_node, found.replace) == (1.5, 7.0, 32.0)
    assert found.start == 25.0, "the longer one of both, without the detection"
    assert found.lost == 8.0, "twice eight steps of half a second: half of it is lost on average"


def test_the_table_of_the_docs_has_both_rows() -> None:
    assert 0 < measured(FAULTS.read_text(encoding="utf-8")).start < 600


@pytest.mark.slow
@pytest.mark.parametrize("recovery", [OURS, measured(TABLE)], ids=lambda r: r.name)
def test_a_week_of_faults_costs_less_than_a_hundredth(recovery: Recovery) -> None:
    month = Month(7.0, 0, recovery)
    month.run()
    assert month.happened["nodes"] + month.happened["processes"] > 3
    assert month.job.status.attempt == 1
    (peer,) = (other for other in month.others if other.recovery is PEER)
    assert month.ours.done / month.end > 0.99
    assert month.ours.done > peer.done
