"""The few ranks in the rendezvous service's answer lead to the operator's decision about all of them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.planner.pods import make_pods, plan_with, running

from fluxtrain.contract.process import Phase, agent_name
from fluxtrain.rendezvous.messages import RankReport
from fluxtrain.rendezvous.service import progress_report
from fluxtrain_operator.base.reports import Progress
from fluxtrain_operator.planner.plan import Plan

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
