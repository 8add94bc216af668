"""Only what a job controls is its own: others' objects are told of, waited for, and never touched."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.controller.test_reconcile import make_job, run_pods

from fluxtrain_operator import names
from fluxtrain_operator.controller.api_client import Applied
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.reconcile import Reconciler
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.changes import Delete
from fluxtrain_operator.planner.owners import controller, is_of
from fluxtrain_operator.planner.plan import Event
from fluxtrain_operator.progress import Progress

KEY = ("ns", "job")
STRANGER = {"kind": "Deployment", "name": "shop", "uid": "shop", "controller": True}
BEFORE = {"kind": "FluxTraining", "name": "job", "uid": "uid-before", "controller": True}
OTHER_JOB = {"kind": "FluxTraining", "name": "1", "uid": "uid-1", "controller": True}
QUOTA = 'pods "job-0" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2'
SECURITY = 'pods "job-0" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes'
WEBHOOK = 'admission webhook "no.example.com" denied the request: not on a Sunday'


class Keeper:
    """An API server that keeps objects by name, each with a uid, and refuses what it is told to."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.refuse: dict[str, ApiError] = {}
        """By kind."""
        self.events: list[Event] = []
        self.status: Manifest = {}
        self.num_tried = 0
        self._numbers = count(1000)

    def put(self, kind: str, name: str, owner: Manifest | None = None, **metadata: Any) -> Manifest:
        """Let an object be there that somebody else made."""
        owners = [owner] if owner else []
        found = {"name": name, "namespace": "ns", "ownerReferences": owners, **metadata}
        made = {"kind": kind, "metadata": {"uid": f"of-{kind}-{name}", **found}, "data": "theirs"}
        self.objects[kind, name] = made
        return made

    async def create(self, manifest: Manifest) -> Manifest | None:
        await asyncio.sleep(0)
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self.num_tried += 1
        if kind in self.refuse:
            raise self.refuse[kind]
        if (kind, name) in self.objects:
            return None
        made = copy.deepcopy(manifest)
        number = str(next(self._numbers))
        made["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": number}
        self.objects[kind, name] = made
        return made

    async def find(self, manifest: Manifest) -> Manifest | None:
        return self.objects.get((manifest["kind"], manifest["metadata"]["name"]))

    async def apply(self, manifest: Manifest, uid: str) -> Manifest | None:
        found = await self.find(manifest)
        if found is None or found["metadata"]["uid"] != uid:
            return None
        found |= copy.deepcopy({k: v for k, v in manifest.items() if k != "metadata"})
        found["metadata"] |= copy.deepcopy(manifest["metadata"])
        return found

    async def delete(self, namespace: str, what: Delete, version: str) -> Manifest | None:
        assert what.uid, "never by name alone"
        found = self.objects.get((what.kind, what.name))
        if found is not None and found["metadata"]["uid"] == what.uid:
            del self.objects[what.kind, what.name]
        return None

    async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
        self.status = status
        metadata = {**manifest["metadata"], "resourceVersion": str(next(self._numbers))}
        return {**manifest, "metadata": metadata, "status": status}

    async def applied(self, job: Job, kinds: Mapping[str, str]) -> dict[tuple[str, str], Applied]:
        own = {at: m for at, m in self.objects.items() if at[0] in kinds and is_of(m, job.uid)}
        return {at: Applied.of(manifest) for at, manifest in own.items()}

    async def pods(self, job: Job) -> tuple[set[str], int]:
        found = (m["metadata"]["uid"] for (kind, _), m in self.objects.items() if kind == "Pod")
        return set(found), next(self._numbers)

    async def serves(self, version: str) -> bool:
        return False

    async def post_event(self, job: Job, event: Event, now: float) -> None:
        self.events.append(event)

    async def progress(self, address: str, port: int) -> Progress | None:
        return None

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition."""
        (found,) = (c for c in self.status["conditions"] if c["type"] == kind)
        return found["status"], found["reason"], found.get("message", "")

    def warnings(self) -> list[str]:
        return [event.reason for event in self.events if event.type == "Warning"]

    def own(self, kind: str, uid: str = "uid-job") -> list[str]:
        return sorted(n for (k, n), m in self.objects.items() if k == kind and is_of(m, uid))


class Scene:
    """One job, its reconciler, and the cluster."""

    def __init__(self, **changes: Any) -> None:
        self.cluster = Keeper()
        self.reconciler = Reconciler(
            Cache(),
            self.cluster,
            Metrics(CollectorRegistry()),
            "trainer:1",  # type: ignore[arg-type]
        )
        self.store = self.reconciler.store
        self.store.set_job({**make_job(), **changes})

    def hear(self) -> None:
        """Let the watch tell of all pods that carry the job's label."""
        for (kind, _), found in self.cluster.objects.items():
            if kind == "Pod":
                self.store.set_pod(found)

    def forget(self, kind: str, name: str) -> None:
        """Let an object go, and the watch tell of it."""
        gone = self.cluster.objects.pop((kind, name))
        if kind == "Pod":
            self.store.set_pod(gone, gone=True)

    async def look(self, times: int = 1) -> None:
        """Reconcile with all retries due, and once more to tell of what came of them."""
        for _ in range(times):
            memory = self.reconciler._memories.get(KEY)
            for name, obstacle in dict(memory.obstacles if memory else {}).items():
                assert memory is not None
                memory.obstacles[name] = replace(obstacle, due=0.0)
            await self.reconciler.reconcile(KEY)
            await self.reconciler.reconcile(KEY)


def run(scene: Scene, *steps: Any) -> None:
    """Carry out ``steps``: callables, or a number of looks."""

    async def main() -> None:
        async with asyncio.timeout(20):
            for step in steps:
                if isinstance(step, int):
                    await scene.look(step)
                else:
                    step()
        await scene.reconciler.answers.close()

    asyncio.run(main())


ALL_PODS = ["job-0", "job-1", "job-2", "job-3", "job-rendezvous"]
SUPPORT = [
    ("ConfigMap", "job-config"),
    ("Service", "job"),
    ("NetworkPolicy", "job-network"),
    ("PodDisruptionBudget", "job-nodes"),
]


@pytest.mark.parametrize(("kind", "name"), SUPPORT)
@pytest.mark.parametrize("owner", [None, STRANGER, OTHER_JOB])
def test_a_strangers_object_is_told_of_and_left_alone_and_the_job_goes_on_without_it(
    kind: str, name: str, owner: Manifest | None
) -> None:
    scene = Scene()
    theirs = copy.deepcopy(scene.cluster.put(kind, name, owner))
    run(scene, 4)
    cluster = scene.cluster
    assert cluster.objects[kind, name] == theirs
    assert cluster.own("Pod") == [], "no pod starts meanwhile"
    for about in ("Ready", "Admitted"):
        status, reason, message = cluster.condition(about)
        assert (status, reason) == ("False", "NameConflict")
        whose = f"{owner['kind']} {owner['name']}" if owner else "nobody"
        assert f"{kind} {name} is in the way, and belongs to {whose}" in message
        assert "delete or rename it, or give the job another name" in message
    assert cluster.warnings() == ["NameConflict"], "once, not with every retry"
    assert "startTime" not in cluster.status

    scene = Scene()
    scene.cluster.put(kind, name, owner)
    run(scene, 2, lambda: scene.forget(kind, name), 2)
    assert scene.cluster.own("Pod") == ALL_PODS
    assert scene.cluster.condition("Admitted")[0] == "True"
    assert scene.cluster.status["nodes"]["desired"] == 4
    assert scene.cluster.status["restarts"]["pod"] == 0, "a first pod is no replacement"


def test_an_object_that_a_stranger_put_in_the_place_of_ours_is_not_written_over() -> None:
    scene = Scene()

    def replace_config() -> None:
        scene.cluster.put("ConfigMap", "job-config", STRANGER)
        changed = make_job()
        changed["spec"]["run"] = {"preset": "micro", "schedule": {"steps": 7}}
        changed["metadata"] |= {"resourceVersion": "5000", "generation": 2}
        changed["status"] = scene.cluster.status
        scene.store.set_job(changed)

    async def main() -> None:
        await scene.look()
        replace_config()
        with pytest.raises(ApiError, match="job-config went, or is another"):
            await scene.look()
        await scene.look()

    asyncio.run(main())
    assert scene.cluster.objects["ConfigMap", "job-config"]["data"] == "theirs"
    assert "NameConflict" in scene.cluster.warnings()


def test_only_the_jobs_own_objects_are_deleted_with_what_it_no_longer_wants() -> None:
    scene = Scene()
    budget = ("PodDisruptionBudget", "job-nodes")

    def fix_size() -> None:
        fixed = make_job(**scene.cluster.status)
        fixed["spec"]["nodes"] = {"min": 4, "max": 4}
        fixed["metadata"]["resourceVersion"] = "5000"
        scene.store.set_job(fixed)
        scene.cluster.put(*budget, STRANGER)

    run(scene, 1, fix_size, 1)
    assert controller(scene.cluster.objects[budget]) == STRANGER


PAST = {
    "of an earlier job": {"owner": BEFORE},
    "on its way out": {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    "orphaned": {},
    "a stranger's": {"owner": STRANGER},
}


@pytest.mark.parametrize("whose", PAST)
@pytest.mark.parametrize("attempt", ["1", "999999"])
def test_pods_that_are_not_the_jobs_count_for_nothing(whose: str, attempt: str) -> None:
    """They have its labels and names, and ended well: not this job, which has made no step."""
    scene = Scene()
    labels = {
        names.LABEL_JOB: "job",
        names.LABEL_ATTEMPT: attempt,
        names.LABEL_COMPONENT: names.TRAINER,
    }
    last_words = '{"rank": 0, "step": 99, "samples": 99, "lastStepTime": 1700000000}'
    ended = {"exitCode": 0, "message": last_words}
    status = {
        "phase": "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}],
    }
    for index in range(4):
        notes = {names.ANNOTATION_REPLACEMENT: "7"}
        name = f"job-{index}"
        found = scene.cluster.put("Pod", name, labels=labels, annotations=notes, **PAST[whose])
        found["status"] = status
    run(scene, scene.hear, 2)
    cluster = scene.cluster
    assert cluster.status["phase"] == "Pending"
    assert "progress" not in cluster.status
    assert cluster.status["restarts"]["pod"] == 0
    assert cluster.status["attempt"] == 1
    assert cluster.own("Pod") == [], "none begins before all can"
    leaving = whose in ("of an earlier job", "on its way out")
    reason = "PredecessorLeaving" if leaving else "NameConflict"
    assert cluster.condition("Ready")[:2] == ("False", reason)
    assert cluster.warnings() == ([] if leaving else ["NameConflict"])

    def let_go() -> None:
        for index in range(4):
            scene.forget("Pod", f"job-{index}")

    run(scene, let_go, 2)
    assert cluster.own("Pod") == ALL_PODS
    assert cluster.status["attempt"] == 1
    assert cluster.status["restarts"]["pod"] == 0


def test_a_pod_with_the_jobs_label_and_a_name_that_it_does_not_need_is_not_in_the_way() -> None:
    scene = Scene()
    labels = {names.LABEL_JOB: "job", names.LABEL_ATTEMPT: "999999"}
    scene.cluster.put("Pod", "somebody", labels={**labels, names.LABEL_COMPONENT: "trainer"})
    run(scene, scene.hear, 2)
    assert scene.cluster.own("Pod") == ALL_PODS
    assert scene.cluster.warnings() == []


def test_a_pod_without_our_label_is_found_by_its_name_and_the_others_go_on() -> None:
    scene = Scene()
    theirs = copy.deepcopy(scene.cluster.put("Pod", "job-2", STRANGER, labels={"app": "shop"}))
    run(scene, 3)
    assert scene.cluster.objects["Pod", "job-2"] == theirs
    assert scene.cluster.own("Pod") == ["job-0", "job-1", "job-3", "job-rendezvous"]
    assert scene.cluster.condition("Healthy")[:2] == ("False", "NameConflict")
    run(scene, lambda: scene.forget("Pod", "job-2"), 2)
    assert scene.cluster.own("Pod") == ALL_PODS


@pytest.mark.parametrize(
    ("kind", "code", "said", "reason"),
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
    ],
)
def test_what_the_server_refuses_is_told_once_and_tried_until_it_is_taken(
    kind: str, code: int, said: str, reason: str
) -> None:
    scene = Scene()
    scene.cluster.refuse = {kind: ApiError(code, f"POST /x: {said}", "Forbidden", said)}
    run(scene, 3)
    cluster = scene.cluster
    for about in ("Ready", "Admitted", "Healthy"):
        status, why, message = cluster.condition(about)
        assert (status, why) == ("False", reason)
        assert said in message
    assert cluster.warnings() == [reason]
    assert cluster.own("Pod") == []
    tried = cluster.num_tried
    run(scene, 1)
    assert cluster.num_tried > tried, "it is tried again"
    cluster.refuse = {}
    run(scene, 2)
    assert cluster.own("Pod") == ALL_PODS
    assert cluster.condition("Admitted")[0] == "True"
    assert cluster.status["restarts"]["pod"] == 0
    assert cluster.warnings() == [reason]


def test_another_reason_is_told_of_as_well() -> None:
    scene = Scene()
    for said in (QUOTA, SECURITY):
        scene.cluster.refuse = {"Pod": ApiError(403, said, "Forbidden", said)}
        run(scene, 2)
    assert scene.cluster.warnings() == ["QuotaExceeded", "PodSecurity"]


@pytest.mark.parametrize("code", [0, 401, 404, 429, 500, 503])
def test_a_server_that_cannot_answer_refuses_nothing(code: int) -> None:
    scene = Scene()
    scene.cluster.refuse = {"Pod": ApiError(code, "later", said="later")}
    with pytest.raises(ApiError, match="later"):
        run(scene, 1)
    assert scene.cluster.condition("Admitted")[0] == "True"
    assert scene.cluster.warnings() == []


def test_what_was_refused_lies_still_until_it_is_due() -> None:
    scene = Scene()
    scene.cluster.refuse = {"Pod": ApiError(403, QUOTA, "Forbidden", QUOTA)}

    async def main() -> float | None:
        await scene.look()
        tried = scene.cluster.num_tried
        again = await scene.reconciler.reconcile(KEY)
        assert scene.cluster.num_tried == tried
        return again

    again = asyncio.run(main())
    assert again is not None
    assert 0 < again <= 60


def test_a_running_job_whose_replacement_is_refused_trains_on_and_says_so() -> None:
    scene = Scene()

    def lose_one() -> None:
        run_pods(scene.store, 4)
        lost = scene.store.pods(KEY)
        gone = next(p for p in lost if p["metadata"]["name"] == "job-3")
        scene.store.set_pod(gone, gone=True)
        del scene.cluster.objects["Pod", "job-3"]
        scene.cluster.refuse = {"Pod": ApiError(403, QUOTA, "Forbidden", QUOTA)}

    run(scene, 1, lose_one, 2)
    assert scene.cluster.condition("Admitted")[0] == "True"
    assert scene.cluster.condition("Healthy")[:2] == ("False", "QuotaExceeded")
    scene.cluster.refuse = {}
    run(scene, 2)
    assert scene.cluster.own("Pod") == ALL_PODS
    assert scene.cluster.status["restarts"]["pod"] == 1


def test_where_the_first_pods_of_many_are_refused_the_others_are_not_tried() -> None:
    scene = Scene()
    many = make_job()
    many["spec"]["nodes"] = {"min": 1, "max": 200}
    many["metadata"]["resourceVersion"] = "2"
    scene.store.set_job(many)
    scene.cluster.refuse = {"Pod": ApiError(403, QUOTA, "Forbidden", QUOTA)}
    run(scene, 1)
    assert scene.cluster.num_tried < 30
    assert scene.cluster.status["nodes"]["desired"] == 0
    scene.cluster.refuse = {}
    run(scene, 4)
    assert len(scene.cluster.own("Pod")) == 201
    assert scene.cluster.status["restarts"]["pod"] == 0
