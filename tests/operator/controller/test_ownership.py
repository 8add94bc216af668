"""Other owners' objects, and other jobs: a job controls only its own.

Others' objects are reported, waited for, and never changed. ``startAfter``: a predecessor that was seen
complete may be removed, and is not removed unseen.
"""

from __future__ import annotations

import copy
import time
from itertools import count
from typing import Any

import pytest
from tests.operator.controller.event_loop import synchronous
from tests.operator.jobs import KEY, NOW, make_job, run_pods
from tests.operator.object_store import Harness, run

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import stamp
from fluxtrain_operator.controller.executor import NEVER
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
    for condition in ("Ready", "Training", "Admitted"):
        status, reason, message = cluster.condition(condition)
        assert (status, reason) == ("False", "NameConflict")
        state = f"belongs to {owner['kind']} {owner['name']}" if owner else "has no owner"
        assert f"{kind} {name} already exists and {state}" in message
        assert "give the job another name" in message
        assert ("kubectl delete" in message) == (owner is None), "others may need what they own"
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


class Restored(Harness):
    """A job that a backup brought back into an empty cluster, with its objects but without owners."""

    def __init__(self, **forged: Manifest) -> None:
        first = Harness()
        run(first, 2)
        super().__init__()
        again = make_job()
        again["metadata"]["uid"] = "uid-again"
        self.set_job(again, version="2")
        self.writes: list[tuple[str, list[str]]] = []
        for (kind, name), manifest in first.cluster.objects.items():
            if kind != "Secret":
                metadata = {**manifest["metadata"], "ownerReferences": []}
                content = {**manifest, "metadata": metadata, **forged.get(kind, {})}
                self.cluster.objects[kind, name] = content
        self._apply = self.cluster.apply
        self.cluster.apply = self.apply  # type: ignore[method-assign]

    async def apply(self, manifest: Manifest, uid: str) -> Manifest | None:
        self.writes.append((manifest["kind"], sorted(manifest["metadata"])))
        return await self._apply(manifest, uid)

    def delete_pods(self) -> None:
        """Report what was deleted, as a watch would."""
        for pod in self.cache.foreign_pods(KEY):
            if ("Pod", pod["metadata"]["name"]) not in self.cluster.objects:
                self.cache.set_pod(pod, deleted=True)


def test_a_restored_job_gets_its_objects_by_their_controller_first_and_the_revision_last() -> None:
    harness = Restored()
    revision = harness.cluster.objects["ConfigMap", REVISION]["metadata"]["uid"]
    run(harness, harness.sync, 3, harness.delete_pods, 2)
    owned = [kind for kind, keys in harness.writes if "annotations" not in keys]
    assert sorted(owned) == sorted(kind for kind, _ in SUPPORT)
    first = [kind for kind, _ in harness.writes[: 2 * len(owned)]]
    assert first == [kind for kind in owned for _ in range(2)]
    assert owned[-1] == "ConfigMap"
    assert harness.writes[0][1] == ["name", "namespace", "ownerReferences", "resourceVersion"]
    assert harness.cluster.objects["ConfigMap", REVISION]["metadata"]["uid"] == revision
    assert harness.cluster.own("Pod", "uid-again") == ALL_PODS
    assert "NameConflict" not in harness.cluster.warnings()


@pytest.mark.parametrize(
    ("kind", "forged"),
    [("ConfigMap", {"data": {"config.json": "{}"}}), ("ConfigMap", {"immutable": False})],
)
def test_without_the_content_of_the_revision_nothing_is_adopted_or_deleted(
    kind: str, forged: Manifest
) -> None:
    harness = Restored(**{kind: forged})
    before = copy.deepcopy(harness.cluster.objects)
    run(harness, harness.sync, 4)
    left = {key: found for key, found in harness.cluster.objects.items() if key in before}
    assert left == before
    assert harness.writes == []
    message = harness.cluster.condition("Training")[2]
    for name in (f"configmap/{REVISION}", "service/job", "networkpolicy/job-network"):
        assert name in message
    assert harness.cluster.warnings() == ["NameConflict"]


def test_a_restored_object_that_has_changed_meanwhile_is_looked_at_again() -> None:
    harness = Restored()

    async def apply(manifest: Manifest, uid: str) -> Manifest | None:
        harness.cluster.apply = harness.apply  # type: ignore[method-assign]
        return None  # the version in the request is not the newest

    harness.cluster.apply = apply  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="was deleted or replaced"):
        run(harness, harness.sync, 1)
    run(harness, 3, harness.delete_pods, 2)
    assert harness.cluster.own("Pod", "uid-again") == ALL_PODS


def test_an_earlier_revision_that_the_restored_status_names_is_not_adopted() -> None:
    """Its name proves its content only to those who cannot choose both."""
    harness, earlier = Restored(), Harness(image="trainer:0")
    run(earlier, 2)
    status = earlier.cluster.status
    name = status["revision"]
    stored = earlier.cluster.objects["ConfigMap", name]
    metadata = {**stored["metadata"], "ownerReferences": []}
    harness.cluster.objects["ConfigMap", name] = {**stored, "metadata": metadata}
    again = make_job(revision=name, attempt=status["attempt"])
    again["metadata"]["uid"] = "uid-again"
    harness.set_job(again, version="3")
    run(harness, harness.sync, 3, harness.delete_pods, 2)
    assert name != REVISION
    assert harness.cluster.objects["ConfigMap", name]["metadata"]["ownerReferences"] == []
    assert harness.cluster.status["revision"] == REVISION
    assert harness.cluster.own("Pod", "uid-again") == ALL_PODS
    pod = harness.cluster.objects["Pod", "job-0"]
    assert pod["metadata"]["annotations"][names.ANNOTATION_REVISION] == REVISION


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
    assert cluster.condition("Training")[:2] == ("False", reason)
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
    assert harness.cluster.condition("Training")[:2] == ("False", reason)
    is_told = (
        f"Pod job-0 is deleted, and kept by {finalizer}" == harness.cluster.condition("Training")[2]
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


@pytest.mark.parametrize("owner", [None, FOREIGN, EARLIER_JOB])
@pytest.mark.parametrize("labels", [{"app": "shop"}, {names.LABEL_JOB: "job"}])
def test_no_training_pod_is_created_while_a_foreign_pod_has_the_name_of_the_rendezvous_pod(
    owner: Manifest | None, labels: dict[str, str]
) -> None:
    harness = Harness()
    harness.cluster.put("Pod", "job-rendezvous", owner, labels=labels)
    harness.sync()
    for _ in range(5):
        run(harness, 1)
        assert harness.cluster.own("Pod") == []
    reason = "PredecessorTerminating" if owner == EARLIER_JOB else "NameConflict"
    assert harness.cluster.condition("Admitted")[:2] == ("False", reason)
    run(harness, lambda: harness.delete("Pod", "job-rendezvous"), 2)
    assert_started(harness)


def test_no_pod_is_replaced_while_a_foreign_pod_has_the_name_of_the_rendezvous_pod() -> None:
    harness = Harness()
    run(harness, 2)
    assert harness.cluster.own("Pod") == ALL_PODS
    for name in ("job-rendezvous", "job-1"):
        harness.delete("Pod", name)
    harness.cluster.put("Pod", "job-rendezvous", FOREIGN, labels={"app": "shop"})
    run(harness, 3)
    assert harness.cluster.own("Pod") == ["job-0", "job-2", "job-3"]
    run(harness, lambda: harness.delete("Pod", "job-rendezvous"), 2)
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
    for condition in ("Ready", "Training", "Admitted", "Healthy"):
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


def test_the_disruption_budget_of_a_finished_job_is_deleted() -> None:
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


FIRST = ("ns", "first")


def first(phase: str = "", ttl: int | None = None, ended: float | None = None) -> Manifest:
    """Return the predecessor, which has ``ended`` at a Unix time; by default long ago."""
    conditions = []
    if phase in ("Complete", "Failed"):
        time_of_end = stamp(time.time() - 10**6 if ended is None else ended)
        end = {"type": phase, "status": "True", "reason": "Ended"}
        conditions = [{**end, "lastTransitionTime": time_of_end}]
    job = make_job("first", **({"phase": phase, "conditions": conditions} if phase else {}))
    job["spec"] |= {} if ttl is None else {"lifecycle": {"ttlSecondsAfterFinished": ttl}}
    return job


class Waiting(Harness):
    """A job that starts after others."""

    def __init__(self, start_after: tuple[str, ...] = ("first",), **lifecycle: Any) -> None:
        super().__init__()
        self.versions = count()
        job = make_job()
        job["spec"]["lifecycle"] = {"startAfter": list(start_after), **lifecycle}
        self.cache.set_job(job)

    async def reconcile(self, times: int = 1) -> None:
        """Reconcile; the status is written at once."""
        if (state := self.reconciler._states.get(KEY)) is not None:
            state.written = NEVER
        await super().reconcile(times)

    def put_first(self, manifest: Manifest | None) -> None:
        """Create or change the predecessor, as a watch reports it; None removes it."""
        if manifest is None:
            self.cache.set_job(self.cache.job(FIRST) or first(), deleted=True)
            self.cluster.objects.pop(("FluxTraining", "first"), None)
            return
        manifest["metadata"]["resourceVersion"] = str(7000 + next(self.versions))
        self.cache.set_job(manifest)
        self.cluster.objects["FluxTraining", "first"] = manifest

    @property
    def status(self) -> Manifest:
        """Return the status of the job that waits."""
        job = self.cache.job(KEY)
        return dict(job["status"]) if job is not None else {}

    @property
    def admitted(self) -> tuple[str, str]:
        """Return reason and message of its condition Admitted."""
        (condition,) = (c for c in self.status["conditions"] if c["type"] == "Admitted")
        return condition["reason"], condition.get("message", "")

    @property
    def waits(self) -> str:
        """Return the message of a job that waits; empty if it does not."""
        reason, message = self.admitted
        return message if reason == "WaitingForJobs" else ""

    @property
    def exists(self) -> bool:
        """Return whether the predecessor exists."""
        return ("FluxTraining", "first") in self.cluster.objects

    async def reconcile_first(self) -> float | None:
        return await self.reconciler.reconcile(FIRST)


def after(name: str, *start_after: str) -> Manifest:
    job = make_job(name)
    job["spec"]["lifecycle"] = {"startAfter": list(start_after)}
    return job


@synchronous
async def test_jobs_that_wait_for_one_another_tell_it_until_one_of_them_does_not() -> None:
    harness = Waiting(("first", "other"))
    harness.put_first(after("first", "third"))
    harness.cache.set_job(after("third", "second", "job"))
    harness.cache.set_job(after("second", "first"))
    harness.cache.set_job(after("other"))
    await harness.reconcile(2)
    chain = "job starts after first starts after third starts after job: none of them can start"
    assert harness.admitted == ("CyclicDependency", f"spec.lifecycle.startAfter: {chain}")
    harness.put_first(first("Running"))
    await harness.reconcile()
    assert "first is Running" in harness.waits
    harness.put_first(after("first", "third"))
    await harness.reconcile()
    assert harness.admitted[0] == "CyclicDependency"
    harness.cache.set_job(after("third", "second"))
    await harness.reconcile()
    assert "first is new" in harness.waits, "it is not part of the cycle that it waits for"


@synchronous
async def test_a_predecessor_that_is_given_twice_counts_once() -> None:
    harness = Waiting(("first", "first"))
    harness.put_first(first("Running"))
    await harness.reconcile(2)
    assert harness.waits == "spec.lifecycle.startAfter: first is Running"
    harness.put_first(first("Complete"))
    await harness.reconcile(2)
    assert harness.admitted[0] == "Admitted"
    assert harness.status["completedPredecessors"] == ["first"]
    job = harness.cache.job(KEY)
    assert job is not None
    harness.cache.set_job(job, deleted=True)
    assert harness.cache.jobs_after(FIRST) == []


@synchronous
async def test_a_predecessor_that_never_existed_is_waited_for() -> None:
    harness = Waiting()
    await harness.reconcile(2)
    assert "first does not exist; create it, or take it out" in harness.waits
    assert harness.cluster.own("Pod") == []
    harness.put_first(first("Running"))
    await harness.reconcile()
    assert "first is Running" in harness.waits
    harness.put_first(None)
    await harness.reconcile()
    assert "first does not exist" in harness.waits, "it was removed before it completed"


@synchronous
async def test_a_predecessor_that_was_seen_complete_may_be_removed() -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete"))
    await harness.reconcile()
    assert harness.status["completedPredecessors"] == ["first"]
    harness.put_first(None)
    await harness.reconcile()
    assert harness.waits.count("does not exist") == 1
    assert "first" not in harness.waits
    harness.cache.set_job(make_job("second", phase="Complete"))
    await harness.reconcile()
    assert harness.cluster.own("Pod") == ["job-0", "job-1", "job-2", "job-3", "job-rendezvous"]
    assert harness.status["completedPredecessors"] == ["first", "second"]


@pytest.mark.parametrize("phase", ["", "Pending", "Running", "Failed"])
@synchronous
async def test_a_predecessor_that_is_created_again_must_complete_again(phase: str) -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete"))
    await harness.reconcile()
    harness.put_first(None)
    await harness.reconcile()
    harness.put_first(first(phase))
    await harness.reconcile()
    assert harness.status.get("completedPredecessors", []) == []
    assert f"first is {phase or 'new'}" in harness.admitted[1]
    harness.put_first(None)
    await harness.reconcile()
    assert "first does not exist" in harness.waits
    harness.put_first(first("Complete"))
    await harness.reconcile()
    assert harness.status["completedPredecessors"] == ["first"]


@synchronous
async def test_a_job_that_has_begun_waits_no_more() -> None:
    harness = Waiting()
    harness.put_first(first("Complete"))
    await harness.reconcile()
    for state in (first("Running"), None):
        harness.put_first(state)
        await harness.reconcile()
        assert harness.cluster.own("Pod") != []
        assert harness.status["completedPredecessors"] == ["first"]


@synchronous
async def test_a_suspended_job_sees_its_predecessor_complete_too() -> None:
    harness = Waiting(suspend=True)
    harness.put_first(first("Complete", ttl=0))
    await harness.reconcile()
    assert harness.status["completedPredecessors"] == ["first"]
    await harness.reconcile_first()
    assert not harness.exists


@synchronous
async def test_a_predecessor_is_removed_after_the_jobs_that_wait_have_seen_it() -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete", ttl=0))
    assert await harness.reconcile_first() == 5.0
    assert harness.exists, "it is not removed unseen"
    await harness.reconcile()
    await harness.reconcile_first()
    assert not harness.exists
    harness.put_first(None)
    await harness.reconcile()
    assert "second does not exist" in harness.waits
    assert "first" not in harness.waits


@pytest.mark.parametrize(
    ("start_when", "is_kept"), [("Ended", True), ("Complete", False), (None, False)]
)
@synchronous
async def test_a_failed_predecessor_is_kept_for_those_that_it_lets_start(
    start_when: str | None, is_kept: bool
) -> None:
    harness = Waiting(("first", "second"), **({"startWhen": start_when} if start_when else {}))
    harness.put_first(first("Failed", ttl=0))
    await harness.reconcile_first()
    assert harness.exists == is_kept
    await harness.reconcile()
    await harness.reconcile_first()
    assert not harness.exists
    assert harness.status.get("completedPredecessors", []) == (["first"] if is_kept else [])


def has_begun(job: Manifest) -> None:
    job["status"] = {"phase": "Running", "attempt": 1}


def is_finished(job: Manifest) -> None:
    condition = {"type": "Failed", "status": "True", "reason": "InvalidSpec"}
    job["status"] = {"conditions": [{**condition, "lastTransitionTime": stamp(0)}]}


def is_of_another_operator(job: Manifest) -> None:
    job["spec"]["managedBy"] = "example.com/other"


def is_being_deleted(job: Manifest) -> None:
    job["metadata"]["deletionTimestamp"] = stamp(0)


def waits_for_another(job: Manifest) -> None:
    job["spec"]["lifecycle"]["startAfter"] = ["second"]


@pytest.mark.parametrize(
    "change",
    [has_begun, is_finished, is_of_another_operator, is_being_deleted, waits_for_another],
)
@synchronous
async def test_other_jobs_do_not_keep_a_predecessor(change: Any) -> None:
    harness = Waiting()
    job = make_job()
    job["spec"]["lifecycle"] = {"startAfter": ["first"]}
    change(job)
    harness.set_job(job)
    harness.put_first(first("Complete", ttl=0))
    await harness.reconcile_first()
    assert not harness.exists


@synchronous
async def test_a_failed_predecessor_is_removed_in_time() -> None:
    harness = Waiting()
    harness.put_first(first("Failed", ttl=0))
    await harness.reconcile_first()
    assert not harness.exists


@synchronous
async def test_a_record_of_a_job_that_is_no_predecessor_any_more_is_dropped() -> None:
    harness = Waiting(("first", "second"))
    harness.put_first(first("Complete"))
    await harness.reconcile()
    job = make_job(**harness.status)
    job["spec"]["lifecycle"] = {"startAfter": ["second"]}
    harness.set_job(job)
    await harness.reconcile()
    assert harness.cluster.status.get("completedPredecessors", []) == []
