"""A job controls only its own objects: other owners' are reported, waited for, and never changed."""

from __future__ import annotations

import copy

import pytest
from tests.operator.controller.event_loop import synchronous
from tests.operator.jobs import KEY, NOW, make_job, run_pods
from tests.operator.object_store import Harness, run

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.planner.observed import controller_of
from fluxtrain_operator.planner.plan import load

FOREIGN = {"kind": "Deployment", "name": "shop", "uid": "shop", "controller": True}
EARLIER_JOB = {"kind": "FluxTraining", "name": "job", "uid": "uid-before", "controller": True}
OTHER_JOB = {"kind": "FluxTraining", "name": "1", "uid": "uid-1", "controller": True}
QUOTA = 'pods "job-0" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2'
SECURITY = 'pods "job-0" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes'
WEBHOOK = 'admission webhook "no.example.com" denied the request: not on a Sunday'
REVISION = load(make_job(), "trainer:1").spec_revision.name
ALL_PODS = ["job-0", "job-1", "job-2", "job-3", "job-rendezvous"]
SUPPORT = [
    ("ConfigMap", REVISION),
    ("Service", "job"),
    ("NetworkPolicy", "job-network"),
    ("PodDisruptionBudget", "job-nodes"),
]


def forbidden(message: str) -> ApiError:
    return ApiError(403, message, "Forbidden", message)


def assert_started(harness: Harness, num_restarts: int = 0) -> None:
    assert harness.cluster.own("Pod") == ALL_PODS
    assert harness.cluster.condition("Admitted")[0] == "True"
    assert harness.cluster.status["restarts"]["pod"] == num_restarts


@pytest.mark.parametrize(("kind", "name"), SUPPORT)
@pytest.mark.parametrize("owner", [None, FOREIGN, OTHER_JOB])
def test_a_foreign_object_is_reported_and_kept_and_the_job_starts_once_it_is_gone(
    kind: str, name: str, owner: Manifest | None
) -> None:
    harness = Harness()
    cluster = harness.cluster
    theirs = copy.deepcopy(cluster.put(kind, name, owner))
    run(harness, 4)
    assert cluster.objects[kind, name] == theirs
    assert cluster.own("Pod") == [], "no pod starts meanwhile"
    for condition in ("Ready", "Admitted"):
        status, reason, message = cluster.condition(condition)
        assert (status, reason) == ("False", "NameConflict")
        state = f"belongs to {owner['kind']} {owner['name']}" if owner else "has no owner"
        assert f"{kind} {name} already exists and {state}" in message
        assert "delete or rename it, or give the job another name" in message
    assert cluster.warnings() == ["NameConflict"], "once, not with every retry"
    assert "startTime" not in cluster.status

    harness = Harness()
    harness.cluster.put(kind, name, owner)
    run(harness, 2, lambda: harness.delete(kind, name), 2)
    assert_started(harness)  # a first pod is no replacement
    assert harness.cluster.status["nodes"]["desired"] == 4


@synchronous
async def test_a_foreign_object_that_replaced_ours_is_not_overwritten() -> None:
    harness = Harness()
    await harness.reconcile()
    harness.cluster.put("NetworkPolicy", "job-network", FOREIGN)
    changed = make_job(**harness.cluster.status)
    changed["spec"]["run"] = {"preset": "micro", "logging": {"metrics_port": 9500}}
    changed["metadata"]["generation"] = 2
    harness.set_job(changed)
    with pytest.raises(ApiError, match="job-network was deleted or replaced"):
        await harness.reconcile()
    await harness.reconcile()
    assert harness.cluster.objects["NetworkPolicy", "job-network"]["data"] == "theirs"
    assert "NameConflict" in harness.cluster.warnings()


def test_a_foreign_object_is_not_deleted_when_the_job_no_longer_needs_one() -> None:
    harness = Harness()
    budget = ("PodDisruptionBudget", "job-nodes")

    def fix_size() -> None:
        fixed = make_job(**harness.cluster.status)
        fixed["spec"]["nodes"] = {"min": 4, "max": 4}
        harness.set_job(fixed)
        harness.cluster.put(*budget, FOREIGN)

    run(harness, 1, fix_size, 1)
    assert controller_of(harness.cluster.objects[budget]) == FOREIGN


NOT_OURS = {
    "of an earlier job": {"owner": EARLIER_JOB},
    "being deleted": {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    "orphaned": {},
    "foreign": {"owner": FOREIGN},
}


@pytest.mark.parametrize("case", NOT_OURS)
@pytest.mark.parametrize("attempt", ["1", "999999"])
def test_succeeded_pods_that_the_job_does_not_control_do_not_count(case: str, attempt: str) -> None:
    """Although they have its labels and names."""
    harness = Harness()
    cluster = harness.cluster
    labels = {
        names.LABEL_JOB: "job",
        names.LABEL_ATTEMPT: attempt,
        names.LABEL_COMPONENT: names.TRAINER,
    }
    message = '{"rank": 0, "step": 99, "samples": 99, "lastStepTime": 1700000000}'
    state = {"terminated": {"exitCode": 0, "message": message}}
    status = {
        "phase": "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": state}],
    }
    annotations = {names.ANNOTATION_REPLACEMENT: "7"}
    for index in range(4):
        pod = cluster.put(
            "Pod", f"job-{index}", labels=labels, annotations=annotations, **NOT_OURS[case]
        )
        pod["status"] = status
    run(harness, harness.sync, 2)
    assert cluster.status["phase"] == "Pending"
    assert "progress" not in cluster.status
    assert cluster.status["restarts"]["pod"] == 0
    assert cluster.status["attempt"] == 1
    assert cluster.own("Pod") == [], "none starts before all can"
    is_leaving = case in ("of an earlier job", "being deleted")
    reason = "PredecessorTerminating" if is_leaving else "NameConflict"
    assert cluster.condition("Ready")[:2] == ("False", reason)
    assert cluster.warnings() == ([] if is_leaving else ["NameConflict"])

    run(harness, lambda: [harness.delete("Pod", f"job-{index}") for index in range(4)], 2)
    assert_started(harness)
    assert cluster.status["attempt"] == 1


@pytest.mark.parametrize(
    ("finalizer", "phase", "reason"),
    [
        ("example.org/audit", "Failed", "PredecessorKept"),
        ("example.org/audit", "Running", "PredecessorTerminating"),
        (names.KUEUE_FINALIZER, "Failed", "PredecessorTerminating"),
    ],
)
def test_a_pod_of_an_earlier_job_that_finalizers_keep_is_reported(
    finalizer: str, phase: str, reason: str
) -> None:
    harness = Harness()
    deleted = {"deletionTimestamp": NOW, "finalizers": [finalizer]}
    labels = {names.LABEL_JOB: "job"}
    pod = harness.cluster.put("Pod", "job-0", EARLIER_JOB, labels=labels, **deleted)
    pod |= {"spec": {"nodeName": "n1"}, "status": {"phase": phase}}
    run(harness, harness.sync, 2)
    assert harness.cluster.condition("Ready")[:2] == ("False", reason)
    is_told = (
        f"Pod job-0 is deleted, and kept by {finalizer}" == harness.cluster.condition("Ready")[2]
    )
    assert is_told == (reason == "PredecessorKept")
    assert harness.cluster.warnings() == (["PredecessorKept"] if is_told else [])
    run(harness, lambda: harness.delete("Pod", "job-0"), 2)
    assert_started(harness)


def test_a_foreign_pod_with_the_jobs_label_and_an_unused_name_is_no_conflict() -> None:
    harness = Harness()
    labels = {names.LABEL_JOB: "job", names.LABEL_ATTEMPT: "999999"}
    harness.cluster.put("Pod", "other", labels={**labels, names.LABEL_COMPONENT: "trainer"})
    run(harness, harness.sync, 2)
    assert harness.cluster.own("Pod") == ALL_PODS
    assert harness.cluster.warnings() == []


def test_a_foreign_pod_without_our_label_is_reported_and_the_other_pods_are_created() -> None:
    harness = Harness()
    theirs = copy.deepcopy(harness.cluster.put("Pod", "job-2", FOREIGN, labels={"app": "shop"}))
    run(harness, 3)
    assert harness.cluster.objects["Pod", "job-2"] == theirs
    assert harness.cluster.own("Pod") == ["job-0", "job-1", "job-3", "job-rendezvous"]
    assert harness.cluster.condition("Healthy")[:2] == ("False", "NameConflict")
    run(harness, lambda: harness.delete("Pod", "job-2"), 2)
    assert harness.cluster.own("Pod") == ALL_PODS


@pytest.mark.parametrize(
    ("kind", "code", "message", "reason"),
    [
        ("Pod", 403, QUOTA, "QuotaExceeded"),
        ("Pod", 403, "failed quota: small: must specify limits.memory", "QuotaExceeded"),
        ("Pod", 403, SECURITY, "PodSecurity"),
        ("Pod", 403, 'no PriorityClass with name "high" was found', "PodsRefused"),
        ("Pod", 422, 'Pod "job-0" is invalid: spec.hostAliases', "PodsRefused"),
        ("Pod", 400, WEBHOOK, "PodsRefused"),
        ("Pod", 500, WEBHOOK, "PodsRefused"),
        ("Pod", 500, 'failed calling webhook "no.example.com": no endpoints', "PodsRefused"),
        ("ConfigMap", 403, "exceeded quota: small, requested: count/configmaps=1", "QuotaExceeded"),
        ("Service", 403, "services is forbidden: User cannot create", "ServiceRefused"),
        ("NetworkPolicy", 422, "denied request: not here", "NetworkPolicyRefused"),
        ("Secret", 403, "exceeded quota: small, requested: count/secrets=1", "QuotaExceeded"),
        ("Secret", 403, "because namespace ns is being terminated", "SecretRefused"),
    ],
)
def test_a_rejection_is_reported_once_and_retried_until_it_succeeds(
    kind: str, code: int, message: str, reason: str
) -> None:
    harness = Harness()
    cluster = harness.cluster
    cluster.refuse = {kind: ApiError(code, f"POST /x: {message}", "Forbidden", message)}
    run(harness, 3)
    for condition in ("Ready", "Admitted", "Healthy"):
        assert cluster.condition(condition)[:2] == ("False", reason)
        assert message in cluster.condition(condition)[2]
    assert cluster.warnings() == [reason]
    assert cluster.own("Pod") == []
    tried = cluster.num_tried
    run(harness, 1)
    assert cluster.num_tried > tried, "it is retried"
    cluster.refuse = {}
    run(harness, 2)
    assert_started(harness)
    assert cluster.warnings() == [reason]


def test_a_rejection_for_another_reason_is_reported_as_well() -> None:
    harness = Harness()
    for message in (QUOTA, SECURITY):
        harness.cluster.refuse = {"Pod": forbidden(message)}
        run(harness, 2)
    assert harness.cluster.warnings() == ["QuotaExceeded", "PodSecurity"]


@pytest.mark.parametrize("code", [0, 401, 404, 429, 500, 503])
def test_a_server_error_is_not_a_rejection(code: int) -> None:
    harness = Harness()
    harness.cluster.refuse = {"Pod": ApiError(code, "later", server_message="later")}
    with pytest.raises(ApiError, match="later"):
        run(harness, 1)
    assert harness.cluster.condition("Admitted")[0] == "True"
    assert harness.cluster.warnings() == []


@pytest.mark.parametrize("kind", ["Pod", "Secret", "ConfigMap"])
@synchronous
async def test_a_refused_request_is_not_retried_before_its_backoff_has_passed(kind: str) -> None:
    harness = Harness()
    harness.cluster.refuse = {kind: forbidden(QUOTA)}
    await harness.reconcile()
    tried = harness.cluster.num_tried
    requeue_after = await harness.reconciler.reconcile(KEY)
    assert harness.cluster.num_tried == tried
    assert requeue_after is not None
    assert 0 < requeue_after <= 60


def test_a_running_job_whose_replacement_pod_is_refused_keeps_training_and_reports_it() -> None:
    harness = Harness()

    def lose_pod() -> None:
        run_pods(harness.cache, 4)
        harness.delete("Pod", "job-3")
        harness.cluster.refuse = {"Pod": forbidden(QUOTA)}

    run(harness, 1, lose_pod, 2)
    assert harness.cluster.condition("Admitted")[0] == "True"
    assert harness.cluster.condition("Healthy")[:2] == ("False", "QuotaExceeded")
    harness.cluster.refuse = {}
    run(harness, 2)
    assert_started(harness, num_restarts=1)


def test_after_a_rejection_the_pods_of_later_batches_are_not_tried() -> None:
    harness = Harness()
    manifest = make_job()
    manifest["spec"]["nodes"] = {"min": 1, "max": 200}
    harness.set_job(manifest, version="2")
    harness.cluster.refuse = {"Pod": forbidden(QUOTA)}
    run(harness, 1)
    assert harness.cluster.num_tried < 30
    assert harness.cluster.status["nodes"]["desired"] == 0
    harness.cluster.refuse = {}
    run(harness, 4)
    assert len(harness.cluster.own("Pod")) == 201
    assert harness.cluster.status["restarts"]["pod"] == 0


def test_the_disruption_budget_that_an_older_operator_left_to_a_finished_job_is_deleted() -> None:
    harness = Harness()
    budget = ("PodDisruptionBudget", "job-nodes")

    def finish() -> None:
        ended = {"type": "Complete", "status": "True", "reason": "Succeeded", "message": ""}
        ended["lastTransitionTime"] = NOW
        harness.set_job(make_job(**{**harness.cluster.status, "conditions": [ended]}))

    run(harness, 1, finish)
    assert budget in harness.cluster.objects
    run(harness, 2)
    assert budget not in harness.cluster.objects
    assert harness.cluster.own("ConfigMap") == [REVISION], "nothing else is deleted"
