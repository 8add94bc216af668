"""The straggler in the status: only of the job's own pods, and no reason to write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from tests.operator.planner import pods
from tests.operator.planner.pods import NOW

from fluxtrain.contract.process import Cause
from fluxtrain.contract.resource.status import Status, StragglerStatus
from fluxtrain_operator.base.reports import Progress, Straggler

SLOW = Straggler(rank=3, pod="pod-1", cause="compute", slowdown=1.4)
NAMED = StragglerStatus(rank=3, pod="job-1", node="node-1", cause="compute", slowdown=1.4)


def answer(straggler: Straggler | None, step: int = 7) -> Progress:
    """Return the answer of a rank 0 that has made ``step``."""
    progress = pods.progress(straggler=straggler)
    return replace(progress, status=progress.status.model_copy(update={"step": step}))


def next_status(
    job: Any, straggler: Straggler | None, seconds: float = 0.0, step: int = 7
) -> Status:
    training = pods.make_pods(2, job)
    progress = answer(straggler, step)
    return pods.plan_with(job, *training, progress=progress, now=NOW + seconds).status


@pytest.mark.parametrize(
    ("straggler", "named"),
    [
        (None, None),
        (SLOW, NAMED),
        (replace(SLOW, pod="pod-0"), NAMED.model_copy(update={"pod": "job-0", "node": "node-0"})),
        (replace(SLOW, pod="pod-of-another-job"), None),
        (replace(SLOW, pod=""), None),  # an older trainer
        *(
            (replace(SLOW, cause=cause), NAMED.model_copy(update={"cause": cause}))
            for cause in get_args(Cause)
        ),
    ],
)
def test_a_straggler_is_named_with_its_pod_and_node(
    straggler: Straggler | None, named: StragglerStatus | None
) -> None:
    progress = next_status(pods.running(), straggler, seconds=90).progress
    assert progress is not None
    assert progress.straggler == named


def test_a_pod_of_an_earlier_attempt_is_no_straggler() -> None:
    job = pods.running()
    old = pods.make_pod(1, job, attempt=0, uid="old")
    observed = (*pods.make_pods(2, job), old)
    progress = answer(replace(SLOW, pod="old"))
    status = pods.plan_with(job, *observed, progress=progress).status
    assert status.progress is not None
    assert status.progress.straggler is None


def test_a_straggler_alone_writes_no_status_and_ends_with_the_next_write() -> None:
    job = pods.running()
    first = next_status(job, None)
    again = pods.with_status(job, first)
    assert next_status(again, SLOW, seconds=4, step=8) == first, "it waits for the next write"
    later = next_status(again, SLOW, seconds=90, step=90)
    assert later.progress is not None
    assert later.progress.straggler == NAMED
    assert later.conditions == first.conditions
    over = next_status(pods.with_status(job, later), None, seconds=180, step=180)
    assert over.progress is not None
    assert over.progress.straggler is None


def test_nothing_is_replaced_for_a_straggler() -> None:
    job = pods.running()
    result = pods.plan_with(job, *pods.make_pods(2, job), progress=answer(SLOW))
    assert (result.delete, pods.created_pods(result)) == ((), [])
