"""What processes of a job exchange: the places of nodes in two texts, and the reports of ranks."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.planner.pods import make_pods, plan_with, running

from fluxtrain.contract.process import (
    MAX_BYTES,
    Phase,
    agent_name,
    place_of,
    read_places,
    write_places,
)
from fluxtrain.rendezvous.messages import RankReport
from fluxtrain.rendezvous.service import progress_report
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.planner.plan import Plan

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("places", "numbers"),
    [
        ({}, {"a": None}),
        ({"a": "rack"}, {"a": 0, "b": None, "": None}),
        ({"b": "r1", "a": "r2", "c": "r1"}, {"a": 1, "b": 0, "c": 0}),
        ({"a": "rack-10", "b": "rack-9", "c": "rack-100"}, {"a": 1, "b": 0, "c": 2}),
        ({"a": "", "b": "r2", "c": ""}, {"a": None, "b": 0, "c": None}),
        ({"n" * 253: "R" * 63}, {"n" * 253: 0, "n" * 252: None}),
    ],
)
def test_the_order_of_places_is_kept(
    places: dict[str, str], numbers: dict[str, int | None]
) -> None:
    told = read_places(write_places(places))
    assert {node: place_of(node, told) for node in numbers} == numbers


def test_neither_names_of_nodes_nor_labels_are_told() -> None:
    text = write_places({"secret-node": "secret-rack", "other": "rack;,2"})
    assert text.count(";") == 1
    assert len(text) == 12 + 1 + 12
    assert set(text) <= set("0123456789abcdef;")


@pytest.mark.parametrize("per_place", [1, 32, 10_000])
def test_the_argument_is_bounded_and_keeps_the_first_nodes(per_place: int) -> None:
    nodes = [f"node-{number}" for number in range(30_000)]
    text = write_places({node: f"rack-{n // per_place}" for n, node in enumerate(nodes)})
    told = read_places(text)
    assert MAX_BYTES - 26 < len(text) <= MAX_BYTES
    assert place_of(nodes[len(told) - 1], told) == (len(told) - 1) // per_place
    assert place_of(nodes[len(told)], told) is None


D = "0123456789ab"


@pytest.mark.parametrize(
    "text",
    [
        *("rack", "0123456789a", "0123456789abc", D.upper(), f"{D},", f"{D};", f",{D}", f";{D}"),
        *(f"{D},,{D}", f"{D};;{D}", f"{D} {D}", f"{D}:{D}", f"{D}\n", f"{D}{D}"),
        ",".join([D] * MAX_BYTES),
    ],
)
def test_other_arguments_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be at most"):
        read_places(text)


REPORT = st.fixed_dictionaries(
    {
        "phase": st.sampled_from(get_args(Phase)) | st.just("step"),
        "step": st.integers(5, 7),
        "seconds_since_progress": st.sampled_from(
            [0.0, 69.0, 71.0, 72.0, 75.0, 1000.0, 1900.0, 4000.0]
        ),
        "step_seconds": st.sampled_from([None, 0.5, 1.0, 90.0, 1000.0]),
        "frozen": st.booleans(),
    }
)


def decision(entries: list[dict[str, Any]], limit: int | None) -> Plan:
    progress = Progress.from_agents({"ranks": entries})
    assert progress is not None
    restart = {"noProgressSeconds": limit} if limit else {}
    return plan_with(running(restart=restart), *make_pods(), any_progress=progress)


@settings(max_examples=200, deadline=None)
@given(st.lists(REPORT, min_size=1, max_size=40), st.sampled_from([None, 60, 900, 7200]))
def test_the_chosen_ranks_decide_as_all_do(values: list[dict[str, Any]], limit: int | None) -> None:
    reports = [
        (agent_name(f"pod-{rank % 2}", "1"), RankReport(rank=rank, **each))
        for rank, each in enumerate(values)
    ]
    every = [entry for each in reports for entry in progress_report([each])["ranks"]]
    chosen = progress_report(reports)["ranks"]
    assert all(entry in every for entry in chosen)
    assert decision(chosen, limit) == decision(every, limit)


@pytest.mark.parametrize("num_ranks", [0, 1, 2, 4096 * 8])
def test_the_answer_is_small_for_any_number_of_ranks(num_ranks: int) -> None:
    phases = get_args(Phase)
    reports = [
        (
            "pod.1",
            RankReport(rank=n, phase=phases[n % len(phases)], seconds_since_progress=float(n)),
        )
        for n in range(num_ranks)
    ]
    assert min(num_ranks, 2) <= len(progress_report(reports)["ranks"]) <= 4 * len(phases) + 2
