"""Faults of nodes: which are believed, attributed and counted once, and what happens to the pods.

Which nodes new pods exclude or avoid, and when that is lifted. A disruption budget exists only while a pod
runs or is about to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    PENDING,
    SUCCEEDED,
    causes,
    condition,
    created,
    created_pods,
    deleted,
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    observe,
    plan_with,
    progress,
    rendezvous,
    running,
    started,
    with_status,
)

from fluxtrain.contract.process import STEP
from fluxtrain.contract.resource.status import NodeFault, Status
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import Distrust, Fault, Score, ordered, score
from fluxtrain_operator.base.reports import MembersReport, RankProgress
from fluxtrain_operator.planner.guard import Reason, control_plane_outage
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod, nodes_for
from fluxtrain_operator.planner.plan import Plan, plan
from fluxtrain_operator.resources import DISRUPTION_BUDGET

NAMES = ("node-0", "node-1", "node-s", "spare-0", "spare-1")
UNHEALTHY = "GPU 3 is unhealthy"


def nodes(*not_ready: str, seconds_ago: float = 60.0) -> dict[str, NodeView]:
    """Return five nodes of which ``not_ready`` have not been ready for ``seconds_ago``."""
    since = NOW - seconds_ago
    return {name: NodeView(name, ready=name not in not_ready, since=since) for name in NAMES}


@pytest.mark.parametrize(
    ("seconds_not_ready", "num_nodes", "progress_ago", "is_lost"),
    [
        (60, 2, 5, False),  # both made progress five seconds ago
        (60, 2, 61, True),  # too long ago
        (5, 2, 61, False),  # within the grace period
        (5, 1, 5, True),  # training goes on without it
        (21, None, 5, True),  # a number of nodes is not reported
        (19, None, 5, False),
        (60, 3, 5, False),
    ],
)
def test_a_node_is_lost_if_training_goes_on_without_it_or_stops(
    seconds_not_ready: float, num_nodes: int | None, progress_ago: float, is_lost: bool
) -> None:
    state = nodes("node-1", seconds_ago=seconds_not_ready)
    answer = progress(progress_ago, num_nodes=num_nodes)
    result = plan_with(running(), *make_pods(), nodes=state, progress=answer)
    assert deleted(result) == (["job-1"] if is_lost else [])
    reason = "NodeLost" if is_lost else "NodeNotReady"
    assert condition(result.status, "Healthy") == ("False", reason)
    assert is_lost or 0 <= (result.requeue_after or 61) <= 60


@pytest.mark.parametrize(("num_nodes", "expected"), [(3, []), (2, []), (1, ["job-1"])])
def test_no_pod_is_lost_while_as_many_train_as_run(num_nodes: int, expected: list[str]) -> None:
    job = running()
    deleting = make_pod(2, deleting=True, deletion_deadline=NOW + 100, node="spare-0")
    state, answer = nodes("node-1", "spare-0"), progress(num_nodes=num_nodes)
    result = plan_with(job, *make_pods(), deleting, nodes=state, progress=answer)
    assert deleted(result) == expected


@pytest.mark.parametrize("answer", [progress(5), progress(3000), None], ids=["new", "old", "none"])
@pytest.mark.parametrize("not_ready", [NAMES, NAMES[:3], ("node-1", "spare-0", "spare-1")])
def test_nothing_is_deleted_while_most_nodes_are_not_ready(
    not_ready: tuple[str, ...], answer: object
) -> None:
    job = running(restart={"forceDeleteOnLostNode": True, "noProgressSeconds": 86_400})
    result = plan_with(job, *make_pods(), nodes=nodes(*not_ready), progress=answer)
    assert (deleted(result), created(result), result.status.attempt) == ([], [], 1)
    assert condition(result.status, "Healthy") == ("False", "NodesUnknown")
    assert [event.reason for event in result.events] == ["NodesUnknown"]
    assert result.requeue_after == 20, "changes of other nodes do not requeue the job"


def test_nodes_not_ready_for_hours_indicate_no_outage_of_the_control_plane() -> None:
    old = {f"old-{n}": NodeView(f"old-{n}", ready=False, since=NOW - 7200) for n in range(90)}
    state = nodes("node-1") | old
    result = plan_with(running(), *make_pods(), nodes=state, progress=progress(num_nodes=1))
    assert deleted(result) == ["job-1"]


def test_a_deleted_node_is_lost_even_if_all_others_are_not_ready() -> None:
    state = nodes(*NAMES) | {"node-1": NodeView("node-1", ready=False, gone=True)}
    result = plan_with(running(), *make_pods(), nodes=state, progress=progress(num_nodes=2))
    assert deleted(result) == ["job-1"]


def test_the_rendezvous_pod_stays_on_a_not_ready_node_while_training_goes_on() -> None:
    job, state = running(), nodes("node-s")
    training = plan_with(job, *make_pods(), nodes=state, progress=progress(num_nodes=2))
    assert deleted(training) == []
    assert deleted(plan_with(job, *make_pods(), nodes=state)) == ["job-rendezvous"]


@pytest.mark.parametrize(
    ("unhealthy", "is_believed"), [(("node-1",), True), (NAMES, False), (NAMES[:3], False)]
)
def test_unhealthy_gpus_are_ignored_if_most_nodes_report_them(
    unhealthy: tuple[str, ...], is_believed: bool
) -> None:
    job = running(gpusPerNode=8)
    state = {f"cpu-{n}": NodeView(f"cpu-{n}") for n in range(20)}
    for name in NAMES:
        reason = UNHEALTHY if name in unhealthy else ""
        state[name] = NodeView(name, unhealthy=reason, has_gpus=True)
    pods = make_pods(2, job)
    result = plan_with(job, *pods, nodes=state, progress=progress())
    assert deleted(result) == (["job-1"] if is_believed else [])
    reason = "UnhealthyGPU" if is_believed else "UnhealthyGPUs"
    assert condition(result.status, "Healthy") == ("False", reason)
    (pod,) = created_pods(plan_with(job, pods[0], nodes=state, progress=progress()))
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity")
    assert (affinity is not None) == is_believed


@pytest.mark.parametrize(("seconds_ago", "expected"), [(0, []), (19, []), (20, ["job-1"])])
def test_unhealthy_gpus_are_believed_after_a_while_and_their_node_is_avoided_at_once(
    seconds_ago: float, expected: list[str]
) -> None:
    job, since = running(gpusPerNode=8), NOW - seconds_ago
    state = {name: NodeView(name, has_gpus=True) for name in NAMES}
    state["node-1"] = NodeView("node-1", unhealthy=UNHEALTHY, unhealthy_since=since, has_gpus=True)
    pods = make_pods(2, job)
    result = plan_with(job, *pods, nodes=state, progress=progress())
    assert deleted(result) == expected
    if not expected:
        assert result.requeue_after == pytest.approx(20 - seconds_ago)
    (pod,) = created_pods(plan_with(job, pods[0], nodes=state, progress=progress()))
    assert "node-1" in str(pod["spec"]["affinity"]["nodeAffinity"])


def test_the_pod_of_a_lost_node_is_replaced_at_once_under_another_index() -> None:
    job, state = running(), lost("node-1")
    result = plan_with(job, *make_pods(), nodes=state, progress=progress())
    assert (deleted(result), created(result)) == (["job-1"], ["job-2"])
    assert result.delete[0].grace_seconds is None, "forced only if the job allows it"
    assert condition(result.status, "Healthy") == ("False", "NodeLost")
    job, new = with_status(job, result.status), make_pod(2, replacement=1)
    deleting = make_pod(1, deleting=True, deletion_deadline=NOW + 180)
    again = plan_with(job, make_pod(0), deleting, new, nodes=state, progress=progress())
    assert (again.delete, again.create) == ((), ())
    job = with_status(job, again.status)
    assert created(plan_with(job, make_pod(0), new, progress=progress())) == []


def test_the_pod_of_a_lost_node_is_force_deleted_once_if_the_job_allows_it() -> None:
    job = running(restart={"forceDeleteOnLostNode": True})
    deleting = make_pod(1, deleting=True, deletion_deadline=NOW + 180)
    forced = replace(deleting, forced=True, finalizers=(names.KUEUE_FINALIZER,))
    for pod, expected in ((make_pod(1), [0]), (deleting, [0]), (forced, [])):
        result = plan_with(job, make_pod(0), pod, nodes=lost("node-1"), progress=progress())
        assert [delete.grace_seconds for delete in result.delete] == expected


def test_a_pod_that_is_not_deleted_in_time_counts_as_lost() -> None:
    stuck = make_pod(1, deleting=True, deletion_deadline=NOW - 31)
    assert created(plan_with(running(), make_pod(0), stuck, progress=progress())) == ["job-2"]


def test_a_pod_on_an_unhealthy_gpu_moves_to_another_node() -> None:
    job = running(gpusPerNode=8)
    unhealthy = NodeView("node-1", unhealthy=UNHEALTHY, has_gpus=True)
    state = {"node-0": NodeView("node-0", has_gpus=True), "node-1": unhealthy}
    pods = make_pods(2, job)
    first = plan_with(job, *pods, nodes=state, progress=progress())
    assert (deleted(first), created(first)) == (["job-1"], [])
    assert condition(first.status, "Healthy") == ("False", "UnhealthyGPU")
    (pod,) = created_pods(plan_with(job, pods[0], nodes=state, progress=progress()))
    assert "'values': ['node-1']" in str(pod["spec"]["affinity"]["nodeAffinity"])


DEADLOCK = "condition KernelDeadlock=True"


@pytest.mark.parametrize(("seconds_ago", "expected"), [(0, []), (19, []), (20, ["job-1"])])
def test_a_node_that_is_marked_for_a_while_is_left_by_jobs_without_gpus_too(
    seconds_ago: float, expected: list[str]
) -> None:
    job, state = running(), nodes()
    state["node-1"] = replace(
        state["node-1"], problem=DEADLOCK, problem_since=NOW - seconds_ago, hostname="host-1"
    )
    result = plan_with(job, *make_pods(), nodes=state, progress=progress())
    assert deleted(result) == expected
    if expected:
        assert condition(result.status, "Healthy") == ("False", "UnhealthyNode")
        assert [d.reason for d in result.delete] == [Reason.UNHEALTHY_NODE]
        assert causes(result.status) == {"UnhealthyNode": 1}
    else:
        assert result.requeue_after == pytest.approx(20 - seconds_ago)
    (pod,) = created_pods(plan_with(job, make_pod(), nodes=state, progress=progress()))
    assert "'values': ['host-1']" in str(pod["spec"]["affinity"]["nodeAffinity"])


@pytest.mark.parametrize(
    ("num_marked", "is_believed"), [(1, True), (2, True), (3, False), (5, False)]
)
def test_marks_of_most_nodes_are_not_believed(num_marked: int, is_believed: bool) -> None:
    state = nodes()
    for name in ("node-1", *(n for n in NAMES if n != "node-1"))[:num_marked]:
        state[name] = replace(state[name], problem=DEADLOCK)
    result = plan_with(running(), *make_pods(), nodes=state, progress=progress())
    assert ("job-1" in deleted(result)) == is_believed
    reason = "UnhealthyNode" if is_believed else "UnhealthyNodes"
    assert condition(result.status, "Healthy") == ("False", reason)
    if not is_believed:
        assert [event.reason for event in result.events] == ["UnhealthyNodes"]
        assert result.requeue_after == 20


def test_marked_gpus_are_replaced_even_if_marks_of_whole_nodes_are_not_believed() -> None:
    job = running(gpusPerNode=8)
    state = {n: NodeView(n, problem=DEADLOCK, has_gpus=True) for n in NAMES}
    state["node-1"] = replace(state["node-1"], unhealthy=UNHEALTHY)
    result = plan_with(job, *make_pods(2, job), nodes=state, progress=progress())
    assert [(d.name, d.reason) for d in result.delete] == [("job-1", Reason.UNHEALTHY_GPU)]


def test_the_rendezvous_pod_is_replaced_unless_that_could_split_the_training() -> None:
    job = running(nodes={"min": 2, "max": 2})
    pods = make_pods(2, job)
    assert created(plan_with(job, *pods, rendezvous=None)) == ["job-rendezvous"]
    result = plan_with(job, *pods, nodes=lost("node-s"))
    assert [(d.name, d.grace_seconds) for d in result.delete] == [("job-rendezvous", 0)]
    deleting = rendezvous(job, deleting=True, deletion_deadline=NOW + 5)
    result = plan_with(job, *pods, rendezvous=deleting, nodes=lost("node-s"))
    assert [delete.grace_seconds for delete in result.delete] == [0]
    result = plan_with(job, *pods, nodes=lost("node-s", "node-0", "node-1"))
    grace = {delete.name: delete.grace_seconds for delete in result.delete}
    assert grace["job-rendezvous"] is None, "pods on lost nodes may still train"


SILENT = MembersReport(frozenset({"pod-0"}), frozenset({"pod-1"}))


def test_a_silent_pod_is_replaced_on_another_node_before_its_node_is_not_ready() -> None:
    result = plan_with(running(), *make_pods(), nodes=nodes(), heard=SILENT)
    assert (deleted(result), created(result)) == (["job-1"], ["job-2"])
    message = "job-1: node node-1 is lost: its agent sends no heartbeats"
    assert [event.message for event in result.events] == [f"{message}; replaced"]
    (pod,) = created_pods(result)
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert affinity == {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "preference": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-1"]}
                    ]
                },
            }
        ]
    }


def test_a_silent_rendezvous_pod_is_replaced_by_force_unless_that_could_split_the_training() -> (
    None
):
    job = running()
    result = plan_with(
        job, *make_pods(), nodes=nodes(), heard=MembersReport(silent=frozenset({"rdzv"}))
    )
    assert [(d.name, d.grace_seconds) for d in result.delete] == [("job-rendezvous", 0)]
    both = plan_with(
        job,
        *make_pods(),
        nodes=nodes(),
        heard=MembersReport(frozenset({"pod-0"}), frozenset({"rdzv", "pod-1"})),
    )
    grace = {d.name: d.grace_seconds for d in both.delete}
    assert grace == {"job-1": None, "job-rendezvous": None}


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        (nodes(*NAMES[:3]), {}),
        (nodes(), {"phase": "Pending", "started": None}),
        (nodes(), {"deleting": True, "deletion_deadline": NOW + 60}),
    ],
    ids=["most nodes not ready", "does not run", "is being deleted"],
)
def test_a_silent_pod_is_not_replaced(state: dict[str, NodeView], changes: dict[str, Any]) -> None:
    first, second = make_pods()
    result = plan_with(running(), first, replace(second, **changes), nodes=state, heard=SILENT)
    assert "job-1" not in deleted(result)


def test_a_silent_pod_is_replaced_without_any_view_of_nodes() -> None:
    result = plan_with(running(), *make_pods(), nodes={}, heard=SILENT)
    assert deleted(result) == ["job-1"]


@pytest.mark.parametrize("answer", [progress(61), None], ids=["old", "none"])
def test_a_pod_whose_agent_is_alive_stays_on_a_node_that_is_not_ready(answer: object) -> None:
    alive = MembersReport(alive=frozenset({"pod-0", "pod-1"}))
    result = plan_with(running(), *make_pods(), nodes=nodes("node-1"), progress=answer, heard=alive)
    assert deleted(result) == []
    assert condition(result.status, "Healthy") == ("False", "NodeNotReady")
    one = MembersReport(frozenset({"pod-1"}), frozenset({"pod-0"}))
    state = nodes("node-0", "node-1")
    result = plan_with(running(), *make_pods(), nodes=state, progress=answer, heard=one)
    assert deleted(result) == ["job-0"]


@pytest.mark.parametrize(
    ("pod", "silent", "is_lost"),
    [("pod-1", 59.0, False), ("pod-1", 60.0, True), ("pod-0", 1.0, True), ("", 1.0, True)],
)
def test_a_pod_whose_rank_tells_of_progress_stays_on_a_node_that_is_not_ready(
    pod: str, silent: float, is_lost: bool
) -> None:
    rank = RankProgress(1, STEP, 7, silent, pod=pod)
    answer = progress(num_nodes=None, ranks=(rank,))  # whether both nodes train, it does not tell
    result = plan_with(running(), *make_pods(), nodes=nodes("node-1"), any_progress=answer)
    assert deleted(result) == (["job-1"] if is_lost else [])


@pytest.mark.parametrize(
    ("left", "expected"),
    [(None, ["job-0", "job-1"]), (2, ["job-0", "job-1"]), (1, ["job-0"]), (0, []), (-1, [])],
)
def test_no_more_pods_are_replaced_than_the_budget_of_all_jobs_allows(
    left: int | None, expected: list[str]
) -> None:
    job, state = running(), nodes("node-0", "node-1")
    result = plan_with(job, *make_pods(), nodes=state, disruptions_left=left)
    assert deleted(result) == expected
    assert len(created(result)) == len(expected), "no pod is created beside one that stays"
    is_limited = len(expected) < 2
    reason = "DisruptionLimited" if is_limited else "NodeLost"
    assert condition(result.status, "Healthy") == ("False", reason)
    assert ("DisruptionLimited" in [event.reason for event in result.events]) == is_limited
    assert not is_limited or result.requeue_after == 20


def test_the_budget_counts_unhealthy_gpus_and_the_rendezvous_pod_too() -> None:
    job = running(gpusPerNode=8)
    state = {name: NodeView(name, has_gpus=True) for name in NAMES}
    state["node-1"] = NodeView("node-1", unhealthy=UNHEALTHY, has_gpus=True)
    state["node-s"] = NodeView("node-s", ready=False, since=NOW - 60)
    observed = {"nodes": state, "disruptions_left": 1}
    result = plan_with(job, *make_pods(2, job), **observed)
    assert deleted(result) == ["job-1"]
    result = plan_with(job, *make_pods(1, job), **observed)
    assert deleted(result) == ["job-rendezvous"]


def test_pods_stay_on_unhealthy_nodes_if_no_other_node_could_take_them() -> None:
    job = running(gpusPerNode=8)
    sick = {
        "node-0": NodeView("node-0", unhealthy=UNHEALTHY, has_gpus=True),
        "node-1": NodeView("node-1", problem="condition KernelDeadlock=True", has_gpus=True),
        "node-2": NodeView("node-2", ready=False, since=NOW - 60, has_gpus=True),
        "node-3": NodeView("node-3", cordoned=True, has_gpus=True),
        "node-s": NodeView("node-s"),
    }
    result = plan_with(job, *make_pods(2, job), nodes=sick)
    assert deleted(result) == []
    assert condition(result.status, "Healthy") == ("False", "UnhealthyGPUs")
    well = sick | {"node-3": NodeView("node-3", has_gpus=True)}
    assert deleted(plan_with(job, *make_pods(2, job), nodes=well)) == ["job-0", "job-1"]
    gone = well | {"node-3": NodeView("node-3", ready=False, gone=True)}
    assert deleted(plan_with(job, *make_pods(2, job), nodes=gone)) == []
    without_gpus = running()  # node-s takes its pods, and marks of GPUs do not concern it
    assert deleted(plan_with(without_gpus, *make_pods(2), nodes=sick)) == ["job-1"]


def test_a_rendezvous_pod_that_stays_on_unhealthy_gpus_takes_no_budget() -> None:
    job = running(gpusPerNode=8)
    state = {name: NodeView(name, has_gpus=True) for name in NAMES}
    state["node-s"] = NodeView("node-s", unhealthy=UNHEALTHY, has_gpus=True)
    state["node-1"] = NodeView("node-1", ready=False, since=NOW - 60)
    result = plan_with(job, *make_pods(2, job), nodes=state, disruptions_left=1)
    assert deleted(result) == ["job-1"]
    assert condition(result.status, "Healthy") == ("False", "NodeLost")


def test_a_pod_that_is_deleted_already_or_whose_node_is_deleted_needs_no_budget() -> None:
    job, state = running(), nodes("node-0")
    state |= {"node-1": NodeView("node-1", ready=False, gone=True)}
    deleting = make_pod(0, deleting=True, deletion_deadline=NOW + 100)
    result = plan_with(job, deleting, make_pod(1), nodes=state, disruptions_left=0)
    assert deleted(result) == ["job-1"]
    assert len(created(result)) == 2


@pytest.mark.parametrize("force", [True, False])
def test_no_pod_is_force_deleted_while_most_nodes_are_not_ready(force: bool) -> None:
    job = running(restart={"forceDeleteOnLostNode": force})
    stuck = make_pod(1, deleting=True, deletion_deadline=NOW - 31)
    assert deleted(plan_with(job, make_pod(0), stuck, nodes=nodes(*NAMES))) == []
    expected = ["job-1"] if force else []
    assert deleted(plan_with(job, make_pod(0), stuck, nodes=nodes())) == expected


def test_a_job_that_makes_no_progress_is_not_restarted_while_most_nodes_are_not_ready() -> None:
    job, stalled = running(), progress(5000)
    blind = plan_with(
        job, *make_pods(), nodes=nodes("node-s", "spare-0", "spare-1"), progress=stalled
    )
    assert (blind.delete, blind.status.attempt) == ((), 1)
    assert condition(blind.status, "Healthy") == ("False", "NodesUnknown")
    assert blind.requeue_after == 20
    seeing = plan_with(job, *make_pods(), nodes=nodes(), progress=stalled)
    assert seeing.status.attempt == 2
    assert {delete.reason for delete in seeing.delete} == {Reason.NO_PROGRESS}


def test_what_the_user_asks_for_happens_even_if_no_node_is_ready() -> None:
    job, state = running(), nodes(*NAMES)
    suspended = make_job(job.status, lifecycle={"suspend": True})
    result = plan_with(suspended, *make_pods(), nodes=state)
    assert {(d.name, d.reason) for d in result.delete if d.kind == "Pod"} == {
        ("job-0", Reason.SUSPENDED),
        ("job-1", Reason.SUSPENDED),
    }
    changed = make_job(job.status, image="other:1")
    result = plan_with(changed, *make_pods(2, job), nodes=state)
    assert {d.reason for d in result.delete if d.kind == "Pod"} == {Reason.SPEC_CHANGED}
    smaller = make_job(job.status, nodes={"min": 1, "max": 1})
    (deletion, *_) = plan_with(smaller, *make_pods(), nodes=state).delete
    assert (deletion.name, deletion.reason) == ("job-1", Reason.SCALED_DOWN)


@pytest.mark.parametrize(
    ("first", "excess"),
    [
        ({}, "job-2"),
        ({**PENDING, "node": ""}, "job-0"),
        (PENDING, "job-0"),
    ],
    ids=["all run", "the first has no node", "the first starts"],
)
def test_a_smaller_job_keeps_the_pods_that_train(first: dict[str, Any], excess: str) -> None:
    job = running(3, nodes={"min": 1, "max": 3})
    smaller = make_job(job.status, nodes={"min": 1, "max": 2})
    pods = make_pod(0, job, **first), make_pod(1, job), make_pod(2, job)
    (deletion, *_) = plan_with(smaller, *pods, progress=progress()).delete
    assert (deletion.name, deletion.reason) == (excess, Reason.SCALED_DOWN)


@pytest.mark.parametrize(
    ("num_train", "expected"),
    [(3, []), (2, ["job-1"]), (1, ["job-0", "job-1"]), (0, ["job-0", "job-1"])],
)
def test_no_more_pods_count_as_lost_than_are_missing_in_the_training(
    num_train: int, expected: list[str]
) -> None:
    """Which of them trains is unknown: that of the node that has not been ready for longer is replaced."""
    job, state = running(nodes={"min": 1, "max": 3}), nodes("node-0")
    state["node-1"] = NodeView("node-1", ready=False, since=NOW - 90)
    pods = [*make_pods(2, job), make_pod(2, job, node="spare-0")]
    answer = progress(5, num_nodes=num_train)
    result = plan_with(job, *pods, nodes=state, progress=answer)
    assert sorted(deleted(result)) == expected
    silent = plan_with(job, *pods, nodes=state, progress=progress(61, num_nodes=num_train))
    assert sorted(deleted(silent)) == ["job-0", "job-1"]


def test_a_cluster_without_known_nodes_is_no_outage() -> None:
    assert control_plane_outage([], NOW) == ""


@pytest.mark.parametrize(
    ("nodes_of_pods", "alive", "silent", "replaced"),
    [
        ("aab", (2,), (0, 1), True),  # two of three agents, but one of two nodes
        ("abc", (2,), (0, 1), False),
        ("abc", (1, 2), (0,), True),
        ("abc", (), (0, 1, 2), False),
        ("aab", (1, 2), (0,), True),  # only the agent is frozen
        ("aaa", (2,), (0, 1), True),
    ],
)
def test_silent_pods_are_replaced_unless_more_nodes_are_silent_than_heard(
    nodes_of_pods: str, alive: tuple[int, ...], silent: tuple[int, ...], replaced: bool
) -> None:
    job = running(3, nodes={"min": 1, "max": 3})
    pods = [make_pod(index, job, node=name) for index, name in enumerate(nodes_of_pods)]
    heard = MembersReport(
        *(frozenset(f"pod-{index}" for index in some) for some in (alive, silent))
    )
    state = {name: NodeView(name) for name in "abcde"}
    result = plan_with(job, *pods, nodes=state, heard=heard)
    assert deleted(result) == ([f"job-{index}" for index in silent] if replaced else [])


SEVEN = ("node-0", "node-1", "node-s", *(f"spare-{n}" for n in range(4)))


def nodes_with(**changes: Any) -> dict[str, NodeView]:
    """Return healthy nodes; node-1 with ``changes``."""
    state = {name: NodeView(name) for name in SEVEN}
    return state | {"node-1": replace(state["node-1"], **changes)}


def faults(status: Status) -> list[tuple[str, str]]:
    return [(fault.node, fault.reason) for fault in status.node_faults]


NOT_READY = {"ready": False, "since": NOW - 60}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        (NOT_READY, [("node-1", "NodeLost")]),
        ({**NOT_READY, "cordoned": True}, []),
        ({"ready": False, "gone": True}, []),
        ({"problem": "condition KernelDeadlock=True"}, [("node-1", "UnhealthyNode")]),
        ({"unhealthy": "GPU", "has_gpus": True}, []),  # the job has no GPUs
    ],
)
def test_faults_of_nodes_whose_pods_are_replaced(
    changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    job = running()
    status = plan_with(
        job, *make_pods(), nodes=nodes_with(**changes), progress=progress(num_nodes=1)
    ).status
    assert faults(status) == expected
    again = plan_with(
        with_status(job, status), *make_pods(), nodes=nodes_with(**changes), now=NOW + 9
    )
    assert faults(again.status) == expected, "a pod counts once, even if its deletion is repeated"


def test_the_loss_of_an_agent_on_a_ready_node_is_a_fault_of_the_node() -> None:
    heard = MembersReport(frozenset({"pod-0"}), frozenset({"pod-1"}))
    result = plan_with(
        running(), *make_pods(), nodes=nodes_with(), heard=heard, progress=progress(num_nodes=1)
    )
    assert faults(result.status) == [("node-1", "AgentLost")]


SEGFAULT = "trainer process 7 (local rank 0) was ended by SIGSEGV; the same command resumes"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"code": 1, "message": SEGFAULT}, "HardwareError"),
        ({"code": 1, "message": SEGFAULT.replace("SEGV", "BUS")}, "HardwareError"),
        ({"code": 1, "message": "HIP error: uncorrectable ECC error encountered"}, "HardwareError"),
        ({"code": 135}, "HardwareError"),
        ({"code": 139}, "HardwareError"),
        ({"code": 137}, "Killed"),
        ({"code": None, "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError"),
        ({"code": 69, "message": "fluxtrain: rank 0 on job-0 is unfit"}, "UnfitNode"),
        ({"code": None}, "PodLost"),
        ({"code": 1}, ""),
        ({"code": 1, "message": SEGFAULT.replace("SEGV", "KILL")}, ""),
        ({"code": 3}, ""),
        ({"code": 75}, ""),
        ({"code": 143}, ""),
        ({"code": 137, "reason": "OOMKilled"}, ""),
        ({"code": 137, "disruption": "EvictionByEvictionAPI"}, ""),
        ({"code": 139, "disruption": "EvictionByEvictionAPI"}, ""),
        ({"code": None, "reason": "Evicted"}, ""),
        ({"code": None, "reason": "NodeShutdown"}, ""),
        ({"code": None, "reason": "Preempting"}, ""),
        ({"code": 137, "deleting": True}, ""),
        ({"code": 137, "node": ""}, ""),
    ],
)
def test_ends_of_pods_that_point_at_their_node(end: dict[str, Any], reason: str) -> None:
    end = {"job": None, **end}
    job = running()
    first = plan_with(job, failed(1, **end), make_pod(0), nodes=nodes_with(), progress=progress())
    assert faults(first.status) == ([("node-1", reason)] if reason else [])
    for later in (NOW, NOW + 5, NOW + 700):
        again = plan_with(with_status(job, first.status), failed(1, **end), make_pod(0), now=later)
        assert again.status.node_faults == first.status.node_faults
    cordoned = plan_with(job, failed(1, **end), make_pod(0), nodes=nodes_with(cordoned=True))
    assert faults(cordoned.status) == []


def test_what_happens_on_several_nodes_at_a_time_is_no_fault_of_one() -> None:
    both = failed(0, 139), failed(1, 139)
    assert faults(plan_with(running(), *both).status) == []
    same_node = failed(0, 139), failed(1, 139, node="node-0")
    assert {node for node, _ in faults(plan_with(running(), *same_node).status)} == {"node-0"}
    others = failed(0, 139), failed(1, 137)
    assert len(faults(plan_with(running(), *others).status)) == 2
    unfit = failed(0, 69), failed(1, 69)  # compared with the median of all ranks
    expected = [("node-0", "UnfitNode"), ("node-1", "UnfitNode")]
    assert faults(plan_with(running(), *unfit).status) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"deletion_deadline": NOW - 31}, [("node-1", "KubeletUnresponsive")]),
        ({"deletion_deadline": NOW - 29}, []),
        ({"deletion_deadline": NOW - 31, "exit_code": 0}, []),  # a finalizer keeps it
        ({"deletion_deadline": NOW - 31, "forced": True}, []),
    ],
)
def test_a_kubelet_that_does_not_end_a_pod(
    changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    job, pod = running(), make_pod(1, deleting=True, **changes)
    status = plan_with(job, make_pod(0), pod, nodes=nodes_with(), progress=progress()).status
    assert faults(status) == expected
    late = plan_with(with_status(job, status), make_pod(0), pod, nodes=nodes_with(), now=NOW + 1000)
    assert len(faults(late.status)) == 1 if not changes.keys() - {"deletion_deadline"} else True
    lost = plan_with(job, make_pod(0), pod, nodes=nodes_with(**NOT_READY), progress=progress())
    assert "KubeletUnresponsive" not in dict(faults(lost.status)).values()


@pytest.mark.parametrize(
    ("silent", "expected"), [((500.0, 900.0), [("node-1", "NoProgress")]), ((500.0, 500.5), [])]
)
def test_a_stall_is_attributed_to_the_node_whose_rank_stopped_first(
    silent: tuple[float, float], expected: list[tuple[str, str]]
) -> None:
    ranks = tuple(
        RankProgress(n, "step", 7, seconds, step_seconds=1.0, pod=f"pod-{n}")
        for n, seconds in enumerate(silent)
    )
    answer = progress(600, ranks=ranks, phase="step")
    result = plan_with(running(), *make_pods(), nodes=nodes_with(), progress=answer)
    assert result.decision is not None
    assert result.decision.reason == "NoProgress"
    assert faults(result.status) == expected


def known(count: int, seconds_ago: float) -> list[NodeFault]:
    time = stamp(NOW - seconds_ago)
    return [NodeFault(node="x", reason="Killed", time=time, pod=f"u{n}") for n in range(count)]


@pytest.mark.parametrize("num_known", [0, 1, 15, 16])
def test_the_newest_sixteen_are_kept(num_known: int) -> None:
    before = known(num_known, 9999)
    job = running()
    job = with_status(job, job.status.model_copy(update={"node_faults": before}))
    status = plan_with(job, failed(1, 137), make_pod(0), nodes=nodes_with()).status
    assert len(status.node_faults) == min(16, num_known + 1)
    assert status.node_faults[-1].node == "node-1"


def test_a_fault_that_is_older_than_all_of_a_full_list_is_not_added_again_and_again() -> None:
    job = running()
    job = with_status(job, job.status.model_copy(update={"node_faults": known(16, 0)}))
    pod = failed(1, 137, finished=NOW - 500)
    assert plan_with(job, pod, make_pod(0), nodes=nodes_with()).status.node_faults == known(16, 0)


@pytest.mark.parametrize(
    ("num_before", "events"), [(0, []), (1, []), (2, ["NodeExcluded"]), (3, [])]
)
def test_an_event_tells_that_a_node_is_excluded(num_before: int, events: list[str]) -> None:
    times = [NOW - 300 * (n + 1) for n in range(num_before)]
    before = score([Fault("node-1", "NodeLost", time) for time in times], NOW)
    result = plan_with(
        running(),
        *make_pods(),
        nodes=nodes_with(**NOT_READY),
        progress=progress(num_nodes=1),
        distrust=ordered({"node-1": before}, NOW),
    )
    assert [e.reason for e in result.events if e.reason == "NodeExcluded"] == events


NOTE = "fluxtrain.dev/distrusted-nodes"
TEN = tuple(f"n{number}" for number in range(10))


def views(*names: str, **changes: Any) -> dict[str, NodeView]:
    return {name: NodeView(name, **changes) for name in names or TEN}


def distrust(**values: float) -> Distrust:
    return ordered({name: Score(value, NOW, NOW) for name, value in values.items()}, NOW)


def replacement(result: Plan) -> Manifest:
    (pod,) = created_pods(result)
    return pod


def excluded(pod: Manifest) -> list[str]:
    affinity = pod["spec"]["affinity"].get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", [{"matchExpressions": [{"values": []}]}])
    return list(terms[0]["matchExpressions"][-1]["values"])


def avoided(pod: Manifest) -> list[str]:
    affinity = pod["spec"]["affinity"].get("nodeAffinity", {})
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    return list(preferred[-1]["preference"]["matchExpressions"][0]["values"]) if preferred else []


@pytest.mark.parametrize(
    ("values", "hard", "soft"),
    [
        ({}, [], []),
        ({"n1": 0.05}, [], []),
        ({"n1": 1.0}, [], ["n1"]),
        ({"n1": 2.49}, [], ["n1"]),
        ({"n1": 2.5}, ["n1"], []),
        ({"n1": 3.0, "n2": 4.0, "n3": 5.0}, ["n2", "n3"], ["n1"]),  # a fifth of ten
        (dict.fromkeys(TEN, 3.0), ["n0", "n1"], [*TEN[2:]]),
        ({"gone": 9.0}, [], ["gone"]),
    ],
)
def test_new_pods_avoid_nodes_with_faults_and_exclude_the_worst(
    values: dict[str, float], hard: list[str], soft: list[str]
) -> None:
    state = plan_with(
        running(), make_pod(0), nodes=views(), distrust=distrust(**values), progress=progress()
    )
    pod = replacement(state)
    assert (excluded(pod), avoided(pod)) == (hard, soft)
    assert pod["metadata"]["annotations"].get(NOTE, "") == ",".join(hard)


@pytest.mark.parametrize(
    ("usable", "hard"),
    [
        (views(), ["n0"]),
        (views(*TEN[:4]), []),  # none of fewer than five
        (views(*TEN[:5]), ["n0"]),
        (views(*TEN[:4]) | views(*TEN[4:], ready=False), []),
        (views(*TEN[:4]) | views(*TEN[4:], cordoned=True), []),
        (views(*TEN[:4]) | views(*TEN[4:], gone=True, ready=False), []),
        (views(hostname="") | {"n0": NodeView("n0", hostname="host-0")}, ["host-0"]),
        ({}, []),
    ],
)
def test_the_part_is_one_of_the_nodes_that_the_job_could_run_on(
    usable: dict[str, NodeView], hard: list[str]
) -> None:
    result = plan_with(running(), make_pod(0), nodes=usable, distrust=distrust(n0=3.0))
    assert excluded(replacement(result)) == hard


def test_a_job_with_gpus_counts_nodes_with_gpus() -> None:
    job = running(gpusPerNode=8)
    few = views() | views("n0", "n1", "n2", has_gpus=True)
    for state, hard in ((few, []), (views(has_gpus=True), ["n0"])):
        result = plan_with(job, make_pod(0, job), nodes=state, distrust=distrust(n0=3.0))
        assert excluded(replacement(result)) == hard


def test_the_affinity_of_the_user_is_kept() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchFields": []}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    job = running(podTemplate={"spec": {"affinity": affinity}})
    result = plan_with(job, make_pod(0, job), nodes=views(), distrust=distrust(n0=3.0))
    required = replacement(result)["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    added = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n0"]}
    assert [term["matchExpressions"] for term in required] == [[zone, added], [added]]


def test_jobs_in_queues_only_avoid_nodes() -> None:
    job = running(scheduling={"queueName": "team"})
    group = {"finalizers": ("kueue.x-k8s.io/managed",)}
    result = plan_with(job, make_pod(0, job, **group), nodes=views(), distrust=distrust(n0=3.0))
    pod = replacement(result)
    assert (excluded(pod), avoided(pod)) == ([], ["n0"])


def stuck(seconds: float = 120.0, **changes: Any) -> Pod:
    pod = make_pod(1, **PENDING, node="", excludes_nodes=True, created=NOW - seconds)
    return replace(pod, **{"waiting": "Unschedulable: 0/5 nodes are available", **changes})


@pytest.mark.parametrize(
    ("pod", "is_lifted"),
    [
        (stuck(), True),
        (stuck(119), False),
        (stuck(excludes_nodes=False), False),
        (stuck(waiting="SchedulingGated"), False),
        (stuck(waiting=""), False),
        (stuck(node="n1"), False),
        (stuck(deleting=True), False),
    ],
)
def test_a_pod_that_cannot_be_scheduled_elsewhere_is_replaced_by_one_that_only_avoids_nodes(
    pod: Pod, is_lifted: bool
) -> None:
    job = started()
    first = plan_with(job, make_pod(0), pod, nodes=views(), distrust=distrust(n0=3.0))
    assert [d.name for d in first.delete if d.reason is Reason.UNSCHEDULABLE] == [
        "job-1"
    ] * is_lifted
    assert first.status.exclusion_lifted == (stamp(NOW) if is_lifted else None)
    if not is_lifted:
        return
    job = with_status(job, first.status)
    second = replacement(plan_with(job, make_pod(0), nodes=views(), distrust=distrust(n0=3.0)))
    assert (excluded(second), avoided(second)) == ([], ["n0"])
    assert second["metadata"]["annotations"]["fluxtrain.dev/replacement"] == "0"
    unscheduled = stuck(5000, excludes_nodes=False)
    third = plan_with(job, make_pod(0), unscheduled, nodes=views(), distrust=distrust(n0=3.0))
    assert deleted(third) == [], "it waits like any other"


def test_the_job_is_planned_again_when_the_time_is_up() -> None:
    result = plan_with(started(), make_pod(0), stuck(50), nodes=views(), distrust=distrust(n0=3.0))
    assert result.requeue_after == pytest.approx(70.0)


@pytest.mark.parametrize(
    ("seconds_ago", "is_lifted"),
    [(0, True), (3599, True), (3600, False), (-10, True), (-3600, False)],
)
def test_an_exclusion_is_lifted_for_an_hour(seconds_ago: float, is_lifted: bool) -> None:
    job = running()
    lifted = {"exclusion_lifted": stamp(NOW - seconds_ago)}
    job = with_status(job, job.status.model_copy(update=lifted))
    result = plan_with(job, make_pod(0), nodes=views(), distrust=distrust(n0=3.0))
    assert excluded(replacement(result)) == ([] if is_lifted else ["n0"])
    assert (result.status.exclusion_lifted is not None) == is_lifted


BUDGET = (DISRUPTION_BUDGET, "job-nodes")
GATED: dict[str, Any] = {**PENDING, "node": "", "gated": True, "gates": (names.KUEUE_GATE,)}
UNSCHEDULABLE: dict[str, Any] = {**PENDING, "node": "", "waiting": "Unschedulable: 0/9 nodes"}
QUEUED: dict[str, Any] = {"scheduling": {"queueName": "research"}}
SUSPEND: dict[str, Any] = {"lifecycle": {"suspend": True}}


def has_deleted(result: Plan) -> bool:
    return BUDGET in [(delete.kind, delete.name) for delete in result.delete]


def has_created(result: Plan) -> bool:
    return BUDGET in [(m["kind"], m["metadata"]["name"]) for m in result.create]


ROWS: list[tuple[str, dict[str, Any], list[Pod], bool]] = [
    ("no pod yet", {}, [], True),
    ("no pod yet, in a queue", QUEUED, [], False),
    ("all wait at a gate", {}, make_pods(**GATED), False),
    ("one has passed its gate", {}, [make_pod(0), make_pod(1, **GATED)], True),
    ("all are unschedulable", {}, make_pods(**UNSCHEDULABLE), False),
    ("one is scheduled", {}, [make_pod(0, **PENDING), make_pod(1, **UNSCHEDULABLE)], True),
    ("all are pending", {}, make_pods(**PENDING), True),
    ("all run", {}, make_pods(), True),
    ("all are being deleted", {}, make_pods(deleting=True), True),
    ("one was lost by its node", {}, [make_pod(0), failed(1, code=137)], True),
    ("suspended, and pods run", SUSPEND, make_pods(), False),
    ("suspended, without pods", SUSPEND, [], False),
    ("all have succeeded", {}, make_pods(**SUCCEEDED), False),
    ("the program cannot go on", {}, [failed(0, code=2), make_pod(1)], False),
    ("of fixed size", {"nodes": {"min": 2, "max": 2}}, make_pods(), False),
]


@pytest.mark.parametrize(
    ("spec", "pods", "needed"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_a_budget_is_created_or_deleted(
    spec: dict[str, Any], pods: list[Pod], needed: bool
) -> None:
    job = make_job(started().status, **spec)
    applied = {**observe(job).applied, BUDGET: budget_hash()}
    with_budget = plan_with(job, *pods, progress=progress(), applied=applied)
    assert (has_created(with_budget), has_deleted(with_budget)) == (False, not needed)
    del applied[BUDGET]
    without = plan_with(job, *pods, progress=progress(), applied=applied)
    assert (has_created(without), has_deleted(without)) == (needed, False)


def budget_hash() -> str:
    """Return the hash of the budget of an elastic job of one or two nodes."""
    return observe(make_job()).applied[BUDGET]


def test_a_finished_or_suspended_job_loses_its_budget() -> None:
    finished = running()
    finished = with_status(finished, plan_with(finished, failed(0, code=2)).status)
    suspended = make_job(running().status, **SUSPEND)
    suspended = with_status(suspended, plan_with(suspended, rendezvous=None).status)
    assert (finished.status.phase, suspended.status.phase) == ("Failed", "Suspended")
    for job in (finished, suspended):
        result = plan_with(job, rendezvous=None)
        assert [(delete.kind, delete.name) for delete in result.delete] == [BUDGET]
        later = plan(job, Observed(), NOW)
        assert (later.delete, later.create) == ((), ())


def test_a_resumed_job_has_its_budget_again() -> None:
    suspended = make_job(running().status, **SUSPEND)
    suspended = with_status(suspended, plan_with(suspended, rendezvous=None).status)
    resumed = make_job(suspended.status)
    assert has_created(plan(resumed, Observed(), NOW))


def node_with(name: str, capacity: dict[str, str], **labels: str) -> NodeView:
    metadata = {"name": name, "labels": {f"amd.com/gpu.{k}": v for k, v in labels.items()}}
    return NodeView.from_object({"metadata": metadata, "status": {"capacity": capacity}})


PLUGIN = node_with("plugin", {"cpu": "64", "hugepages-2Mi": "1", "amd.com/gpu": "8"}, family="AI")
BROKEN = node_with("broken", {"amd.com/gpu": "0"}, family="AI")
OTHER_NAME = node_with("other-name", {"example.org/gpu": "8"})
CLAIMS = node_with("claims", {"cpu": "64"}, family="AI")
HEAD = node_with("head", {"cpu": "8"})


@pytest.mark.parametrize(
    ("spec", "nodes", "expected"),
    [
        ({}, [PLUGIN, HEAD], "plugin head"),
        ({"gpusPerNode": 8}, [PLUGIN, BROKEN, OTHER_NAME, CLAIMS, HEAD], "plugin"),
        (
            {"gpusPerNode": 8, "gpuResource": "example.org/gpu"},
            [PLUGIN, OTHER_NAME, HEAD],
            "other-name",
        ),
        ({"gpusPerNode": 8, "gpuClaimTemplate": "eight"}, [BROKEN, CLAIMS, HEAD], "claims"),
        ({"gpusPerNode": 8}, [CLAIMS, HEAD], "claims"),  # a class has the name amd.com/gpu
        ({"gpusPerNode": 8}, [HEAD], "head"),
        ({"gpusPerNode": 8}, [], ""),
    ],
)
def test_a_job_runs_on_nodes_with_its_gpus(
    spec: Manifest, nodes: list[NodeView], expected: str
) -> None:
    found = nodes_for(nodes, make_job(**spec).spec)
    assert " ".join(node.name for node in found) == expected
