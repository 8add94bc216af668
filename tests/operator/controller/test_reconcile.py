"""Reconciles against an API server that agrees: what is sent, in which order, how often; what is kept."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fluxtrain.contract.resource.status import Condition, NodesStatus, ProgressStatus, Status
from fluxtrain_operator import names
from fluxtrain_operator.controller.api_client import Applied
from fluxtrain_operator.controller.cache import Cache, Support
from fluxtrain_operator.controller.reconcile import Memory, Reconciler, can_wait
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.job import Job, Manifest
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.changes import Delete
from fluxtrain_operator.planner.plan import Event, Plan
from fluxtrain_operator.progress import Progress
from fluxtrain_operator.timestamps import stamp

NOW = stamp(time.time())
"""Pods that began long ago and told nothing since would be taken for stuck."""


class Agreeing:
    """A cluster that does what it is told, and remembers the requests by their begin and end."""

    def __init__(self, refuse: Iterable[str] = (), code: int = 503) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.made: dict[str, Manifest] = {}
        self._refuse, self._code, self._versions = set(refuse), code, count(100)

    async def _do(self, verb: str, kind: str, name: str) -> None:
        self.told.append(("begin", verb, f"{kind}/{name}"))
        await asyncio.sleep(0)
        if name in self._refuse:
            raise ApiError(self._code, f"{name} is refused", said=f"{name} is refused")
        await asyncio.sleep(0.01)
        self.told.append(("end", verb, f"{kind}/{name}"))

    def requests(self, verb: str) -> list[str]:
        return [what for when, done, what in self.told if done == verb and when == "begin"]

    async def create(self, manifest: Manifest) -> Manifest:
        await self._do("create", manifest["kind"], manifest["metadata"]["name"])
        made = self.made[manifest["metadata"]["name"]] = copy.deepcopy(manifest)
        version = str(next(self._versions))
        made["metadata"].update(uid=f"uid-{version}", resourceVersion=version)
        return made

    async def find(self, manifest: Manifest) -> Manifest | None:
        raise AssertionError("nothing is in the way")

    async def apply(self, manifest: Manifest, uid: str) -> Manifest:
        await self._do("apply", manifest["kind"], manifest["metadata"]["name"])
        return manifest

    async def delete(self, namespace: str, what: Delete, version: str) -> None:
        await self._do("delete", what.kind, what.name)

    async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
        await self._do("status", manifest["kind"], manifest["metadata"]["name"])
        metadata = {**manifest["metadata"], "resourceVersion": str(next(self._versions))}
        return {**manifest, "metadata": metadata, "status": status}

    async def applied(self, job: Job, kinds: Mapping[str, str]) -> dict[tuple[str, str], Applied]:
        await self._do("list", "all", job.name)
        return {}

    async def serves(self, version: str) -> bool:
        return False

    async def post_event(self, job: Job, event: Event, now: float) -> None:
        await self._do("tell", event.reason, job.name)

    async def progress(self, address: str, port: int) -> Progress | None:
        await asyncio.sleep(100)
        raise AssertionError("nobody waits for an answer")


def make_job(name: str = "job", **status: Any) -> Manifest:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {
        "apiVersion": "fluxtrain.dev/v1alpha1",
        "kind": "FluxTraining",
        "metadata": {**metadata, "generation": 1, "creationTimestamp": NOW},
        "spec": {"run": {"preset": "micro"}, "nodes": {"min": 1, "max": 4}},
        "status": status,
    }


def make_reconciler(cluster: Any, *jobs: Manifest) -> Reconciler:
    store = Cache()
    for job in jobs:
        store.set_job(job)
    return Reconciler(store, cluster, Metrics(CollectorRegistry()), "trainer:1")


def reconcile(cluster: Any, *jobs: Manifest) -> Reconciler:
    """Reconcile each of ``jobs`` once."""

    async def main() -> Reconciler:
        reconciler = make_reconciler(cluster, *jobs)
        async with asyncio.timeout(20):
            for job in jobs:
                await reconciler.reconcile(("ns", job["metadata"]["name"]))
        await reconciler.answers.close()
        return reconciler

    return asyncio.run(main())


def run_pods(store: Cache, num_running: int) -> None:
    """Let the first training pods of the job run."""
    for index, pod in enumerate(
        sorted(store.pods(("ns", "job")), key=lambda p: p["metadata"]["name"])
    ):
        if (
            index < num_running
            and pod["metadata"]["labels"][names.LABEL_COMPONENT] == names.TRAINER
        ):
            state = {"running": {"startedAt": NOW}}
            status = {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "trainer", "state": state}],
            }
            store.set_pod({**pod, "status": status})


def test_what_pods_mount_is_there_before_them_and_the_status_before_all() -> None:
    cluster = Agreeing()
    reconcile(cluster, make_job())
    order = [verb if "Pod/" not in what else "pod" for _, verb, what in cluster.told]
    parts = ["status", "create", "pod", "tell"]
    assert sorted(order, key=parts.index) == order
    assert order.count("pod") == 2 * 5


def test_requests_of_one_kind_are_sent_side_by_side() -> None:
    cluster = Agreeing()
    reconcile(cluster, make_job())
    pods = [when for when, _, what in cluster.told if what.startswith("Pod/")]
    assert pods == ["begin"] * 5 + ["end"] * 5


def test_pods_with_gpus_are_made_with_the_operators_groups() -> None:
    cluster, manifest = Agreeing(), make_job()
    manifest["spec"]["gpusPerNode"] = 2

    async def main() -> None:
        reconciler = make_reconciler(cluster, manifest)
        reconciler.device_groups = (44, 109)
        await reconciler.reconcile(("ns", "job"))
        await reconciler.answers.close()

    asyncio.run(main())
    groups = {
        name: made["spec"]["securityContext"].get("supplementalGroups")
        for name, made in cluster.made.items()
        if made["kind"] == "Pod"
    }
    assert groups == {f"job-{i}": [44, 109] for i in range(4)} | {"job-rendezvous": None}


def test_a_pod_that_the_server_cannot_make_fails_the_reconcile_after_the_others_are_done() -> None:
    cluster = Agreeing(refuse=["job-1"])
    with pytest.raises(ApiError, match="job-1 is refused"):
        reconcile(cluster, make_job())
    ended = [what for when, _, what in cluster.told if "Pod/" in what and when == "end"]
    assert sorted(ended) == ["Pod/job-0", "Pod/job-2", "Pod/job-3", "Pod/job-rendezvous"]


@pytest.mark.parametrize(("status", "num_lists"), [({}, 0), ({"phase": "Pending"}, 1)])
def test_only_for_a_job_that_is_not_new_is_looked_what_there_is(
    status: dict[str, Any], num_lists: int
) -> None:
    cluster = Agreeing()
    reconcile(cluster, make_job(**status))
    assert len(cluster.requests("list")) == num_lists


def test_a_job_that_went_while_there_was_no_watch_is_forgotten() -> None:
    class Gone(Agreeing):
        async def write_status(self, manifest: Mapping[str, Any], status: Manifest) -> Manifest:
            raise ApiError(404, "not found")

    async def main() -> None:
        cluster = Gone()
        reconciler = make_reconciler(cluster, make_job())
        with pytest.raises(ApiError, match="not found"):
            await reconciler.reconcile(("ns", "job"))
        assert await reconciler.reconcile(("ns", "job")) is None
        assert cluster.told == [], "nothing is made for it"

    asyncio.run(main())


def uids_of(reconciler: Reconciler) -> set[str]:
    return {pod["metadata"]["uid"] for pod in reconciler.store.pods(("ns", "job"))}


def listed(reconciler: Reconciler) -> Support:
    """Return what a list of all that is around pods finds of the job, as it was applied."""
    found = Support(at=time.monotonic())
    owner = {"controller": True, "uid": "uid-job"}
    labels = {names.LABEL_JOB: "job"}
    for (kind, name), applied in reconciler._memories["ns", "job"].applied.items():
        notes = {names.ANNOTATION_APPLIED: applied.hashed}
        common = {"labels": labels, "annotations": notes, "ownerReferences": [owner]}
        metadata = {"name": name, "namespace": "ns", "uid": applied.uid, **common}
        found.add(kind, {"metadata": metadata})
    return found


def test_what_was_listed_for_all_jobs_together_is_not_listed_for_each() -> None:
    cluster = Agreeing()

    async def main() -> None:
        reconciler = make_reconciler(cluster, make_job())
        await reconciler.reconcile(("ns", "job"))
        support = listed(reconciler)
        follower = make_reconciler(cluster, *[reconciler.store.job(("ns", "job"))])
        for pod in reconciler.store.pods(("ns", "job")):
            follower.store.set_pod(pod)
        follower.store.support = support
        cluster.told.clear()
        await follower.reconcile(("ns", "job"))
        for verb in ("list", "create", "apply"):
            assert cluster.requests(verb) == []
        left = support.of("ns", "uid-job")
        kind, name = next(iter(left))
        left.pop((kind, name))
        follower.store.support = Support(time.monotonic(), {("ns", "uid-job"): left})
        await follower.reconcile(("ns", "job"))
        assert cluster.requests("create") == [f"{kind}/{name}"], "what is missing is made anew"
        await reconciler.answers.close()
        await follower.answers.close()

    asyncio.run(main())


def test_a_pod_that_is_deleted_and_not_there_is_forgotten() -> None:
    async def main() -> None:
        reconciler = make_reconciler(Agreeing(), make_job())
        await reconciler.reconcile(("ns", "job"))
        suspended = make_job(phase="Pending", attempt=1)
        suspended["spec"]["lifecycle"] = {"suspend": True}
        suspended["metadata"]["resourceVersion"] = "1000"
        reconciler.store.set_job(suspended)
        for _ in range(3):
            await reconciler.reconcile(("ns", "job"))
        assert uids_of(reconciler) == set()
        await reconciler.answers.close()

    asyncio.run(main())


def test_a_reconcile_does_not_wait_for_trainers() -> None:
    cluster = Agreeing()

    async def main() -> None:
        reconciler = make_reconciler(cluster, make_job())
        async with asyncio.timeout(20):
            for num_running in (0, 2, 4):
                run_pods(reconciler.store, num_running)
                await reconciler.reconcile(("ns", "job"))
        assert len(reconciler.answers) == 1, "they are asked, though"
        await reconciler.answers.close()

    asyncio.run(main())


def test_pods_that_come_up_one_after_the_other_are_told_of_together() -> None:
    cluster = Agreeing()

    async def main() -> list[float | None]:
        reconciler = make_reconciler(cluster, make_job())
        waits = []
        for num_running in range(5):
            run_pods(reconciler.store, num_running)
            waits.append(await reconciler.reconcile(("ns", "job")))
        await reconciler.answers.close()
        return waits

    waits = asyncio.run(main())
    assert len(cluster.requests("status")) == 2, (
        "when it began, and with the first pod that is enough"
    )
    assert all(wait is not None and 0 < wait <= 3 for wait in waits[2:]), waits


def make_status(**changes: Any) -> Status:
    ready = Condition(
        type="Ready",
        status="False",
        reason="PodsPending",
        message="1 of 8",
        lastTransitionTime=NOW,
        observedGeneration=1,
    )
    values = {"phase": "Pending", "attempt": 1, "conditions": [ready]}
    return Status(**{**values, "nodes": NodesStatus(ready=1, desired=8), **changes})


def told(message: str, status: str = "False") -> list[Condition]:
    (ready,) = make_status().conditions
    return [ready.model_copy(update={"message": message, "status": status})]


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"nodes": NodesStatus(ready=2, desired=8)}, True),
        ({"conditions": told("2 of 8")}, True),
        ({"conditions": told("8 of 8", "True")}, False),
        ({"nodes": NodesStatus(ready=2, desired=4)}, False),
        ({"phase": "Starting"}, False),
        ({"attempt": 2}, False),
        ({"progress": ProgressStatus(step=1)}, False),
        ({"last_error": "gone"}, False),
        ({}, False),
    ],
)
def test_only_a_status_that_counts_pods_can_wait(changes: dict[str, Any], waits: bool) -> None:
    before = make_status()
    after = Plan(before.model_copy(update=changes))
    assert (can_wait(before, after, Memory("uid", written=0.0), now=1.0) == 2.0) is waits
    assert can_wait(before, after, Memory("uid", written=0.0), now=10.0) is None
    busy = Plan(after.status, delete=(Delete("Pod", "job-0"),))
    assert can_wait(before, busy, Memory("uid", written=0.0), now=1.0) is None


def test_nothing_is_remembered_of_jobs_that_are_gone() -> None:
    jobs = [make_job(f"job-{index}") for index in range(20)]

    async def main() -> Reconciler:
        reconciler = make_reconciler(Agreeing(), *jobs)
        for job in jobs:
            key = ("ns", job["metadata"]["name"])
            await reconciler.reconcile(key)
            reconciler.answers.follow(key, 1)
            for pod in reconciler.store.pods(key):
                reconciler.store.set_pod(pod, gone=True)
            reconciler.store.set_job(job, gone=True)
            assert await reconciler.reconcile(key) is None
        return reconciler

    reconciler = asyncio.run(main())
    for part in (reconciler, reconciler.store, reconciler.answers, reconciler.metrics):
        sized = {name: value for name, value in vars(part).items() if name.startswith("_")}
        left = {name: len(value) for name, value in sized.items() if hasattr(value, "__len__")}
        left.pop("_heard", None)  # when each watch last brought something: three entries at most
        assert left
        assert not any(left.values()), (part, left)
