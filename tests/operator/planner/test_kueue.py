"""Groups of pods: Kueue's, the places of their nodes, and pods that finalizers of others keep.

When a pod is replaced in its group, and when all are queued as another group. The rendezvous pod gets the
places of nodes, and is replaced for them only before a job starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.planner.pods import (
    LONG_AGO,
    NOW,
    OPEN,
    PENDING,
    SUCCEEDED,
    causes,
    charged_and_free,
    condition,
    created,
    created_pods,
    deleted,
    failed,
    lost,
    make_job,
    make_pod,
    make_pods,
    message,
    num_gang_restarts,
    plan_with,
    progress,
    rendezvous,
    running,
    started,
    with_status,
)

from fluxtrain.contract.process import place_of, read_places, write_places
from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Job
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import MembersReport, Progress, RankProgress
from fluxtrain_operator.planner.observed import NodeView, Observed, Pod
from fluxtrain_operator.planner.plan import Plan
from fluxtrain_operator.resources.pods import Slot, training_pod

QUEUE = {"scheduling": {"queueName": "team"}}
MANAGED: dict[str, Any] = {"finalizers": (names.KUEUE_FINALIZER,)}
EVICTED: dict[str, Any] = {"deleting": True, "deletion_deadline": NOW + 170, **MANAGED}
GATED: dict[str, Any] = {**PENDING, "node": "", "gated": True, "gates": (names.KUEUE_GATE,)}


def groups(result: Plan) -> set[str]:
    """Return the Kueue groups of the created training pods."""
    labels = (pod["metadata"]["labels"] for pod in created_pods(result))
    return {pod[names.KUEUE_GROUP] for pod in labels if names.KUEUE_GROUP in pod}


def test_evicted_pods_are_queued_again_as_another_group() -> None:
    job = running(**QUEUE)
    result = plan_with(job, *make_pods(2, job, **EVICTED))
    assert (result.status.phase, result.status.attempt) == ("Restarting", 2)
    assert (deleted(result), created(result)) == ([], []), "they write a checkpoint first"
    assert [(e.type, e.reason) for e in result.events] == [("Normal", "GroupEnded")]
    again = plan_with(with_status(job, result.status), now=NOW + 20)
    assert (created(again), groups(again)) == (["job-0", "job-1"], {"job-2"})
    assert charged_and_free(again.status) == (0, 1), "an eviction uses no restart"
    assert causes(again.status) == {"GroupEnded": 1}


def test_a_pod_whose_object_kueue_keeps_is_replaced_under_another_name() -> None:
    job = running(**QUEUE)
    active = make_pod(0, job, **MANAGED)
    result = plan_with(job, active, failed(1, 75, job, **EVICTED))
    assert (created(result), groups(result)) == (["job-2"], {"job-1"})
    assert result.status.attempt == 1
    never_scheduled = make_pod(1, job, **{**GATED, **EVICTED})
    assert created(plan_with(job, active, never_scheduled)) == ["job-2"]


def test_the_pod_of_a_lost_node_stays_a_member_of_its_group() -> None:
    job = running(**QUEUE)
    pods = make_pods(2, job, **MANAGED)
    result = plan_with(job, *pods, nodes=lost("node-1"), progress=progress())
    assert created(result) == [], "Kueue would delete it as an excess pod"
    drained = make_pod(1, job, **EVICTED, **SUCCEEDED)
    result = plan_with(job, pods[0], drained, progress=progress())
    assert created(result) == [], "for Kueue it has succeeded"
    assert groups(plan_with(job, *pods, nodes=lost("node-0", "node-1"))) == {"job-2"}


def test_a_job_of_fixed_size_that_loses_a_node_keeps_its_group_until_the_place_is_free() -> None:
    job = running(nodes={"min": 2, "max": 2}, **QUEUE)
    pods, nodes = make_pods(2, job, **MANAGED), lost("node-1")
    result = plan_with(job, *pods, nodes=nodes, progress=progress())
    assert (deleted(result), created(result), result.status.attempt) == (["job-1"], [], 1)
    assert condition(result.status, "Training") == ("False", "GroupWaits")
    stuck = replace(pods[1], deleting=True, deletion_deadline=NOW + 180)
    waiting = plan_with(with_status(job, result.status), pods[0], stuck, nodes=nodes)
    assert (deleted(waiting), created(waiting), waiting.status.attempt) == ([], [], 1)
    assert "until 2027-01-15T08:08:00Z for the places of job-1" in message(
        waiting.status, "Training"
    )
    ended = failed(1, None, job, **EVICTED)  # the node is removed, and its pod with it
    freed = plan_with(with_status(job, waiting.status), pods[0], ended, now=NOW + 200)
    assert (created(freed), groups(freed), freed.status.attempt) == (["job-2"], {"job-1"}, 1)


def test_a_job_of_fixed_size_whose_lost_node_stays_away_is_queued_as_another_group() -> None:
    job = running(nodes={"min": 2, "max": 2}, **QUEUE)
    nodes = lost("node-1")
    stuck = make_pod(1, job, deleting=True, deletion_deadline=NOW - 300, **MANAGED)
    pods = [make_pod(0, job, **MANAGED), stuck]
    result = plan_with(job, *pods, nodes=nodes, progress=progress())
    assert (deleted(result), groups(result)) == (["job-0"], {"job-2"})
    assert (created(result), charged_and_free(result.status)) == (["job-2"], (0, 1))
    ended = failed(0, 75, job, **EVICTED)
    new = make_pod(2, job, attempt=2, **GATED, **MANAGED)
    again = plan_with(with_status(job, result.status), ended, stuck, new, nodes=nodes)
    assert created(again) == ["job-3"], "Kueue keeps job-0 as long as job-1 is a member"


def test_a_pod_that_was_created_after_its_group_ended_is_queued_again() -> None:
    job = running(**QUEUE)
    late = make_pod(2, job, **GATED)
    result = plan_with(job, late)
    assert deleted(result) == ["job-2"]
    assert (created(result), groups(result)) == (["job-0", "job-1"], {"job-2"})
    assert plan_with(job, replace(late, **MANAGED)).status.attempt == 1


def test_a_short_lived_last_pod_of_a_group_delays_the_next_group() -> None:
    job = running(1, nodes={"min": 1, "max": 1}, **QUEUE)
    pod = failed(0, 137, job, started=NOW - 3)
    result = plan_with(job, pod)
    assert (deleted(result), created(result), result.status.attempt) == ([], [], 1)
    assert result.requeue_after == pytest.approx(9.0)
    later = plan_with(job, pod, now=NOW + 10)
    assert (later.status.attempt, charged_and_free(later.status)) == (2, (0, 1))
    assert deleted(later) == ["job-0"]


STALLED = Progress(
    progress(3600).status,
    phase="step",
    ranks=(RankProgress(0, "step", 7, 3600.0, 1.0),),  # without a generation
)


def restart_all(job: Job, num_pods: int, **changes: Any) -> Plan:
    """Return the plan of a job in a group that has stalled."""
    pods = make_pods(num_pods, job, **MANAGED)
    return plan_with(job, *pods, progress=STALLED, any_progress=STALLED, **changes)


def test_a_restart_of_all_pods_keeps_the_group_one_pod_at_a_time() -> None:
    job = running(3, nodes={"min": 3, "max": 3}, **QUEUE)
    result = restart_all(job, 3)
    assert (result.status.attempt, result.status.group_attempt) == (2, 1)
    assert (deleted(result), created(result)) == (["job-1", "job-2"], []), "one pod is kept"
    job = with_status(job, result.status)
    kept, leaving = make_pod(0, job, **MANAGED), make_pod(2, job, **EVICTED)
    ended = failed(1, 143, job, **EVICTED)
    first = plan_with(job, kept, ended, leaving)
    assert (deleted(first), created(first), groups(first)) == ([], ["job-3"], {"job-1"})
    job = with_status(job, first.status)
    new = make_pod(3, job, attempt=2, **GATED, **MANAGED)
    second = plan_with(job, kept, leaving, new)
    (last,) = second.delete
    assert (last.name, last.reason, last.grace_seconds) == ("job-0", "PreviousAttempt", 30)
    assert created(second) == [], "for Kueue two pods of the earlier attempt run"
    job = with_status(job, second.status)
    ended = [failed(index, 143, job, **EVICTED) for index in (0, 2)]
    third = plan_with(job, *ended, new)
    assert (created(third), groups(third)) == (["job-1", "job-4"], {"job-1"})
    assert (third.status.attempt, third.status.group_attempt) == (2, 1)
    assert num_gang_restarts(third.status) == 1


def test_a_failure_of_the_program_in_many_pods_keeps_the_group() -> None:
    job = running(4, nodes={"min": 1, "max": 4}, **QUEUE)
    bad = [failed(index, 1, job, **MANAGED) for index in (0, 1)]
    good = [make_pod(index, job, **MANAGED) for index in (2, 3)]
    result = plan_with(job, *bad, *good, progress=progress())
    assert (result.status.attempt, result.status.group_attempt) == (2, 1)
    assert (deleted(result), created(result)) == (["job-0", "job-1", "job-3"], [])
    bad = [replace(pod, **EVICTED) for pod in bad]
    again = plan_with(with_status(job, result.status), *bad, good[0], replace(good[1], **EVICTED))
    assert (created(again), groups(again)) == (["job-4", "job-5"], {"job-1"})


@pytest.mark.parametrize("nodes", [{"min": 1, "max": 1}, {"min": 1, "max": 2}])
def test_a_group_without_a_place_for_a_second_pod_is_given_up(nodes: dict[str, int]) -> None:
    """A job of one node; or of two, one of which is lost."""
    job = running(nodes["max"], nodes=nodes, **QUEUE)
    lost_nodes = lost("node-1") if nodes["max"] > 1 else {}
    pods = make_pods(nodes["max"], job, **MANAGED)
    failure = failed(0, 3, job, **MANAGED)
    assert plan_with(job, failure, *pods[1:]).status.phase == "Failed"
    stuck = [replace(pod, deleting=True, deletion_deadline=NOW - 700) for pod in pods[1:]]
    result = plan_with(
        job, pods[0], *stuck, progress=STALLED, any_progress=STALLED, nodes=lost_nodes
    )
    assert (result.status.attempt, result.status.group_attempt) == (2, None)
    assert deleted(result)[0] == "job-0"


@pytest.mark.parametrize("change", [{"nodes": {"min": 1, "max": 3}}, {"image": "trainer:2"}])
def test_pods_of_another_size_or_spec_never_join_the_kept_group(change: dict[str, Any]) -> None:
    job = running(2, nodes={"min": 1, "max": 2}, **QUEUE)
    result = restart_all(job, 2)
    assert (result.status.group_attempt, created(result)) == (1, [])
    changed = with_status(make_job(**{"nodes": {"min": 1, "max": 2}, **QUEUE, **change}), None)
    again = plan_with(with_status(changed, result.status), *make_pods(2, job, **MANAGED))
    assert (again.status.attempt, again.status.group_attempt) == (3, None)
    assert groups(again) <= {"job-3"}


def test_a_new_pod_that_fails_while_earlier_ones_leave_does_not_end_the_group() -> None:
    job = running(3, nodes={"min": 3, "max": 3}, **QUEUE)
    job = with_status(job, restart_all(job, 3).status)
    leaving = [make_pod(index, job, **EVICTED) for index in (0, 2)]
    rejected = failed(3, None, job, attempt=2, reason="PodLost", **MANAGED)
    result = plan_with(job, *leaving, rejected, now=NOW + 60)
    assert (result.status.attempt, result.status.group_attempt) == (2, 1)
    assert deleted(result) == ["job-3"]
    again = plan_with(with_status(job, result.status), replace(rejected, **EVICTED))
    assert (again.status.attempt, groups(again)) == (3, {"job-3"}), "Kueue has ended it"


def test_the_kept_pod_goes_if_no_place_will_be_free_before_its_own() -> None:
    job = running(2, nodes={"min": 1, "max": 2}, **QUEUE)
    job = with_status(job, restart_all(job, 2).status)
    stuck = make_pod(1, job, deleting=True, deletion_deadline=NOW + 30, **MANAGED)
    result = plan_with(job, make_pod(0, job, **MANAGED), stuck, nodes=lost("node-1"))
    assert deleted(result) == ["job-0"]


def test_a_restart_without_kueue_keeps_no_pod() -> None:
    """Nor if Kueue, which sets the finalizer, does not run."""
    job = running(2, **QUEUE)
    pods = make_pods(2, job)
    result = plan_with(job, *pods, progress=STALLED, any_progress=STALLED)
    assert deleted(result) == ["job-0", "job-1"]


def test_only_indices_of_the_group_order_its_nodes() -> None:
    """Kueue refuses a group, a pod of which has an index beyond its size."""
    job = started(scheduling={"queueName": "team", "topology": "example.com/rack"})
    first, _, *_, last = (training_pod(job, Slot(index)) for index in range(5))
    notes = [pod["metadata"]["annotations"] for pod in (first, last)]
    assert [names.KUEUE_INDEX_LABEL in each for each in notes] == [True, False]
    assert {each[names.KUEUE_PREFERRED_TOPOLOGY] for each in notes} == {"example.com/rack"}


def test_pods_of_a_job_that_allows_force_tell_kueue_so() -> None:
    notes = {
        allows: created_pods(plan_with(started(restart=allowed, **QUEUE)))[0]["metadata"]
        for allows, allowed in ((True, {"forceDeleteOnLostNode": True}), (False, {}))
    }
    assert notes[True]["annotations"][names.KUEUE_FORCE] == "true"
    assert names.KUEUE_FORCE not in notes[False]["annotations"]


def test_pods_without_a_queue_are_replaced_one_by_one() -> None:
    job = running()
    pods = make_pods(2, job, deleting=True, deletion_deadline=NOW + 170)
    assert plan_with(job, *pods).status.attempt == 1


RACK = "example.com/rack"
START = replace(OPEN, generation=0)
"""The service answers, and its agents have not met yet."""


def node(name: str, rack: str | None = "r1", **changes: Any) -> NodeView:
    labels = {} if rack is None else {RACK: rack, "other": "x"}
    return NodeView(name, labels=labels, created=LONG_AGO, **changes)


def cluster(**racks: str | None) -> dict[str, NodeView]:
    """Nodes by name, ``_`` for ``-``."""
    names = {name.replace("_", "-"): rack for name, rack in racks.items()}
    return {name: node(name, rack) for name, rack in names.items()}


def rack_job(field: str = "topology", **spec: Any) -> Job:
    return started(scheduling={field: RACK}, **spec)


def argument(result: Plan) -> str | None:
    """The places of the rendezvous pod that is created."""
    pods = {pod["metadata"]["name"]: pod for pod in created_pods(result)}
    (container,) = pods["job-rendezvous"]["spec"]["containers"]
    found = [a.removeprefix("--places=") for a in container["args"] if a.startswith("--places=")]
    return found[0] if found else None


@pytest.mark.parametrize("field", ["topology", "requiredTopology"])
def test_the_rendezvous_pod_is_told_the_places_of_all_nodes(field: str) -> None:
    nodes = cluster(node_0="r2", node_1="r1", spare="r2", plain=None)
    job = rack_job(field)
    result = plan_with(job, *make_pods(2, job), rendezvous=None, nodes=nodes)
    assert argument(result) == write_places({"node-0": "r2", "node-1": "r1", "spare": "r2"})


@pytest.mark.parametrize("nodes", [{}, cluster(node_0=None), cluster(node_0="")])
def test_without_places_the_argument_is_empty(nodes: dict[str, NodeView]) -> None:
    assert argument(plan_with(rack_job(), rendezvous=None, nodes=nodes)) == ""


def test_a_job_without_topology_is_told_nothing() -> None:
    nodes = cluster(node_0="r2")
    assert argument(plan_with(started(), rendezvous=None, nodes=nodes)) is None


def test_the_nodes_of_the_jobs_pods_come_first_and_the_list_is_bounded() -> None:
    others = {f"a{number:05d}": node(f"a{number:05d}") for number in range(20_000)}
    job = rack_job()
    nodes = {**others, **cluster(node_0="r2", node_1="r3")}
    result = plan_with(job, *make_pods(2, job), rendezvous=None, nodes=nodes)
    told = read_places(argument(result) or "")
    places = [place_of(name, told) for name in ("a00000", "node-0", "node-1", "a19999")]
    assert places == [0, 1, 2, None]
    assert 7_500 < len(told) < 8_000


def test_a_job_with_gpus_is_told_nodes_with_gpus_that_exist() -> None:
    nodes = {
        "cpu": node("cpu"),
        "gpu": node("gpu", has_gpus=True),
        "gone": node("gone", has_gpus=True, gone=True),
    }
    result = plan_with(rack_job(gpusPerNode=8), rendezvous=None, nodes=nodes)
    assert argument(result) == write_places({"gpu": "r1"})


def replaced(
    job: Job, nodes: dict[str, NodeView], heard: MembersReport = START, **changes: Any
) -> bool:
    """Whether the rendezvous pod is replaced, whose pod was created at NOW - 60."""
    pods = changes.pop("pods", make_pods(2, job, created=NOW - 60))
    service = rendezvous(job, created=NOW - 60, started=NOW - 50)
    result = plan_with(job, *pods, rendezvous=service, nodes=nodes, heard=heard, **changes)
    assert deleted(result) in ([], ["job-rendezvous"])
    return bool(deleted(result))


OLD = cluster(node_0="r2", node_1="r1")
NEW = OLD | {"node-1": replace(OLD["node-1"], created=NOW - 30)}


def test_a_service_that_is_older_than_a_node_is_replaced_once_before_the_start() -> None:
    job = rack_job()
    assert replaced(job, NEW)
    service = rendezvous(job, created=NOW - 20, started=NOW - 10)
    result = plan_with(job, *make_pods(2, job), rendezvous=service, nodes=NEW, heard=START)
    assert deleted(result) == []


@pytest.mark.parametrize(
    "nodes",
    [OLD, cluster(node_0="r9", node_1="r9"), {}, {**OLD, "node-1": node("node-1", None)}],
    ids=["known nodes", "changed labels", "unknown nodes", "a label is gone"],
)
def test_it_is_kept_for_known_nodes_whatever_their_labels(nodes: dict[str, NodeView]) -> None:
    assert not replaced(rack_job(), nodes)


def test_it_is_kept_for_a_new_node_without_the_label() -> None:
    assert not replaced(rack_job(), {**NEW, "node-1": replace(NEW["node-1"], labels={})})


@pytest.mark.parametrize(
    "heard", [OPEN, MembersReport(), replace(OPEN, generation=1), replace(OPEN, generation=9)]
)
def test_it_is_kept_once_agents_have_met_and_without_an_answer(heard: MembersReport) -> None:
    assert not replaced(rack_job(), NEW, heard)


def test_it_is_kept_until_all_pods_have_nodes() -> None:
    job = rack_job()
    pods = make_pods(2, job)
    waiting = replace(pods[1], node="", phase="Pending", started=None, ready=False)
    assert not replaced(job, {**NEW, "node-0": NEW["node-1"]}, pods=[pods[0], waiting])
    assert not replaced(rack_job(nodes={"min": 1, "max": 3}), NEW)


def test_it_is_kept_without_topology_and_if_its_revision_knows_no_places() -> None:
    assert not replaced(started(), NEW)
    job = rack_job()
    stored = job.spec_revision
    specs = {
        component: {
            **spec,
            "containers": [
                {**c, "args": [a for a in c["args"] if a != "--places="]} if "args" in c else c
                for c in spec["containers"]
            ],
        }
        for component, spec in stored.pod_specs.items()
    }
    unlabelled = replace(stored, pod_specs=specs)  # made before the label was added
    assert not replaced(job, NEW, revision=unlabelled)


ENDED: dict[str, Any] = {"phase": "Succeeded", "exit_code": 0, "deleting": True}
KEPT = {**ENDED, "finalizers": ("example.org/audit", names.KUEUE_FINALIZER)}


def without_rendezvous(job: Job, *kept: Pod) -> dict[str, Any]:
    return {"rendezvous": None, "kept_rendezvous": kept, "progress": progress()}


def test_a_rendezvous_pod_that_is_kept_is_named_with_its_finalizers() -> None:
    job = running()
    kept = without_rendezvous(job, rendezvous(job, **KEPT))
    result = plan_with(job, *make_pods(), **kept)
    assert condition(result.status, "Healthy") == ("False", "KeptByFinalizers")
    text = "job-rendezvous: deleted, kept by example.org/audit: "
    assert message(result.status, "Healthy").startswith(text)
    assert [event.reason for event in result.events] == ["KeptByFinalizers"]
    again = plan_with(with_status(job, result.status), *make_pods(), **kept)
    assert again.events == (), "it is told once"


def test_another_rendezvous_pod_with_the_same_host_name_takes_the_place_of_one_that_is_kept() -> (
    None
):
    job = running()
    kept = [rendezvous(job, **KEPT), rendezvous(job, **KEPT, name="job-rendezvous2")]
    (first,) = created_pods(plan_with(job, *make_pods(), **without_rendezvous(job, kept[0])))
    (second,) = created_pods(plan_with(job, *make_pods(), **without_rendezvous(job, *kept)))
    (again,) = created_pods(plan_with(job, *make_pods(), **without_rendezvous(job, kept[1])))
    places = [(pod["metadata"]["name"], pod["spec"]["hostname"]) for pod in (first, second, again)]
    host = "job-rendezvous"  # by which agents find it
    assert places == [("job-rendezvous2", host), ("job-rendezvous3", host), (host, host)]


def test_a_rendezvous_pod_is_found_beside_those_that_are_kept() -> None:
    def manifest(name: str, **metadata: Any) -> dict[str, Any]:
        labels = names.labels("job", names.RENDEZVOUS)
        status = {"phase": "Failed" if "deletionTimestamp" in metadata else "Running"}
        spec = {"nodeName": "node-0"}
        metadata |= {"name": name, "uid": name, "labels": labels}
        return {"metadata": metadata, "spec": spec, "status": status}

    deleted = {"deletionTimestamp": stamp(NOW), "finalizers": ["example.org/audit"]}
    kept, found = manifest("job-rendezvous", **deleted), manifest("job-rendezvous2")
    observed = Observed.from_objects([kept, found])
    assert observed.rendezvous is not None
    assert observed.rendezvous.name == "job-rendezvous2"
    assert [pod.name for pod in observed.kept_rendezvous] == ["job-rendezvous"]
    assert Observed.from_objects([kept]).rendezvous is None
    forced = manifest("job-rendezvous", **deleted, deletionGracePeriodSeconds=0)
    forced["status"]["phase"] = "Running"
    assert Observed.from_objects([forced]).rendezvous is None, "its node is lost"
    unchanged = manifest("job-rendezvous", **{**deleted, "finalizers": []})
    assert Observed.from_objects([unchanged]).rendezvous is not None, "it is about to go"


def test_a_training_pod_with_another_index_takes_the_place_of_one_that_is_kept() -> None:
    job, finalizers = running(), ("example.org/audit",)
    kept = failed(1, 75, deleting=True, finalizers=finalizers)
    result = plan_with(job, make_pod(0), kept, progress=progress())
    assert created(result) == ["job-2"]
    unscheduled = make_pod(1, **PENDING, node="", deleting=True, finalizers=finalizers)
    assert created(plan_with(job, make_pod(0), unscheduled, progress=progress())) == ["job-2"]
    forced = make_pod(1, deleting=True, forced=True, finalizers=finalizers)
    assert created(plan_with(job, make_pod(0), forced, progress=progress())) == ["job-2"]
    leaving = make_pod(1, deleting=True, finalizers=finalizers)
    assert created(plan_with(job, make_pod(0), leaving, progress=progress())) == []
    one = running(1, nodes={"min": 1, "max": 1})
    of_one = failed(0, 75, one, deleting=True, finalizers=finalizers)
    assert created(plan_with(one, of_one, rendezvous=rendezvous(one))) == ["job-1"]


def test_a_job_is_suspended_although_one_of_its_pods_is_kept() -> None:
    job = running(lifecycle={"suspend": True})
    gone = failed(1, 75, deleting=True, finalizers=("example.org/audit",))
    assert condition(plan_with(job, gone).status, "Suspended") == ("True", "Suspended")
    by_kueue = replace(gone, finalizers=(names.KUEUE_FINALIZER,))
    assert condition(plan_with(job, by_kueue).status, "Suspended") == ("False", "Stopping")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finalizers": ("example.org/audit",)}, "KeptByFinalizers"),
        ({"finalizers": (names.KUEUE_FINALIZER,)}, "Degraded"),
        ({}, "Degraded"),
    ],
)
def test_a_training_pod_that_is_kept(changes: dict[str, Any], reason: str) -> None:
    job = running()
    gone = failed(1, 75, deleting=True, deletion_deadline=NOW + 100, **changes)
    result = plan_with(job, make_pod(0), gone, progress=progress())
    assert condition(result.status, "Healthy") == ("False", reason)


def test_the_key_is_created_before_any_pod_as_somebody_may_have_deleted_it() -> None:
    result = plan_with(running(), make_pod(0), progress=progress())
    assert [m["kind"] for m in result.create if m["kind"] in ("Secret", "Pod")] == ["Secret", "Pod"]
    assert result.create[-1]["metadata"]["name"] == "job-1"
    assert "immutable" not in next(m for m in result.create if m["kind"] == "Secret")
