"""Which faults are attributed to nodes, and that each counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    NOW,
    failed,
    make_pod,
    make_pods,
    plan_with,
    progress,
    running,
    with_status,
)

from fluxtrain.contract.resource.status import NodeFault, Status
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.node_health import Fault, ordered, score
from fluxtrain_operator.base.reports import Heard, RankProgress
from fluxtrain_operator.planner.observed import NodeView

NAMES = ("node-0", "node-1", "node-s", *(f"spare-{n}" for n in range(4)))


def nodes(**changes: Any) -> dict[str, NodeView]:
    """Return healthy nodes; node-1 with ``changes``."""
    state = {name: NodeView(name) for name in NAMES}
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
        job, *make_pods(), nodes=nodes(**changes), progress=progress(num_nodes=1)
    ).status
    assert faults(status) == expected
    again = plan_with(with_status(job, status), *make_pods(), nodes=nodes(**changes), now=NOW + 9)
    assert faults(again.status) == expected, "a pod counts once, even if its deletion is repeated"


def test_the_loss_of_an_agent_on_a_ready_node_is_a_fault_of_the_node() -> None:
    heard = Heard(frozenset({"pod-0"}), frozenset({"pod-1"}))
    result = plan_with(
        running(), *make_pods(), nodes=nodes(), heard=heard, progress=progress(num_nodes=1)
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
        ({"code": 137, "disrupted": True}, ""),
        ({"code": 139, "disrupted": True}, ""),
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
    first = plan_with(job, failed(1, **end), make_pod(0), nodes=nodes(), progress=progress())
    assert faults(first.status) == ([("node-1", reason)] if reason else [])
    for later in (NOW, NOW + 5, NOW + 700):
        again = plan_with(with_status(job, first.status), failed(1, **end), make_pod(0), now=later)
        assert again.status.node_faults == first.status.node_faults
    cordoned = plan_with(job, failed(1, **end), make_pod(0), nodes=nodes(cordoned=True))
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
    status = plan_with(job, make_pod(0), pod, nodes=nodes(), progress=progress()).status
    assert faults(status) == expected
    late = plan_with(with_status(job, status), make_pod(0), pod, nodes=nodes(), now=NOW + 1000)
    assert len(faults(late.status)) == 1 if not changes.keys() - {"deletion_deadline"} else True
    lost = plan_with(job, make_pod(0), pod, nodes=nodes(**NOT_READY), progress=progress())
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
    result = plan_with(running(), *make_pods(), nodes=nodes(), progress=answer)
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
    status = plan_with(job, failed(1, 137), make_pod(0), nodes=nodes()).status
    assert len(status.node_faults) == min(16, num_known + 1)
    assert status.node_faults[-1].node == "node-1"


def test_a_fault_that_is_older_than_all_of_a_full_list_is_not_added_again_and_again() -> None:
    job = running()
    job = with_status(job, job.status.model_copy(update={"node_faults": known(16, 0)}))
    pod = failed(1, 137, finished=NOW - 500)
    assert plan_with(job, pod, make_pod(0), nodes=nodes()).status.node_faults == known(16, 0)


@pytest.mark.parametrize(
    ("num_before", "events"), [(0, []), (1, []), (2, ["NodeExcluded"]), (3, [])]
)
def test_an_event_tells_that_a_node_is_excluded(num_before: int, events: list[str]) -> None:
    times = [NOW - 300 * (n + 1) for n in range(num_before)]
    before = score([Fault("node-1", "NodeLost", time) for time in times], NOW)
    result = plan_with(
        running(),
        *make_pods(),
        nodes=nodes(**NOT_READY),
        progress=progress(num_nodes=1),
        distrust=ordered({"node-1": before}, NOW),
    )
    assert [e.reason for e in result.events if e.reason == "NodeExcluded"] == events
