"""The watchdog and how time is spent, whatever the clocks of nodes say.

A job without progress is restarted, but not one whose trainers do not answer. All parts of the time together
are the time since the start, without suspensions. Each decision is the same an hour ahead and an hour behind.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from tests.operator.jobs import KEY, OWNER, Clock, make_node, make_training
from tests.operator.planner import pods
from tests.operator.planner.invariants import as_manifest
from tests.operator.planner.pods import (
    LONG_AGO,
    NOW,
    PENDING,
    SUCCEEDED,
    condition,
    deleted,
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    message,
    num_gang_restarts,
    observe,
    plan_with,
    progress,
    rendezvous,
    running,
    started,
    with_status,
)

from fluxtrain.contract.process import Cause, Phase
from fluxtrain.contract.resource.status import (
    InPlaceRestart,
    ProgressStatus,
    Status,
    StragglerStatus,
    TimeSpent,
)
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.base.reports import MembersReport, Progress, RankProgress, Straggler
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.planner.observed import Observed, Pod
from fluxtrain_operator.planner.plan import plan
from fluxtrain_operator.planner.watchdog import (
    goodput,
    next_time_spent,
    with_stall,
    without_suspension,
)

ONE_MINUTE = {"restart": {"noProgressSeconds": 60}}


def rank(
    number: int = 0, phase: Phase = "step", silent: float = 0.0, **changes: Any
) -> RankProgress:
    """Return a rank in step 7 whose steps take a second: it may be silent for 70 seconds."""
    step_seconds = 1.0 if phase == "step" else None
    defaults = {"step": 7, "step_seconds": step_seconds, "pod": f"pod-{number}"}
    return RankProgress(number, phase, **{**defaults, **changes, "seconds_since_progress": silent})


def answer(*ranks: RankProgress, age: float = 0.0) -> Progress:
    """Return what rank 0 answers; by the trainers' wall clocks, the last step was long ago."""
    return replace(progress(7000, phase=ranks[0].phase), ranks=ranks, age=age)


def test_a_job_without_progress_is_restarted_and_uses_a_restart() -> None:
    job = running(**ONE_MINUTE)
    before = plan_with(job, *make_pods(), progress=answer(rank(silent=50)))
    assert (before.status.attempt, before.requeue_after) == (1, pytest.approx(10.0))
    stalled = plan_with(job, *make_pods(), progress=answer(rank(silent=61)))
    assert (stalled.status.attempt, num_gang_restarts(stalled.status)) == (2, 1)
    assert condition(stalled.status, "Progressing") == ("False", "NoProgress")
    assert {delete.grace_seconds for delete in stalled.delete} == {30}


LIMITS: list[tuple[Phase, float | None, float]] = [
    ("import", None, 1200),
    ("load", None, 1800),
    ("compile", None, 3600),
    ("step", None, 1800),  # before the first step
    ("step", 0.02, 60.2),
    ("step", 1.0, 70),
    ("step", 60.0, 660),
    ("step", 1000.0, 3600),
    ("evaluate", 1.0, 1800),  # the last one, over the whole validation set
    ("save", 1.0, 3600),  # the last one, of 143 GB
    ("sample", 1.0, 1800),  # the gallery
    ("finish", 1.0, 1800),
]
FIXED = [("step", 1.0, 90), ("step", None, 1800), ("load", None, 1800), ("save", 1.0, 3600)]


@pytest.mark.parametrize(
    ("fixed", "phase", "step_seconds", "limit"),
    [*((None, *row) for row in LIMITS), *((90, *row) for row in FIXED), (7200, "save", 1.0, 7200)],
)
def test_each_phase_has_its_own_limit(
    fixed: int | None, phase: Phase, step_seconds: float | None, limit: float
) -> None:
    job = running(restart={"noProgressSeconds": fixed} if fixed else {})
    for silent, attempt in ((limit - 1, 1), (limit, 2)):
        for age in (0.0, 30.0):  # since the answer, by the operator's clock
            present = rank(0, phase, silent - age, step_seconds=step_seconds)
            result = plan_with(job, *make_pods(), progress=answer(present, age=age))
            assert result.status.attempt == attempt, (silent, age)


@pytest.mark.parametrize(
    ("ranks", "attempt", "culprit"),
    [
        ([rank(0, silent=100), rank(1, silent=69)], 1, ""),
        ([rank(0, silent=100), rank(1, "save", 100)], 1, ""),
        ([rank(0, "finish", 3000), rank(1, "sample", 5)], 1, ""),
        ([rank(0, silent=90), rank(1, silent=90)], 2, "rank 0 of job-0 on node-0 is in"),
        ([rank(0, silent=90), rank(1, silent=95)], 2, "rank 1 of job-1 on node-1 stopped first"),
        (
            [rank(0, silent=95), rank(1, silent=90, step=6)],
            2,
            "rank 1 of job-1 on node-1 stopped first, in phase step at step 6",
        ),
        (
            [rank(0, silent=90), rank(1, silent=99, stack="wait (queue:7)", pod="gone")],
            2,
            "no progress for 90 s; rank 1 stopped first, in phase step at step 7: wait (queue:7)",
        ),
    ],
)
def test_a_job_has_stalled_if_all_its_ranks_have_and_the_first_of_them_is_named(
    ranks: list[RankProgress], attempt: int, culprit: str
) -> None:
    result = plan_with(running(), *make_pods(), progress=answer(*ranks))
    assert result.status.attempt == attempt
    if attempt == 2:
        assert culprit in message(result.status, "Progressing")
        assert culprit in message(result.status, "Healthy")
        assert any(culprit in event.message for event in result.events)


FROZEN: dict[str, Any] = {"frozen": True, "stack": "its state is T (stopped)"}
ONE_NODE: dict[str, Any] = {"nodes": {"min": 1, "max": 1}}


@pytest.mark.parametrize(
    ("ranks", "attempt", "culprit"),
    [
        ([rank(0, silent=69, **FROZEN)], 1, ""),
        ([rank(0, silent=70, **FROZEN)], 2, "rank 0 of job-0 on node-0 is in phase step at step 7"),
        ([rank(0, silent=90, **FROZEN)], 2, ": its state is T (stopped)"),
        ([rank(0, "save", 3599, **FROZEN)], 1, ""),
        ([rank(0, "save", 3600, **FROZEN)], 2, "is in phase save"),
        ([rank(0, silent=90, **FROZEN), rank(1, silent=69)], 1, ""),
        (
            [rank(0, silent=90), rank(1, silent=90, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 stopped first",
        ),
        (
            [rank(0, silent=90, step=6), rank(1, silent=80, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 stopped first",
        ),
        (
            [rank(0, silent=90, **FROZEN), rank(1, silent=91, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 is in",
        ),
        (
            [rank(0, silent=90, **FROZEN), rank(1, silent=95, **FROZEN)],
            2,
            "rank 1 of job-1 on node-1 stopped first",
        ),
    ],
)
def test_agents_report_the_stall_of_ranks_that_do_not_answer(
    ranks: list[RankProgress], attempt: int, culprit: str
) -> None:
    reported = replace(Progress(ProgressStatus(), by_agents=True), ranks=tuple(ranks))
    pods = make_pods()[: len(ranks)]
    job = running(nodes={"min": len(ranks), "max": len(ranks)})
    result = plan_with(job, *pods, any_progress=reported)
    assert (result.status.attempt, num_gang_restarts(result.status)) == (attempt, attempt - 1)
    assert result.status.progress == job.status.progress, "nothing of the run is known"
    if attempt == 2:
        assert condition(result.status, "Progressing") == ("False", "NoProgress")
        assert culprit in message(result.status, "Progressing")


def test_a_job_of_one_node_whose_agent_reports_progress_answers() -> None:
    job = running(**ONE_NODE)
    reported = replace(Progress(ProgressStatus(), by_agents=True), ranks=(rank(silent=5),))
    by_agents = ("True", "ReportedByAgents")
    rows = [
        (reported, 290, ("True", "Stepping")),
        (reported, 3600, by_agents),
        (None, 3600, ("Unknown", "NoAnswer")),
    ]
    for answered, late, expected in rows:
        result = plan_with(job, make_pod(0, job), any_progress=answered, now=NOW + late)
        assert condition(result.status, "Progressing") == expected
        assert (result.status.attempt, num_gang_restarts(result.status)) == (1, 0)
        told = [event.reason for event in result.events]
        assert told == [expected[1]] * (expected[1] != "Stepping")
        outdated = "step, loss and speed are outdated" in message(result.status, "Progressing")
        assert outdated == (expected == by_agents)


def test_of_a_job_without_a_first_step_agents_do_not_tell_that_it_steps() -> None:
    job = started(nodes={"min": 1, "max": 1})
    reported = replace(Progress(ProgressStatus(), by_agents=True), ranks=(rank(silent=5),))
    result = plan_with(job, make_pod(0, job), any_progress=reported, now=NOW + 3600)
    assert condition(result.status, "Progressing") == ("Unknown", "ReportedByAgents")


def test_a_job_with_a_wrong_clock_is_not_stalled() -> None:
    job = running()
    for ahead in (-86_400, 86_400):  # by which the trainers' clocks differ from the operator's
        present = replace(progress(ahead), ranks=(rank(silent=5),))
        assert plan_with(job, *make_pods(), progress=present).status.attempt == 1


@pytest.mark.parametrize(
    ("phase", "silent", "attempt"),
    [("step", 79, 1), ("step", 81, 2), ("load", 1799, 1), (None, 1799, 1), (None, 1801, 2)],
)
def test_an_answer_without_ranks_has_the_times_of_its_own_clock(
    phase: Phase | None, silent: float, attempt: int
) -> None:
    result = plan_with(running(), *make_pods(), progress=progress(silent, phase=phase))
    assert result.status.attempt == attempt


def test_any_rank_may_report_a_stall() -> None:
    other = replace(answer(rank(4, silent=71)), rank=4)
    assert plan_with(running(), *make_pods(), any_progress=other).status.attempt == 2


def test_an_answer_without_ranks_and_steps_has_longer() -> None:
    new = make_job(plan(make_job(), Observed(), NOW).status)
    pods, loading = make_pods(started=NOW), Progress(ProgressStatus(), phase="load")
    assert plan_with(new, *pods, progress=loading, now=NOW + 1799).status.attempt == 1
    assert plan_with(new, *pods, progress=loading, now=NOW + 1801).status.attempt == 2


def test_a_job_whose_trainers_do_not_answer_is_reported_and_not_restarted() -> None:
    job = running(**ONE_MINUTE)
    for late in (298, 301, 86_400):
        result = plan_with(job, *make_pods(), now=NOW + late)
        assert (result.status.attempt, result.delete, result.create) == (1, (), ())
        assert num_gang_restarts(result.status) == 0
        no_answer = condition(result.status, "Progressing") == ("Unknown", "NoAnswer")
        assert no_answer == (late > 299)
        assert [event.reason for event in result.events] == ["NoAnswer"] * (late == 301)
        job = with_status(job, result.status)
        assert plan_with(job, *make_pods(), now=NOW + late).events == ()
    answered = plan_with(job, *make_pods(), progress=progress())
    assert condition(answered.status, "Progressing") == ("True", "Stepping")


def test_a_job_with_too_few_nodes_has_no_deadline() -> None:
    job = running(nodes={"min": 2, "max": 2})
    pods = make_pod(0, job), make_pod(1, job, **PENDING)
    assert plan_with(job, *pods, now=NOW + 10**6).status.attempt == 1


SILENT_SERVICE: dict[str, Any] = {"heard": MembersReport(silent=frozenset({"rdzv"}))}
SILENT_NODE: dict[str, Any] = {"heard": MembersReport(frozenset({"pod-0"}), frozenset({"pod-1"}))}
LEAVING: dict[str, Any] = {"deleting": True, "deletion_deadline": NOW + 100}


@pytest.mark.parametrize(
    "replaced",
    [
        {"rendezvous": None},
        {"rendezvous": rendezvous(**PENDING)},
        {"rendezvous": rendezvous(**LEAVING)},
        {"rendezvous": rendezvous(phase="Failed", exit_code=1)},
        {"rendezvous": rendezvous(started=NOW + 3600)},
        {"nodes": lost("node-s")},
        {"nodes": lost("node-1")},
        SILENT_SERVICE,
        SILENT_NODE,
    ],
    ids=[
        "no rendezvous pod",
        "one that is pending",
        "one that is being deleted",
        "one that has failed",
        "one whose clock is wrong",
        "its node is lost",
        "a node is lost",
        "a silent service",
        "a silent node",
    ],
)
def test_a_stall_is_not_acted_on_while_its_cause_is_replaced_but_not_for_ever(
    replaced: dict[str, Any],
) -> None:
    for silent, attempt in ((71, 1), (369, 1), (371, 2)):
        ranks = answer(rank(0, silent=silent), rank(1, silent=500))
        result = plan_with(running(), *make_pods(), progress=ranks, **replaced)
        assert (result.status.attempt, num_gang_restarts(result.status)) == (attempt, attempt - 1)


@pytest.mark.parametrize(
    ("up", "silent", "attempt", "wait"),
    [
        (1000.0, 69, 1, 1.0),
        (1000.0, 71, 2, None),
        (61.0, 71, 2, None),
        (59.0, 71, 1, 1.0),
        (5.0, 71, 1, 55.0),
        (5.0, 10, 1, 60.0),
        (5.0, 369, 1, 1.0),
        (5.0, 371, 2, None),
    ],
)
def test_agents_have_the_time_to_join_a_new_rendezvous_pod(
    up: float, silent: float, attempt: int, wait: float | None
) -> None:
    present = {"progress": answer(rank(silent=silent)), "rendezvous": rendezvous(started=NOW - up)}
    result = plan_with(running(), *make_pods(), **present)
    assert (result.status.attempt, num_gang_restarts(result.status)) == (attempt, attempt - 1)
    if wait is not None:
        assert result.requeue_after == pytest.approx(wait)


def test_a_lost_pod_that_is_being_deleted_no_longer_delays_the_watchdog() -> None:
    job = running()
    pods = make_pod(0), make_pod(1, **LEAVING)
    result = plan_with(job, *pods, progress=answer(rank(silent=71)), nodes=lost("node-1"))
    assert result.status.attempt == 2


SLOW = Straggler(rank=3, pod="pod-1", cause="compute", slowdown=1.4)
NAMED = StragglerStatus(rank=3, pod="job-1", node="node-1", cause="compute", slowdown=1.4)


def answer_with(straggler: Straggler | None, step: int = 7) -> Progress:
    """Return the answer of a rank 0 that has made ``step``."""
    progress = pods.progress(straggler=straggler)
    return replace(progress, status=progress.status.model_copy(update={"step": step}))


def next_status(
    job: Any, straggler: Straggler | None, seconds: float = 0.0, step: int = 7
) -> Status:
    training = pods.make_pods(2, job)
    progress = answer_with(straggler, step)
    return pods.plan_with(job, *training, progress=progress, now=NOW + seconds).status


@pytest.mark.parametrize(
    ("straggler", "named"),
    [
        (None, None),
        (SLOW, NAMED),
        (replace(SLOW, pod="pod-0"), NAMED.model_copy(update={"pod": "job-0", "node": "node-0"})),
        (replace(SLOW, pod="pod-of-another-job"), None),
        (replace(SLOW, pod=""), None),  # of an unknown pod
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
    progress = answer_with(replace(SLOW, pod="old"))
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
    result = pods.plan_with(job, *pods.make_pods(2, job), progress=answer_with(SLOW))
    assert (result.delete, pods.created_pods(result)) == ((), [])


FIRST = {"import": 5.0, "load": 20.0, "compile": 30.0, "step": 40.0, "save": 2.0}
LATER = {**FIRST, "step": 90.0, "save": 4.0, "evaluate": 3.0, "sample": 1.0, "finish": 0.5}


def report(life: int, train: float, phases: dict[str, float]) -> ProgressStatus:
    """Return what the processes report that made their first step ``life`` minutes after NOW."""
    first = stamp(NOW + 60 * life)
    return ProgressStatus(firstStepTime=first, trainSeconds=train, phaseSeconds=phases)


def spent(**parts: float) -> dict[str, float]:
    return {name: parts.get(name, 0.0) for name in TimeSpent.model_fields if name != "until"}


@pytest.mark.parametrize(
    ("old", "new", "resumed_from", "elapsed", "cause", "parts"),
    [
        (None, None, None, 50, "pending", spent(pending=50)),
        (None, report(1, 70, FIRST), 0, 100, "start", spent(start=58, step=40, save=2)),
        (report(1, 70, FIRST), report(1, 70, FIRST), 0, 10, "start", spent(start=10)),
        (
            report(1, 70, FIRST),
            report(1, 120, LATER),
            0,
            60,
            "start",
            spent(step=50, save=2, evaluate=4, other=0.5, start=3.5),
        ),
        # the next processes resumed 25 s of training before the last report
        (
            report(1, 120, LATER),
            report(9, 165, FIRST),
            95,
            120,
            "start",
            spent(start=78, step=15, save=2, redone=25),
        ),
        # from a checkpoint that is 10 s newer than the last report
        (
            report(1, 120, LATER),
            report(9, 200, FIRST),
            130,
            120,
            "start",
            spent(start=68, step=50, save=2),
        ),
        # of the time before the first checkpoint, compiling is no step
        (
            report(1, 70, FIRST),
            report(9, 70, FIRST),
            0,
            100,
            "start",
            spent(start=58, save=2, redone=40),
        ),
    ],
)
def test_time_is_added_by_cause(
    old: ProgressStatus | None,
    new: ProgressStatus | None,
    resumed_from: float | None,
    elapsed: int,
    cause: str,
    parts: dict[str, float],
) -> None:
    used = TimeSpent(until=stamp(NOW), step=1000, pending=1000)
    before = Status(startTime=stamp(NOW - 2000), progress=old, timeSpent=used)
    after = next_time_spent(before, new, NOW + elapsed, cause, resumed_from)
    assert after is not None
    assert after.until == stamp(NOW + elapsed)
    added = after.model_dump(exclude={"until"})
    added["step"] -= 1000
    added["pending"] -= 1000
    assert added == pytest.approx(parts)
    assert sum(added.values()) == pytest.approx(elapsed)


def test_a_stall_is_taken_from_its_phase() -> None:
    before = TimeSpent(until=stamp(NOW), step=500, save=10, other=90)
    stepping = with_stall(before, "step", 100)
    assert stepping is not None
    assert (stepping.step, stepping.stalled, goodput(stepping)) == (400, 100, 0.6667)
    saving = with_stall(before, "save", 100)
    assert saving is not None
    assert (saving.save, saving.stalled) == (0, 10)
    assert with_stall(None, "step", 100) is None
    assert with_stall(before, None, 100) == before


@pytest.mark.parametrize(
    ("time_spent", "fraction"),
    [
        (None, None),
        (TimeSpent(until=stamp(NOW)), None),
        (TimeSpent(until=stamp(NOW), pending=9), None),
        (TimeSpent(until=stamp(NOW), step=9), 1.0),
        (TimeSpent(until=stamp(NOW), step=900, redone=50, start=50), 0.9),
    ],
)
def test_goodput_is_the_productive_fraction(
    time_spent: TimeSpent | None, fraction: float | None
) -> None:
    assert goodput(time_spent) == fraction


def test_a_suspension_is_left_out() -> None:
    before = Status(startTime=stamp(NOW), timeSpent=TimeSpent(until=stamp(NOW), step=9))
    after = without_suspension(before, NOW + 1000)
    assert after == TimeSpent(until=stamp(NOW + 1000), step=9)
    assert without_suspension(Status(), NOW) is None


def answer_after(life: int, train: float, phases: dict[str, float], step: int = 7) -> Progress:
    status = report(life, train, phases).model_copy(
        update={"step": step, "last_step_time": stamp(NOW + 60 * life)}
    )
    ranks = (RankProgress(0, "step", step, step_seconds=1.0),)
    return Progress(status, phase="step", ranks=ranks, train_seconds_before=0.0)


def after(job: Job, now: float, **observed: Any) -> Job:
    """Return ``job`` with the status that the planner writes at ``now``."""
    pods = observed.pop("pods", make_pods(2, job, started=NOW + 40))
    return with_status(job, plan_with(job, *pods, now=now, **observed).status)


def test_the_parts_of_a_life_are_the_time_since_its_start() -> None:
    job = make_job()
    job = after(job, NOW, pods=())
    job = after(job, NOW + 10, pods=make_pods(2, job, **PENDING))
    assert job.status.start_time == stamp(NOW + 10)
    job = after(job, NOW + 40)  # all pods run
    job = after(job, NOW + 110, progress=answer_after(1, 10, {**FIRST, "step": 10.0}))
    for index in range(12, 100, 2):
        present = answer_after(1, index * 10, {**FIRST, "step": index * 10.0}, step=index)
        job = after(job, NOW + 100 + index * 10, progress=present)
    spent = job.status.time_spent
    assert spent is not None
    start, until = seconds(job.status.start_time), seconds(spent.until)
    assert start is not None
    assert until is not None
    parts = spent.model_dump(exclude={"until"})
    assert sum(parts.values()) == pytest.approx(until - start)
    assert parts["pending"] == pytest.approx(30)
    assert job.status.goodput == pytest.approx(parts["step"] / (until - start), abs=1e-4)


def test_progress_alone_is_written_about_once_a_minute() -> None:
    job = after(make_job(), NOW, pods=())
    job = after(job, NOW + 40)
    writes = list[float]()
    for index in range(1, 120):
        now = NOW + 40 + index * 10
        present = answer_after(1, index * 10.0, {"step": index * 10.0}, step=index)
        next_job = after(job, now, progress=present)
        if next_job.status != job.status:
            writes.append(now)
        job = next_job
    gaps = [second - first for first, second in pairwise(writes)]
    assert gaps[:25] == [10.0] * 25, "new processes may be watched"
    assert set(gaps[35:]) <= {60.0, 70.0, 80.0}
    lost = after(job, writes[-1] + 10, pods=make_pods(1, job), progress=answer_after(1, 1200, {}))
    assert lost.status != job.status, "a transition is written at once"


@pytest.mark.slow
def test_jobs_are_written_at_different_times() -> None:
    long = {"step": 1000.0}
    intervals = set[int]()
    for uid in range(20):
        job = replace(make_job(), uid=f"uid-{uid}")
        job = after(after(job, NOW, pods=()), NOW + 40)
        job = after(job, NOW + 50, progress=answer_after(1, 1000, long))
        written = job.status
        wait = 50
        while after(job, NOW + wait, progress=answer_after(1, 1000, long, wait)).status == written:
            wait += 1
        intervals.add(wait - 50)
    assert min(intervals) >= 60
    assert max(intervals) <= 76
    assert len(intervals) > 5


IMPOSSIBLE = (0, 1, 1e10, 1e300, 1.7e308, -1e308)
"""What a trainer, which may be any program, can answer; each is a finite number."""


@pytest.mark.slow
def test_no_answer_of_a_trainer_makes_a_job_older_than_it_is_or_its_status_invalid() -> None:
    chance = random.Random(5)
    for _ in range(200):
        job = after(make_job(), NOW, pods=())
        job = after(job, NOW + 40)
        for now in (NOW + 50, NOW + 120, NOW + 4000):
            told = {phase: chance.choice(IMPOSSIBLE) for phase in ("load", "step", "save")}
            keys = ("trainSeconds", "trainSecondsBefore", "secondsSinceStep", "stepSeconds")
            times = {"firstStepTime": chance.choice((1, now)), "lastStepTime": now}
            values = {"rank": 0, "phase": "step", "step": 7, "phaseSeconds": told, **times}
            values |= {key: chance.choice(IMPOSSIBLE) for key in keys}
            job = after(job, now, progress=Progress.from_json(values))
            spent = job.status.time_spent
            assert spent is not None
            total = sum(spent.model_dump(exclude={"until"}).values())
            assert total <= now - NOW + 1, values


HOUR = 3600.0
clocks = pytest.mark.parametrize("offset", [HOUR, 0.0, -HOUR], ids=["ahead", "right", "behind"])
"""Seconds by which the clock of a node is ahead."""


def seen(*versions: tuple[float, Pod], offset: float) -> Pod:
    """Return the pod as a leader sees its ``versions`` at these times; its kubelet tells other times."""
    clock = Clock(NOW)
    cache = Cache(clock=clock)
    cache.set_job(make_training())
    for clock.now, pod in versions:
        told = replace(
            pod,
            started=None if pod.started is None else pod.started + offset,
            finished=None if pod.finished is None else pod.finished + offset,
        )
        cache.set_pod(as_manifest(told, [OWNER]))
    (manifest,) = cache.pods(KEY)
    return Pod.from_object(manifest)


def watched(pod: Pod, offset: float) -> Pod:
    """Return ``pod`` as a leader that saw each of its changes when it happened."""
    alive: dict[str, Any] = {"exit_code": None, "finished": None, "phase": "Running"}
    versions = [(pod.created, replace(pod, **alive | PENDING))]
    if pod.started is not None:
        versions.append((pod.started, replace(pod, **alive)))
    if pod.finished is not None:
        versions.append((pod.finished, pod))
    return seen(*versions, offset=offset)


def answer_by(offset: float, seconds_ago: float = 1.0, **status: Any) -> Progress:
    """Return the answer of rank 0, received now, whose first step was a minute before its last one."""
    told = NOW - seconds_ago + offset
    times = {"first_step_time": stamp(told - 60), "last_step_time": stamp(told)}
    changed = progress().status.model_copy(update={**times, **status})
    return Progress(changed, seconds_since_step=seconds_ago)


@clocks
@pytest.mark.parametrize("code", [1, 74])
def test_a_program_that_fails_restarts_at_once(code: int, offset: float) -> None:
    job = running(2)
    pods = [watched(failed(index, code, job), offset) for index in range(2)]
    one = plan_with(job, pods[0], make_pod(1, job), progress=progress())
    assert one.decision is not None
    assert (one.decision.action, deleted(one)) == ("run", ["job-0"])
    both = plan_with(job, *pods, progress=progress())
    assert both.decision is not None
    assert (both.decision.action, deleted(both)) == ("restart", ["job-0", "job-1"])


@clocks
@pytest.mark.parametrize(("seconds_later", "charged"), [(5.0, 1), (60.0, 2)])
def test_a_second_failure_is_charged_after_steps_only(
    seconds_later: float, charged: int, offset: float
) -> None:
    """The last step was made 30 s after the first failure, or before it."""
    job = running(4, nodes={"min": 1, "max": 4})
    others = [make_pod(index, job) for index in (2, 3)]
    pods = watched(failed(0, 74, job), offset), make_pod(1, job), *others
    job = with_status(job, plan_with(job, *pods, progress=answer_by(offset)).status)
    now = NOW + seconds_later
    ended = {"finished": now - 1, "started": NOW - 600, "created": NOW - 601}
    ago = seconds_later - 30 if charged == 2 else seconds_later + 1
    told = stamp(now - ago + offset)
    progress_now = Progress(
        answer_by(offset, step=99).status.model_copy(update={"last_step_time": told}),
        seconds_since_step=ago,
    )
    pod = watched(failed(1, 74, job, **ended), offset)
    status = plan_with(job, pod, *others, progress=progress_now, now=now).status
    assert status.restarts is not None
    assert status.restarts.charged == charged


@clocks
def test_a_killed_pod_is_replaced_at_once(offset: float) -> None:
    job = running(2)
    pod = watched(failed(0, 137, job), offset)
    result = plan_with(job, pod, make_pod(1, job), progress=progress())
    assert deleted(result) == ["job-0"]
    assert result.status.node_faults[0].time == stamp(NOW - 1)


@clocks
def test_a_pod_that_soon_fails_is_replaced_after_a_delay(offset: float) -> None:
    job = running(2)
    soon = {"created": NOW - 20, "started": NOW - 15, "finished": NOW - 2}
    pod = watched(failed(0, 137, job, **soon), offset)
    early = plan_with(job, pod, make_pod(1, job), progress=progress())
    assert (deleted(early), early.requeue_after) == ([], 8.0)
    late = plan_with(job, pod, make_pod(1, job), progress=progress(), now=NOW + 8)
    assert deleted(late) == ["job-0"]
    assert [retry.count for retry in late.status.retries] == [1]


@clocks
def test_a_replacement_that_runs_for_a_minute_ends_the_delays(offset: float) -> None:
    job = running(2)
    soon = {"created": NOW - 20, "started": NOW - 15, "finished": NOW - 12}
    pod = watched(failed(0, 137, job, **soon), offset)
    job = with_status(job, plan_with(job, pod, make_pod(1, job), progress=progress()).status)
    assert len(job.status.retries) == 1
    again = watched(make_pod(0, job, uid="again", created=NOW + 2, started=NOW + 5), offset)
    for after, count in ((64, 1), (65, 0)):
        result = plan_with(job, again, make_pod(1, job), progress=progress(), now=NOW + after)
        assert len(result.status.retries) == count, after


@clocks
def test_a_job_completes_although_a_pod_does_not_end(offset: float) -> None:
    job = running(2)
    pod = watched(make_pod(0, job, **{**SUCCEEDED, "finished": NOW - 20}), offset)
    early = plan_with(job, pod, make_pod(1, job), progress=progress())
    assert (early.status.phase, early.requeue_after) == ("Running", 10.0)
    late = plan_with(job, pod, make_pod(1, job), progress=progress(), now=NOW + 10)
    assert late.status.phase == "Complete"


@pytest.mark.parametrize("offsets", [(0.0, HOUR), (-HOUR, 0.0), (HOUR, -HOUR), (HOUR, HOUR)])
def test_a_job_that_trains_is_running(offsets: tuple[float, float]) -> None:
    job = running(2, nodes={"min": 2, "max": 2})
    pods = [watched(pod, offsets[pod.index]) for pod in make_pods(2, job, started=NOW - 100)]
    result = plan_with(job, *pods, progress=answer_by(offsets[0]))
    assert result.status.phase == "Running"
    assert condition(result.status, "Progressing") == ("True", "Stepping")
    assert result.status.progress is not None
    assert result.status.progress.last_step_time == stamp(NOW - 1)
    assert result.first_step_time == NOW - 61
    silent = plan_with(with_status(job, result.status), *pods)
    assert silent.status.phase == "Running", "without an answer, by the time in the status"


@clocks
def test_a_job_whose_pods_have_just_started_is_not_running(offset: float) -> None:
    job = running(2, nodes={"min": 2, "max": 2})
    pods = [watched(pod, offset) for pod in make_pods(2, job, started=NOW - 5)]
    result = plan_with(job, *pods, progress=answer_by(offset, seconds_ago=20))
    assert result.status.phase == "Restarting"


@clocks
def test_a_job_that_restarted_in_place_is_running_after_another_step(offset: float) -> None:
    last = InPlaceRestart(
        attempt=1,
        generation=1,
        step=7,
        time=stamp(NOW - 90),
        lastStepTime=stamp(NOW - 100),
    )
    job = running(2)
    job = with_status(job, job.status.model_copy(update={"in_place_restart": last}))
    pods = make_pods(2, job)
    before = plan_with(job, *pods, progress=answer_by(offset, seconds_ago=100.4))
    assert before.status.phase == "Restarting"
    after = plan_with(job, *pods, progress=answer_by(offset, seconds_ago=40))
    assert after.status.phase == "Running"


@clocks
def test_the_same_step_in_several_answers_changes_nothing(offset: float) -> None:
    job = running(2)
    told = replace(answer_by(offset, 400, samples=57), age=0.0)
    job = with_status(job, plan_with(job, *make_pods(2, job), progress=told, now=NOW + 60).status)
    assert job.status.progress is not None
    assert job.status.progress.last_step_time == stamp(NOW - 340)
    for late in (0.2, 0.7, 1.3, 4.0, 0.4):
        later = NOW + 460 + late
        same = replace(told, seconds_since_step=700.0, age=100.0)
        result = plan_with(job, *make_pods(2, job), progress=same, now=later)
        assert result.status == job.status, late


@clocks
def test_a_task_whose_steps_have_no_number_makes_progress(offset: float) -> None:
    job = running(2)
    for later in (10.0, 70.0, 140.0):
        report = replace(answer_by(offset, later + 1), age=2 * later)
        result = plan_with(job, *make_pods(2, job), progress=report, now=NOW + 4 * later)
        job = with_status(job, result.status)
        assert job.status.progress is not None
        assert job.status.progress.last_step_time == stamp(NOW + later - 1)


@clocks
def test_the_newest_of_several_termination_messages_counts(offset: float) -> None:
    job = running(2)

    def ended(index: int, step: int, finished: float, told: float) -> Pod:
        final = Progress(ProgressStatus(step=step, lastStepTime=stamp(finished - 2 + told)))
        pod = watched(failed(index, 137, job, finished=finished), told)
        return replace(pod, final_progress=final.ended_at(finished + told))

    job = with_status(job, job.status.model_copy(update={"progress": None}))
    pods = (ended(0, 100, NOW - 60, offset), ended(1, 120, NOW - 30, -offset))
    result = plan_with(job, *pods)
    assert result.status.progress is not None
    assert result.status.progress.step == 120
    assert result.status.progress.last_step_time == stamp(NOW - 32)


@clocks
def test_a_node_counts_as_lost_after_a_grace_time(offset: float) -> None:
    job, clock = running(2), Clock(LONG_AGO)
    cache = Cache(clock=clock)
    for name in ("node-0", "node-1", "node-s", "spare"):
        cache.set_node(node(name, True, LONG_AGO + offset))
    clock.now = NOW - 5
    cache.set_node(node("node-1", False, clock.now + offset))
    observed = observe(job, *make_pods(2, job), nodes=cache.nodes)
    early = plan(job, observed, NOW)
    assert (deleted(early), early.requeue_after) == ([], 15.0)
    assert deleted(plan(job, observed, NOW + 15)) == ["job-1"]


@clocks
def test_nodes_that_were_lost_together_are_an_outage_for_an_hour(offset: float) -> None:
    job, clock = running(2), Clock(LONG_AGO)
    cache = Cache(clock=clock)
    names = ("node-0", "node-1", "node-s")
    for name in names:
        cache.set_node(node(name, True, LONG_AGO + offset))
    clock.now = NOW - 600
    for name in names[:2]:
        cache.set_node(node(name, False, clock.now + offset))
    result = plan(job, observe(job, *make_pods(2, job), nodes=cache.nodes), NOW)
    assert deleted(result) == []
    assert message(result.status, "Healthy").startswith("2 of 3 nodes are not ready")


def node(name: str, ready: bool, told: float) -> dict[str, Any]:
    manifest = make_node(name, ready)
    manifest["status"]["conditions"][0]["lastTransitionTime"] = stamp(told)
    return manifest


@pytest.mark.parametrize(("offset", "delay"), [(HOUR, 10.0), (0.0, 8.0), (-HOUR, 8.0 - 18.0)])
def test_a_new_leader_delays_at_most_as_if_the_pod_had_ended_now(
    offset: float, delay: float
) -> None:
    job = running(2)
    soon = {"created": NOW - 20, "started": NOW - 15, "finished": NOW - 2}
    pod = seen((NOW, failed(0, 137, job, **soon)), offset=offset)
    result = plan_with(job, pod, make_pod(1, job), progress=progress())
    if delay > 0:
        assert (deleted(result), result.requeue_after) == ([], delay)
    else:
        assert pod.finished == pod.created
        assert deleted(result) == ["job-0"], "created that long ago"


@clocks
def test_agents_have_a_minute_to_join_a_new_rendezvous_pod(offset: float) -> None:
    job = running(2)
    service = watched(rendezvous(job, created=NOW - 25, started=NOW - 20), offset)
    hung = RankProgress(0, "step", 7, 99.0, 1.0)
    for after, restarts in ((39, 0), (40, 1)):
        report = replace(answer_by(offset, 99), ranks=(hung,), phase="step")
        seen_by = {"rendezvous": service, "progress": report, "now": NOW + after}
        result = plan_with(job, *make_pods(2, job), **seen_by)
        assert result.status.restarts is not None
        assert result.status.restarts.charged == restarts, after
