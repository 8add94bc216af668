"""The requests of a reconcile: which, in which order, how often; and what stays in memory.

One record for each decision, with its reason. Faults of nodes disrupt a bounded part of all pods per minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.controller.event_loop import synchronous
from tests.operator.jobs import KEY, NOW, make_job, make_training, run_pods
from tests.operator.object_store import Harness, ObjectStore, run

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain.contract.resource.status import (
    Condition,
    InPlaceRestart,
    NodesStatus,
    ProgressStatus,
    Status,
)
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Job, Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.base.reports import MembersReport, Progress
from fluxtrain_operator.base.settings import parse_network_rules, parse_pod_defaults
from fluxtrain_operator.controller import executor
from fluxtrain_operator.controller import reconcile as reconcile_module
from fluxtrain_operator.controller.api_client import SUPPORT_KINDS
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.executor import (
    MIN_PODS,
    FaultBudget,
    JobState,
    decision_fields,
    log_decision,
    status_delay,
)
from fluxtrain_operator.controller.reconcile import Reconciler, is_conflict
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.guard import NODE_FAULTS, Delete, Reason
from fluxtrain_operator.planner.plan import Event, Plan
from fluxtrain_operator.planner.situation import RUN, Decision


class RecordingStore(ObjectStore):
    """Records start and end of each request; the names in ``refuse_names`` cannot be created."""

    def __init__(self, refuse_names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.log: list[tuple[str, str, str]] = []
        self._refuse_names = refuse_names

    async def _record(self, verb: str, kind: str, name: str) -> None:
        self.log.append(("start", verb, f"{kind}/{name}"))
        await asyncio.sleep(0)
        if name in self._refuse_names:
            raise ApiError(503, f"{name} is refused", server_message=f"{name} is refused")
        await asyncio.sleep(0.01)
        self.log.append(("end", verb, f"{kind}/{name}"))

    def requests(self, verb: str) -> list[str]:
        return [name for when, logged, name in self.log if (when, logged) == ("start", verb)]

    async def create(self, manifest: Manifest) -> Manifest | None:
        await self._record("create", manifest["kind"], manifest["metadata"]["name"])
        return await super().create(manifest)

    async def get(self, manifest: Manifest) -> Manifest | None:
        raise AssertionError("no name is taken")

    async def apply(self, manifest: Manifest, uid: str) -> Manifest | None:
        await self._record("apply", manifest["kind"], manifest["metadata"]["name"])
        return manifest

    async def delete(self, namespace: str, deletion: Delete, version: str) -> Manifest | None:
        await self._record("delete", deletion.kind, deletion.name)
        return await super().delete(namespace, deletion, version)

    async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
        await self._record("status", manifest["kind"], manifest["metadata"]["name"])
        return await super().write_status(manifest, status)

    async def create_event(self, job: Job, event: Event, now: float) -> None:
        await self._record("event", event.reason, job.name)

    async def fetch_members(self, address: str, port: int) -> MembersReport | None:
        return None

    async def fetch_progress(self, address: str, port: int) -> Progress | None:
        await asyncio.sleep(100)
        raise AssertionError("no reconcile waits for a response")


def make_reconciler(cluster: Any, *jobs: Manifest) -> Reconciler:
    cache = Cache()
    for job in jobs:
        cache.set_job(job)
    return Reconciler(cache, cluster, Metrics(CollectorRegistry()), "trainer:1")


def reconcile(cluster: RecordingStore, job: Manifest, **settings: Any) -> None:
    async def main() -> None:
        reconciler = make_reconciler(cluster, job)
        vars(reconciler).update(settings)
        async with asyncio.timeout(20):
            await reconciler.reconcile(KEY)
        await reconciler.poller.close()

    asyncio.run(main())


def test_the_status_is_written_first_and_what_pods_mount_is_created_before_them() -> None:
    cluster = RecordingStore()
    reconcile(cluster, make_job())
    order = [verb if "Pod/" not in name else "pod" for _, verb, name in cluster.log]
    assert sorted(order, key=["status", "create", "pod", "event"].index) == order
    assert order.count("pod") == 2 * 5


def test_requests_for_one_kind_are_concurrent() -> None:
    cluster = RecordingStore()
    reconcile(cluster, make_job())
    pods = [when for when, _, name in cluster.log if name.startswith("Pod/")]
    assert pods == ["start", "end"] + ["start"] * 4 + ["end"] * 4, "the rendezvous pod goes first"


def test_pods_have_the_settings_of_the_operator() -> None:
    cluster, manifest = RecordingStore(), make_job()
    manifest["spec"]["gpusPerNode"] = 2
    defaults = parse_pod_defaults('{"supplementalGroups": [44, 109], "imagePullSecrets": ["a"]}')
    reconcile(cluster, manifest, pod_defaults=defaults, rendezvous_image="operator:1")
    pods = {name: pod["spec"] for (kind, name), pod in cluster.objects.items() if kind == "Pod"}
    assert all(pod["imagePullSecrets"] == [{"name": "a"}] for pod in pods.values())
    groups = {n: pod["securityContext"].get("supplementalGroups") for n, pod in pods.items()}
    assert groups == {f"job-{i}": [44, 109] for i in range(4)} | {"job-rendezvous": None}
    images = {name: pod["containers"][0]["image"] for name, pod in pods.items()}
    assert images == {f"job-{i}": "trainer:1" for i in range(4)} | {"job-rendezvous": "operator:1"}


def test_network_policies_have_the_rules_of_the_operator() -> None:
    cluster = RecordingStore()
    rules = parse_network_rules('{"operator": [{"podSelector": {}}], "egress": "restricted"}')
    reconcile(cluster, make_job(), network_rules=rules)
    spec = cluster.objects["NetworkPolicy", "job-network"]["spec"]
    assert spec["ingress"][1]["from"] == [{"podSelector": {}}]
    assert spec["policyTypes"] == ["Ingress", "Egress"]


def test_a_pod_that_cannot_be_created_fails_the_reconcile_after_the_other_requests() -> None:
    cluster = RecordingStore(refuse_names=("job-1",))
    with pytest.raises(ApiError, match="job-1 is refused"):
        reconcile(cluster, make_job())
    ended = [name for when, _, name in cluster.log if "Pod/" in name and when == "end"]
    assert sorted(ended) == ["Pod/job-0", "Pod/job-2", "Pod/job-3", "Pod/job-rendezvous"]


def test_an_event_that_is_refused_fails_no_reconcile(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    message = "forbidden: because namespace ns is being terminated"
    harness.cluster.refuse["Event"] = ApiError(403, message, "Forbidden", message)
    run(harness, 1)
    assert harness.cluster.status["phase"] == "Pending"
    assert harness.cluster.own("Pod") != []
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"ns/job: no event Pending: {message}"
    ]


@synchronous
async def test_a_job_that_was_deleted_between_two_watches_is_forgotten() -> None:
    class NotFound(RecordingStore):
        async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
            raise ApiError(404, "not found")

    cluster = NotFound()
    reconciler = make_reconciler(cluster, make_job())
    with pytest.raises(ApiError, match="the job was deleted") as caught:
        await reconciler.reconcile(KEY)
    assert is_conflict(caught.value), "it is no error to report"
    assert await reconciler.reconcile(KEY) is None
    assert cluster.log == [], "nothing is created for it"


@synchronous
async def test_what_a_new_leader_finds_in_the_cache_is_not_requested() -> None:
    cluster = RecordingStore()
    first = make_reconciler(cluster, make_job())
    await first.reconcile(KEY)
    manifest = first.cache.job(KEY)
    assert manifest is not None
    second = make_reconciler(cluster, dict(manifest))
    for pod in first.cache.pods(KEY):
        second.cache.set_pod(pod)
    for (kind, _), thing in cluster.objects.items():
        if kind in SUPPORT_KINDS:
            second.cache.applied.set((SUPPORT_KINDS[kind], kind), thing)
    cluster.log.clear()
    await second.reconcile(KEY)
    assert [name for _, verb, name in cluster.log if verb != "status"] == []
    await first.poller.close()
    await second.poller.close()


@synchronous
@pytest.mark.parametrize("kind", SUPPORT_KINDS)
async def test_a_deleted_object_is_created_again_and_no_other(kind: str) -> None:
    harness = Harness()
    await harness.reconcile()
    (name,) = harness.cluster.own(kind)
    pods, tried = harness.cluster.own("Pod"), harness.cluster.num_tried
    harness.delete(kind, name)
    await harness.reconcile()
    assert harness.cluster.own(kind) == [name]
    assert harness.cluster.own("Pod") == pods
    assert harness.cluster.num_tried - tried <= 2, "the revision may be ensured again"
    await harness.reconciler.poller.close()


@synchronous
async def test_a_job_waits_for_the_pod_groups_of_its_scheduler_and_no_worker_does() -> None:
    manifest, asked = make_job(), list[str]()
    manifest["spec"]["scheduling"] = {"gang": "Volcano"}
    cluster = RecordingStore()
    cluster.served = frozenset({"PodGroup"})
    reconciler = make_reconciler(cluster, manifest)
    reconciler.has_groups = lambda version: len(asked) > 1 or bool(asked.append(version))
    for _ in range(2):
        assert 0 < (await reconciler.reconcile(KEY) or 0) < 1
        assert cluster.log == []
    await reconciler.reconcile(KEY)
    assert "PodGroup/job-gang" in cluster.requests("create")
    await reconciler.poller.close()


def in_volcano(served: Iterable[str] = ("PodGroup",)) -> Harness:
    """A job in a gang of Volcano, whose API has the kinds ``served``."""
    manifest = make_job()
    harness = Harness(spec=manifest["spec"] | {"scheduling": {"gang": "Volcano"}})
    harness.cluster.served = frozenset(served)
    return harness


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no answer of the API server about its kinds count for longer than a moment."""
    monkeypatch.setattr(reconcile_module, "_KINDS_SECONDS", 0.0)


@pytest.mark.parametrize("served", [(), ("Queue",)])
def test_a_job_waits_until_the_api_of_its_pod_group_is_installed(
    asked_anew: None, served: tuple[str, ...]
) -> None:
    harness = in_volcano(served)
    cluster = harness.cluster
    asked = list[str]()
    harness.reconciler.has_groups = lambda version: bool(asked.append(version) or True)
    run(harness, 3)
    assert (cluster.own("Pod"), cluster.own("PodGroup"), asked) == ([], [], [])
    value, reason, text = cluster.condition("Admitted")
    assert (value, reason) == ("False", "NoPodGroups")
    missing = "the cluster does not serve PodGroup of scheduling.volcano.sh/v1beta1"
    assert text.endswith(missing)
    assert cluster.warnings() == ["NoPodGroups"], "it is told once"
    cluster.served = frozenset({"PodGroup"})
    run(harness, 1)
    assert (cluster.own("PodGroup"), len(cluster.own("Pod"))) == (["job-gang"], 5)
    assert cluster.condition("Admitted")[1] == "PodGroupPending"


def test_an_api_that_goes_away_is_noticed_and_no_pod_is_created_without_it(
    asked_anew: None,
) -> None:
    harness = in_volcano()
    cluster = harness.cluster
    run(harness, 1)
    cluster.served = frozenset()
    harness.delete("Pod", "job-1")
    run(harness, 2)
    assert "job-1" not in cluster.own("Pod")
    assert cluster.condition("Healthy")[1] == "NoPodGroups"
    cluster.served = frozenset({"PodGroup"})
    run(harness, 1)
    assert "job-1" in cluster.own("Pod")


def test_groups_that_the_operator_may_not_list_are_reported(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = in_volcano()
    harness.reconciler.has_groups = lambda version: False
    run(harness, 1)
    assert harness.cluster.status == {}, "they may be about to be listed"
    monkeypatch.setattr(reconcile_module, "_PATIENCE_SECONDS", 0.0)
    run(harness, 1)
    value, reason, text = harness.cluster.condition("Admitted")
    assert (value, reason) == ("False", "NoPodGroups")
    assert "the chart's value gangs" in text
    assert harness.cluster.own("Pod") == []
    harness.reconciler.has_groups = lambda version: True
    run(harness, 1)
    assert len(harness.cluster.own("Pod")) == 5


def test_the_api_server_is_asked_once_for_many_jobs() -> None:
    asked = list[str]()

    class Counting(ObjectStore):
        async def kinds(self, version: str) -> frozenset[str]:
            asked.append(version)
            return frozenset()

    harness = in_volcano()
    harness.reconciler.api = Counting()  # type: ignore[assignment]
    run(harness, 5)
    assert asked == ["scheduling.volcano.sh/v1beta1"]


def test_the_state_of_a_volcano_group_is_reported() -> None:
    harness = in_volcano()
    run(harness, 1)
    kind = "scheduling.volcano.sh/v1beta1", "PodGroup"
    group = harness.cluster.objects["PodGroup", "job-gang"]
    unmet = {"type": "Unschedulable", "status": "True", "reason": "NotEnoughResources"}
    for status, expected in (
        ({}, "PodGroupPending"),
        ({"phase": "Pending", "conditions": [unmet]}, "PodGroupPending"),
        ({"phase": "Inqueue"}, "Admitted"),
    ):
        changed = harness.cache.applied.set(kind, {**group, "status": status})
        assert changed == ([KEY] if status else []), "it is planned again"
        run(harness, 1)
        assert harness.cluster.condition("Admitted")[1] == expected


@synchronous
async def test_a_deleted_pod_that_is_already_gone_is_removed_from_the_cache() -> None:
    reconciler = make_reconciler(RecordingStore(), make_job())
    await reconciler.reconcile(KEY)
    assert len(reconciler.cache.pods(KEY)) == 5
    suspended = make_job(phase="Pending", attempt=1)
    suspended["spec"]["lifecycle"] = {"suspend": True}
    suspended["metadata"]["resourceVersion"] = "5000"
    reconciler.cache.set_job(suspended)
    for _ in range(3):
        await reconciler.reconcile(KEY)
    assert reconciler.cache.pods(KEY) == []
    await reconciler.poller.close()


@synchronous
async def test_pods_that_start_one_by_one_share_a_status_and_no_reconcile_waits_for_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1000.0, time=time.time)  # it may run for minutes
    for module in (executor, reconcile_module):
        monkeypatch.setattr(module, "time", clock)
    cluster = RecordingStore()
    reconciler, requeue_after = make_reconciler(cluster, make_job()), []
    async with asyncio.timeout(20):
        for num_running in range(5):
            run_pods(reconciler.cache, num_running)
            requeue_after.append(await reconciler.reconcile(KEY))
    assert len(reconciler.poller) == 1, "the trainers are polled nevertheless"
    await reconciler.poller.close()
    written = len(cluster.requests("status"))
    assert 2 <= written <= 3, "at the start, with the first pod, and if a poll has ended"
    assert all(s is not None and 0 < s <= 3 for s in requeue_after[2:]), requeue_after


def make_status(**changes: Any) -> Status:
    values = {"phase": "Pending", "attempt": 1, "conditions": make_conditions("1 of 8")}
    return Status(**{**values, "nodes": NodesStatus(ready=1, desired=8), **changes})


def make_conditions(message: str, status: Any = "False") -> list[Condition]:
    ready = Condition(
        type="Ready",
        status=status,
        reason="PodsPending",
        message=message,
        lastTransitionTime=NOW,
        observedGeneration=1,
    )
    return [ready]


@pytest.mark.parametrize(
    ("changes", "can_wait"),
    [
        ({"nodes": NodesStatus(ready=2, desired=8)}, True),
        ({"conditions": make_conditions("2 of 8")}, True),
        ({"conditions": make_conditions("8 of 8", "True")}, False),
        ({"nodes": NodesStatus(ready=2, desired=4)}, False),
        ({"phase": "Starting"}, False),
        ({"attempt": 2}, False),
        ({"progress": ProgressStatus(step=1)}, False),
        ({"last_error": "gone"}, False),
        ({}, False),
    ],
)
def test_only_a_status_that_counts_pods_is_delayed(changes: dict[str, Any], can_wait: bool) -> None:
    before, state = make_status(), JobState("uid", written=0.0)
    after = Plan(before.model_copy(update=changes))
    assert (status_delay(before, after, state, now=1.0) == 2.0) is can_wait
    assert status_delay(before, after, state, now=10.0) is None
    with_actions = Plan(after.status, delete=(Delete("Pod", "job-0"),))
    assert status_delay(before, with_actions, state, now=1.0) is None


@synchronous
async def test_nothing_stays_in_memory_of_deleted_jobs() -> None:
    jobs = [make_job(f"job-{index}") for index in range(20)]
    reconciler = make_reconciler(RecordingStore(), *jobs)
    for job in jobs:
        key = ("ns", job["metadata"]["name"])
        await reconciler.reconcile(key)
        reconciler.poller.start(key, 1)
        for pod in reconciler.cache.pods(key):
            reconciler.cache.set_pod(pod, deleted=True)
        reconciler.cache.set_job(job, deleted=True)
        assert await reconciler.reconcile(key) is None
    for part in (reconciler, reconciler.cache, reconciler.poller, reconciler.metrics):
        private = {name: value for name, value in vars(part).items() if name.startswith("_")}
        sizes = {name: len(value) for name, value in private.items() if hasattr(value, "__len__")}
        sizes.pop("_last_event", None)  # by kind of watch: at most three entries
        assert sizes
        assert not any(sizes.values()), (part, sizes)


def deletions(count: int, reason: Reason = Reason.NODE_LOST, first: int = 0) -> list[Delete]:
    return [
        Delete("Pod", f"job-{n}", f"uid-{n}", None, reason) for n in range(first, first + count)
    ]


@pytest.mark.parametrize(
    ("percent", "num_pods", "left"),
    [(10, 0, 8), (10, 1, 8), (10, 80, 8), (10, 89, 8), (10, 90, 9), (10, 8000, 800), (100, 64, 64)],
)
def test_a_part_of_all_pods_may_be_replaced_per_minute(
    percent: int, num_pods: int, left: int
) -> None:
    assert FaultBudget(percent).left(num_pods, 0.0) == left
    assert left >= MIN_PODS


def test_each_pod_counts_once_and_for_a_minute() -> None:
    budget = FaultBudget(10)
    budget.record(deletions(5), 100.0)
    budget.record(deletions(6), 130.0)  # five of them again, as the plan was refused
    assert budget.left(80, 130.0) == 2
    assert budget.left(80, 159.9) == 2
    assert budget.left(80, 160.0) == 7
    assert budget.left(80, 190.0) == 8
    budget.record(deletions(20, first=100), 200.0)
    assert budget.left(80, 200.0) == 0


@pytest.mark.parametrize("reason", sorted(set(Reason) - NODE_FAULTS))
def test_only_faults_of_nodes_count(reason: Reason) -> None:
    budget = FaultBudget(10)
    budget.record([*deletions(8, reason), Delete("ConfigMap", "job-config")], 0.0)
    assert budget.left(0, 0.0) == 8


FAILURE = Decision("restart", "ProgramError", "job-0: exit code 1", uses_restart=True)
MANIFEST = make_training()


def condition(kind: str, value: Any, reason: str) -> Condition:
    return Condition(type=kind, status=value, reason=reason, lastTransitionTime=stamp(0))


def running(**changes: Any) -> Status:
    conditions = [condition("Ready", "True", "Training")]
    return Status(phase="Running", attempt=2, conditions=conditions, **changes)


def fields(plan: Plan, before: Status | None = None) -> dict[str, Any]:
    result = decision_fields(MANIFEST, before or running(), plan)
    assert result is not None
    return result


def test_progress_alone_is_not_logged() -> None:
    plan = Plan(running(progress=ProgressStatus(step=9)), decision=RUN)
    assert decision_fields(MANIFEST, running(), plan) is None


def test_a_decision_has_its_reason_and_its_objects() -> None:
    pod = {"kind": "Pod", "metadata": {"name": "job-0"}}
    plan = Plan(running(), (Delete("Pod", "job-1"),), (pod,), decision=FAILURE)
    values = fields(plan)
    assert (values["namespace"], values["job"], values["attempt"]) == ("ns", "job", 2)
    assert (values["action"], values["reason"]) == ("restart", "ProgramError")
    assert values["detail"] == "job-0: exit code 1"
    assert (values["delete"], values["create"]) == (["Pod/job-1"], ["Pod/job-0"])


def test_a_restart_in_place_has_an_action_of_its_own() -> None:
    restart = InPlaceRestart(attempt=2, generation=1, step=7, time=stamp(0))
    decision = Decision("run", "NoProgress", "hangs", True, in_place_restart=restart)
    values = fields(Plan(running(), (Delete("Pod", "job-rendezvous"),), decision=decision))
    assert (values["action"], values["reason"]) == ("restart in place", "NoProgress")


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan(running(), events=(Event("Warning", "NodeLost", "gone"),), decision=RUN), "NodeLost"),
        (Plan(Status(phase="Pending"), decision=RUN), "Desired"),
        (
            Plan(
                Status(phase="Failed", conditions=[condition("Failed", "True", "InvalidSpec")]),
            ),
            "InvalidSpec",
        ),
        (Plan(running(), (Delete(KIND, "job"),)), "Expired"),
        (Plan(running(), (Delete("Pod", "job-0"),)), "CleanPods"),
    ],
    ids=["event", "phase", "condition", "expired", "clean_up"],
)
def test_a_plan_without_a_reason_of_its_own_has_one(plan: Plan, reason: str) -> None:
    assert fields(plan)["reason"] == reason


def test_changed_conditions_are_listed() -> None:
    after = running().model_copy(update={"conditions": [condition("Ready", "False", "NodeLost")]})
    assert fields(Plan(after, decision=RUN))["conditions"] == ["Ready=False NodeLost"]


def test_many_names_are_counted() -> None:
    plan = Plan(running(), tuple(Delete("Pod", f"job-{n}") for n in range(4096)), decision=FAILURE)
    names = fields(plan)["delete"]
    assert (len(names), names[-1]) == (17, "and 4080 more")


def test_the_text_has_the_reason_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_decision(MANIFEST, Status(), Plan(running(), decision=FAILURE))
    (record,) = caplog.records
    assert record.getMessage() == "ns/job: restart, ProgramError: job-0: exit code 1"


def test_a_percent_sign_in_a_message_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decision = Decision("fail", "ProgramError", "100%s full %(x)d")
    log_decision(MANIFEST, Status(), Plan(running(), decision=decision))
    assert caplog.records[0].getMessage().endswith("100%s full %(x)d")
