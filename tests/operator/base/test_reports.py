"""MembersReport: what the operator reads of the rendezvous service's answer."""

from __future__ import annotations

import pytest

from fluxtrain.contract.process import MAX_RESTARTS
from fluxtrain_operator.base.reports import MembersReport, ProcessRestart


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({"attempt": "1"}, None),
        ({"attempt": True}, None),
        ({"attempt": 2}, MembersReport(attempt=2)),
        ({"attempt": 2, "alive": "a", "lostSeconds": ["b"]}, MembersReport(attempt=2)),
        ({"attempt": 2, "generation": 0}, MembersReport(attempt=2, generation=0)),
        ({"attempt": 2, "generation": 7}, MembersReport(attempt=2, generation=7)),
        *(
            ({"attempt": 2, "generation": value}, MembersReport(attempt=2))
            for value in (-1, 2**31, True, "7", 7.0, None, [7])
        ),
        ({"attempt": 2, "alive": ["a.1", 7, None]}, MembersReport(frozenset({"a"}), attempt=2)),
        (
            {"attempt": 2, "alive": ["a.1"], "lostSeconds": {"a.0": 9, "b.1": 7.5}},
            MembersReport(frozenset({"a"}), frozenset({"b"}), attempt=2),
        ),
    ],
)
def test_invalid_values_are_left_out(answer: object, expected: MembersReport | None) -> None:
    assert MembersReport.from_json(answer) == expected


KILLED = ProcessRestart(3, "ProcessKilled", "a")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], ()),
        ("many", ()),
        ({"generation": 3}, ()),
        ([{"generation": 3, "cause": "ProcessKilled", "agent": "a.1-x"}], (KILLED,)),
        ([{"generation": 3, "cause": "ProcessKilled", "agent": "a", "newer": [{}]}], (KILLED,)),
        ([{"generation": 3}], (ProcessRestart(3, "ProcessFailed"),)),
        (
            [{"generation": 3, "cause": "NewerCause", "agent": 7}],
            (ProcessRestart(3, "ProcessFailed"),),
        ),
        ([{"generation": 3, "cause": ["ProcessKilled"]}], (ProcessRestart(3, "ProcessFailed"),)),
        ([None, 7, "3", {}, {"generation": "3"}, {"generation": True}, {"generation": 3.0}], ()),
        ([{"generation": 0}, {"generation": -1}, {"generation": 10**30}], ()),
        (
            [{"generation": 5}, {"generation": 2}, {"generation": 5}],
            (ProcessRestart(2, "ProcessFailed"), ProcessRestart(5, "ProcessFailed")),
        ),
    ],
)
def test_restarts_are_validated_one_by_one(
    listed: object, expected: tuple[ProcessRestart, ...]
) -> None:
    heard = MembersReport.from_json({"attempt": 2, "restarts": listed})
    assert heard == MembersReport(attempt=2, restarts=expected)


def test_of_very_many_restarts_the_newest_are_read() -> None:
    heard = MembersReport.from_json(
        {"attempt": 1, "restarts": [{"generation": n} for n in range(1, 5000)]}
    )
    assert heard is not None
    assert [restart.generation for restart in heard.restarts] == [*range(5000 - MAX_RESTARTS, 5000)]
