"""What follows from steps and signs, which outcomes fail, and the table of docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.faults.fault import (
    LOSS_TOLERANCE,
    Fault,
    Limits,
    Outcome,
    Seen,
    Sign,
    first_sign,
    longest_pause,
    lost_steps,
    seconds_to_new_pod,
)
from tests.faults.matrix import FAULTS
from tests.faults.report import COLUMNS, render, row, rows_of
from tests.faults.target import Target
from tests.paths import ROOT


def seen(*pairs: tuple[float, int]) -> list[Seen]:
    return [Seen(at, step) for at, step in pairs]


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ([], 0),
        ([(0, 5)], 0),
        ([(0, 5), (1, 6), (2, 7)], 0),
        ([(0, 17), (1, 10), (2, 11)], 7),
        ([(0, 17), (1, 10), (2, 20), (3, 20)], 7),
        ([(0, 17), (1, 10), (2, 12), (3, 10)], 9),  # twice
        ([(0, 17), (1, 0)], 17),  # from the beginning
    ],
)
def test_lost_steps(steps: list[tuple[float, int]], lost: int) -> None:
    assert lost_steps(seen(*steps)) == lost


@pytest.mark.parametrize(
    ("steps", "pause"),
    [
        ([], 0),
        ([(0, 5)], 0),  # no new step at all: the wait for it fails instead
        ([(0, 5), (10.5, 6)], 0.5),
        ([(0, 5), (11, 6), (15, 7), (16, 8)], 4),
        ([(0, 5), (11, 6), (12, 3), (13, 6), (16, 7)], 5),  # repeated steps are not new
        ([(0, 5), (9, 8), (11, 6), (12, 9)], 2),
    ],
)
def test_longest_pause_from_10_s_on(steps: list[tuple[float, int]], pause: float) -> None:
    assert longest_pause(seen(*steps), 10) == pytest.approx(pause)


def test_the_first_sign_is_that_after_the_fault() -> None:
    signs = [Sign(30, "c"), Sign(5, "a"), Sign(12.5, "b")]
    assert first_sign(signs, 10) == Sign(2.5, "b")
    assert first_sign(signs, 31) is None
    assert first_sign([], 0) is None


@pytest.mark.parametrize(
    ("signs", "seconds"),
    [
        ([], None),
        ([Sign(11, "agent lost"), Sign(12, "event Replaced")], None),
        ([Sign(12, "new pod job-1-rendezvous")], None),
        ([Sign(9, "new pod job-1-0")], None),  # before the fault
        ([Sign(14, "new pod job-1-2"), Sign(12, "new pod job-1-0"), Sign(9, "new pod job-1-1")], 2),
        ([Sign(11, "new pod job-1-rendezvous"), Sign(12.5, "new pod job-1-2")], 2.5),
    ],
)
def test_seconds_from_10_s_on_to_the_first_new_training_pod(
    signs: list[Sign], seconds: float | None
) -> None:
    assert seconds_to_new_pod(signs, 10) == seconds


@contextmanager
def cut(target: Target) -> Iterator[None]:
    yield


FAULT = Fault("a cable | is cut", cut, Limits(lost_steps=20, pause_seconds=30, charged=1))


def outcome(**values: Any) -> Outcome:
    good: dict[str, Any] = {
        "lost_steps": 20,
        "pause_seconds": 30.0,
        "charged": 1,
        "causes": {"NodeLost": 2, "NoProgress": 1},
        "wrong_samples": 0,
        "loss_difference": 2e-6,
    }
    return Outcome(FAULT, **{**good, **values})


def test_an_outcome_within_its_limits_is_good() -> None:
    assert outcome().faults == []


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"lost_steps": 21}, "21 steps lost, at most 20 expected"),
        ({"pause_seconds": 31.0}, "31 s without a new step, at most 30 expected"),
        ({"charged": 2}, "2 restarts charged, 1 expected"),
        ({"charged": 0}, "0 restarts charged, 1 expected"),
        ({"wrong_samples": 3}, "samples of 3 steps wrong"),
        ({"wrong_samples": None}, "samples unknown"),
        ({"loss_difference": LOSS_TOLERANCE}, "loss curve: 0.0001"),
        ({"loss_difference": float("nan")}, "loss curve: nan"),
        ({"loss_difference": None}, "loss curve: None"),
        ({"error": "TimeoutError: no step"}, "TimeoutError: no step"),
    ],
)
def test_an_outcome_beyond_a_limit_says_which(values: dict[str, Any], fault: str) -> None:
    assert outcome(**values).faults == [fault]


def test_a_row_has_what_was_measured() -> None:
    assert row(outcome(detected=Sign(1.25, "generation 3"), replaced_seconds=4.04)) == (
        "| `cut`: a cable / is cut | 1.2, generation 3 | 4.0 | 20 | 30.0 | "
        "1 of 1 NoProgress, 2 NodeLost | ok, 2e-06 |"
    )
    assert row(
        outcome(lost_steps=21, charged=0, causes={}, wrong_samples=2, loss_difference=None)
    ) == (
        "| `cut`: a cable / is cut | – | – | 21 | 30.0 | 0 | "
        "**failed**: 21 steps lost, at most 20 expected; 0 restarts charged, 1 expected; "
        "samples of 2 steps wrong; loss curve: None, ? |"
    )


def test_the_page_has_all_rows_and_they_are_read_back() -> None:
    other = replace(FAULT, other_name="other-cut")
    rows = [row(outcome()), row(Outcome(other, lost_steps=99))]
    page = render(rows, "2 cores", "the job", "a day", "## Notes\n")
    assert page.startswith("# What each fault costs\n")
    assert page.endswith("## Notes\n")
    assert "{" not in page
    assert rows_of(page) == {"cut": rows[0], "other-cut": rows[1]}
    assert rows_of(render([], "2 cores", "the job", "a day", "")) == {}


def test_the_rows_of_a_page_without_a_column_have_an_empty_cell() -> None:
    rows = [row(outcome()), row(Outcome(replace(FAULT, other_name="other-cut"), lost_steps=99))]
    page = render(rows, "2 cores", "the job", "a day", "")
    old = "\n".join(without_column(line, "replaced") for line in page.splitlines())
    assert "replaced |" not in old
    known = rows_of(old)
    assert list(known) == ["cut", "other-cut"]
    assert [line.count("|") for line in known.values()] == [len(COLUMNS) + 1] * 2
    assert known["cut"] == rows[0].replace("| – | – |", "| – |  |")
    again = render([*known.values(), rows[0]], "2 cores", "the job", "a day", "")
    assert list(rows_of(again).values()) == [rows[0], known["other-cut"]], "the newest one"


def without_column(line: str, name: str) -> str:
    """Return a line of the table of faults, or of another table, without a column."""
    cells = line.split("|")
    if len(cells) == len(COLUMNS) + 2:
        del cells[COLUMNS.index(name) + 1]
    return "" if f"| {name} |" in line and len(cells) == 4 else "|".join(cells)


def test_the_present_page_is_read() -> None:
    rows = rows_of((ROOT / "docs" / "faults.md").read_text())
    assert {fault.name for fault in FAULTS} >= set(rows)
    assert {line.count("|") for line in rows.values()} == {len(COLUMNS) + 1}


@pytest.mark.parametrize(
    ("seconds", "faults"),
    [
        (19.9, []),
        (20.0, []),
        (20.6, ["21 s until a new training pod, 20 s expected"]),
        (None, ["no new training pod, 20 s expected"]),
    ],
)
def test_a_replacement_has_a_limit_in_some_rows(seconds: float | None, faults: list[str]) -> None:
    limited = replace(FAULT, limits=replace(FAULT.limits, replaced_seconds=20))
    assert replace(outcome(replaced_seconds=seconds), fault=limited).faults == faults
    assert outcome(replaced_seconds=seconds).faults == []
    with_limit = {fault.name for fault in FAULTS if fault.limits.replaced_seconds is not None}
    assert with_limit == {"power-off"}


def test_the_faults_have_names_of_their_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
    assert all(name == name.lower() and " " not in name for name in names)
