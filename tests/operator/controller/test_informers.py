"""Informers: the cache has every pod and node after the sync, every change, and no deleted object.

Objects that cannot be read: one event per generation, bounded, and none for others. The CPU time of the
operator process grows linearly with the number of jobs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from benchmarks.operator import crowd
from benchmarks.operator.fake_api_server import FakeApiServer, serving
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry
from tests.operator.controller.event_loop import in_virtual_time, now, synchronous, until
from tests.operator.controller.operator_process import leader
from tests.operator.controller.operator_process import until as until_process
from tests.operator.jobs import KEY, make_node, make_pod, make_training

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.controller import informers, list_watch
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.informers import Informers, _PodHandler
from fluxtrain_operator.controller.list_watch import (
    MAX_KNOWN,
    PAGE,
    ListWatch,
    Reference,
    UnreadableObjects,
    list_and_watch,
)
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.plan import Event

Objects = Iterable[tuple[str, Manifest]]
"""Objects, each after the plural of its kind."""


@asynccontextmanager
async def cancelled_at_end(work: Awaitable[None]) -> AsyncIterator[asyncio.Future[None]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def host_of(kubeconfig: Path) -> str:
    return str(json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


class Synced:
    """A cache in sync with ``server``, and the jobs that were enqueued."""

    informers: Informers
    metrics: Metrics

    def __init__(self, server: FakeApiServer) -> None:
        self.server, self.cache, self.enqueued = server, Cache(), list[Key]()

    def names(self, namespace: str = "ns") -> set[str]:
        return {pod["metadata"]["name"] for pod in self.cache.pods((namespace, "job"))}


Scenario = Callable[[Synced], Awaitable[None]]


def run(
    folder: Path,
    namespaces: tuple[str, ...],
    objects: Objects,
    scenario: Scenario,
    watch_nodes: bool = True,
) -> None:
    """Run ``scenario`` with a cache of ``objects`` while the informers run."""
    server = FakeApiServer()
    for namespace in ("ns", "one", "two", "three"):
        server.put("fluxtrainings", make_training(namespace=namespace))
    for plural, manifest in objects:
        server.put(plural, manifest)

    async def main() -> None:
        synced, metrics = Synced(server), Metrics(CollectorRegistry())
        unreadable = UnreadableObjects(metrics)
        async with (
            serving(server, folder) as kubeconfig,
            ApiClient(Configuration(host=host_of(kubeconfig))) as api,
        ):
            informers = Informers(
                api,
                synced.cache,
                metrics,
                unreadable,
                synced.enqueued.append,
                namespaces,
                watch_nodes,
            )
            async with asyncio.timeout(60), cancelled_at_end(informers.run()):
                await asyncio.sleep(0)  # until it has begun
                while not all(not informers.why_unserved(n) for n in namespaces or ("",)):
                    await asyncio.sleep(0.01)
                synced.enqueued.clear()
                synced.informers, synced.metrics = informers, metrics
                await scenario(synced)

    asyncio.run(main())


def synced(
    *objects: tuple[str, Manifest], namespaces: tuple[str, ...] = ()
) -> Callable[[Scenario], Callable[[Path], None]]:
    """Return a decorator: the test runs the function with a cache of ``objects``."""
    return lambda function: lambda tmp_path: run(tmp_path, namespaces, objects, function)


def pods(*names: str, **metadata: Any) -> list[tuple[str, Manifest]]:
    return [("pods", make_pod(name, **metadata)) for name in names]


def nodes(*names: str, ready: bool = True) -> list[tuple[str, Manifest]]:
    return [("nodes", make_node(name, ready)) for name in names]


@pytest.mark.parametrize("count", [0, 1, PAGE, 2 * PAGE + 1])
def test_the_sync_waits_for_all_pages(tmp_path: Path, count: int) -> None:
    async def scenario(s: Synced) -> None:
        assert len(s.names()) == count
        assert not s.cache.nodes["n1"].ready

    objects = [*pods(*(f"job-{index}" for index in range(count))), *nodes("n1", ready=False)]
    run(tmp_path, (), objects, scenario)


def test_without_nodes_the_sync_needs_no_right_to_read_them(tmp_path: Path) -> None:
    async def scenario(s: Synced) -> None:
        assert (s.names(), s.cache.nodes) == ({"job-0"}, {})

    run(tmp_path, ("ns",), [*pods("job-0"), *nodes("n1")], scenario, watch_nodes=False)


@synced(
    *pods("a", namespace="one"),
    *pods("b", namespace="two"),
    *pods("c", namespace="three"),
    *pods("d", namespace="one", labels={names.LABEL_MANAGED_BY: names.FIELD_MANAGER}),
    *pods("r", namespace="one", labels={names.LABEL_JOB: "job", names.LABEL_MANAGED_BY: "Helm"}),
    namespaces=("one", "two"),
)
async def test_only_labelled_pods_in_the_watched_namespaces_are_cached(s: Synced) -> None:
    cached = {name: s.names(name) for name in ("one", "two", "three")}
    assert cached == {"one": {"a", "r"}, "two": {"b"}, "three": set()}
    s.server.put("pods", make_pod("e", namespace="three"))
    s.server.put("pods", make_pod("f", namespace="two"))
    await until(lambda: s.names("two") == {"b", "f"})
    assert s.names("three") == set()


@synced(*nodes("n1"))
async def test_every_change_is_handled_in_order(s: Synced) -> None:
    for index in range(100):
        s.server.put("pods", make_pod(f"job-{index}"))
    for index in range(0, 100, 2):
        s.server.remove("pods", "ns", f"job-{index}")
    await until(lambda: len(s.names()) == 50 and "job-99" in s.names())
    s.enqueued.clear()
    s.server.put("nodes", make_node("n1", ready=False))
    await until(lambda: s.enqueued == [KEY])
    s.server.remove("nodes", "", "n1")
    s.server.put("pods", make_pod("last"))
    await until(lambda: "last" in s.names())
    assert not s.cache.nodes["n1"].ready, "pods are on it"


@synced()
async def test_an_event_of_the_maximum_object_size_is_read(s: Synced) -> None:
    s.server.put("pods", make_pod("large", annotations={"a": "x" * 1_400_000}))
    s.server.put("pods", make_pod("after"))
    await until(lambda: s.names() == {"large", "after"})


@synced(*pods("stays", "goes"), *nodes("n1", "n2", "n3"))
async def test_changes_during_an_interrupted_watch_are_in_the_next_list(s: Synced) -> None:
    """The resource versions from before have expired, so everything is listed again."""
    s.server.hide("pods")
    s.server.remove("pods", "ns", "goes")
    s.server.put("pods", make_pod("comes"))
    s.server.show()
    await until(lambda: s.names() == {"stays", "comes"})
    s.server.hide("nodes")
    for name in ("n1", "n2", "n3"):
        s.server.remove("nodes", "", name)
    s.server.put("nodes", make_node("n3", ready=False))
    s.enqueued.clear()
    s.server.show()
    await until(lambda: "n2" not in s.cache.nodes)
    assert not s.cache.nodes["n1"].ready, "pods are on it"
    assert KEY in s.enqueued
    await until(lambda: not s.cache.nodes["n3"].ready)


@synced()
async def test_a_watch_that_ends_is_restarted_from_its_last_version(s: Synced) -> None:
    for index in range(3):
        for task in list(s.server.watching):
            task.cancel()
        s.server.put("pods", make_pod(f"pod-{index}"))
        await until(lambda name=f"pod-{index}": name in s.names())
    lists = [r for r in s.server.requests if r.path.endswith("/pods") and not r.watch]
    assert len(lists) == 1


@synced(namespaces=("one", "two"))
async def test_the_refusals_of_one_namespace_concern_no_other(s: Synced) -> None:
    assert sorted(s.informers.active_namespaces()) == ["one", "two"]
    for plural, kind in (
        ("fluxtrainings", "fluxtraining"),
        ("pods", "pod"),
        ("services", "service"),
    ):
        labels = {"kind": kind, "resource_namespace": "two"}
        failing = partial(
            s.metrics.registry.get_sample_value, "fluxtrain_operator_failing_watches", labels
        )
        s.server.refuse(f"/two/{plural}")
        await until(lambda: "403" in s.informers.why_unserved("two"))
        assert failing() == 1
        assert s.informers.why_unserved("one") == ""
        assert s.informers.active_namespaces() == ["one"], "the claim of the other one may expire"
        none_is_served, (line,) = s.informers.unserved
        assert not none_is_served
        assert line.startswith("two is not served: ")
        name = f"while-{plural}-are-refused"
        s.server.put("pods", make_pod(name, namespace="one"))
        s.server.put("fluxtrainings", make_training(name=name, namespace="two"))
        await until(lambda name=name: name in s.names("one"))
        s.server.refuse("nothing")
        await until(lambda: s.informers.unserved == (False, []))
        assert failing() == 0
        assert s.cache.job(("two", name)) is not None
        assert sorted(s.informers.active_namespaces()) == ["one", "two"]


@synced()
async def test_if_no_namespace_is_served_the_reason_is_told(s: Synced) -> None:
    s.server.refuse("/pods")
    await until(lambda: s.informers.unserved[0])
    (line,) = s.informers.unserved[1]
    assert line.startswith("no namespace is served: /api/v1/pods: 403")


@synced(("fluxtrainings", make_training(name="goes", uid="uid-goes")))
async def test_jobs_that_were_deleted_while_their_watch_had_expired_are_forgotten(
    s: Synced,
) -> None:
    s.server.hide("fluxtrainings")
    s.server.remove("fluxtrainings", "ns", "goes")
    s.server.show()
    await until(lambda: s.enqueued == [("ns", "goes")])
    assert s.cache.job(("ns", "goes")) is None
    assert s.cache.job(KEY) is not None


def test_an_unreachable_api_server_is_retried_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Handler:
        def __init__(self) -> None:
            self.names: list[str] = []

        def on_upsert(self, manifest: Any) -> None:
            self.names.append(manifest["metadata"]["name"])

        def on_delete(self, manifest: Any) -> None: ...

        def on_replace(self, uids: set[str], version: int) -> None: ...

        def on_unreadable(self, manifest: Any, error: Exception) -> None:
            raise error

        def on_activity(self) -> None: ...

        def on_failure(self, error: Exception) -> None: ...

    async def main() -> None:
        server, handler = FakeApiServer(), Handler()
        server.put("pods", make_pod("a"))
        async with ApiClient(Configuration(host="http://127.0.0.1:1")) as api:
            source = ListWatch(api, "/api/v1/pods")
            async with cancelled_at_end(list_and_watch(source, handler)) as watching:
                await asyncio.sleep(0.5)
                assert not watching.done()
                async with serving(server, tmp_path) as kubeconfig:
                    api.configuration.host = host_of(kubeconfig)
                    await until(lambda: handler.names == ["a"])
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len([r for r in caplog.records if "/api/v1/pods" in r.getMessage()]) == 1


class RolledBack(ListWatch):
    """Lists version 100, watches on, and goes back to version 52, as after a rollback of etcd."""

    async def pages(self) -> AsyncIterator[tuple[list[Any], int]]:
        if not vars(self).setdefault("is_listed", False):
            vars(self)["is_listed"] = True
            yield [make_pod("job-0", 90), make_pod("ghost", 99)], 100
        else:
            yield [make_pod("job-0", 40)], 52

    async def watch(self, version: str, seconds: float) -> AsyncIterator[tuple[str, Any]]:
        if version == "100":
            yield "MODIFIED", make_pod("ghost", 101)
            if self.selector == "silent":
                raise aiohttp.SocketTimeoutError
            yield "BOOKMARK", {"metadata": {"resourceVersion": "53"}}
            raise AssertionError("the watch goes on after a rollback")
        await asyncio.Event().wait()


@pytest.mark.parametrize("watch", ["silent", "older"])
@synchronous
async def test_after_a_rollback_of_etcd_a_list_replaces_all(watch: str) -> None:
    cache, metrics = Cache(), Metrics(CollectorRegistry())
    cache.set_job(make_training())
    handler = _PodHandler(("v1", "Pod"), cache, metrics, UnreadableObjects(metrics), print)
    source = RolledBack(ApiClient(), "/api/v1/pods", watch, before_list=cache.before_pod_list)
    async with source.api, cancelled_at_end(list_and_watch(source, handler)):
        await until(lambda: [p["metadata"]["resourceVersion"] for p in cache.pods(KEY)] == ["40"])


class JobsRolledBack(RolledBack):
    """Jobs instead of pods: of the second list one is older, and one that was created later is not in it."""

    async def pages(self) -> AsyncIterator[tuple[list[Any], int]]:
        async for pods, version in super().pages():
            yield [_job_of(pod) for pod in pods], version

    async def watch(self, version: str, seconds: float) -> AsyncIterator[tuple[str, Any]]:
        async for kind, manifest in super().watch(version, seconds):
            yield kind, manifest if kind == "BOOKMARK" else _job_of(manifest)


def _job_of(pod: Manifest) -> Manifest:
    metadata = pod["metadata"]
    named = {key: metadata[key] for key in ("name", "namespace", "resourceVersion")}
    return make_training(**named, uid=f"uid-{named['name']}")


@pytest.mark.parametrize("watch", ["silent", "older"])
@synchronous
async def test_after_a_rollback_of_etcd_a_job_that_was_created_later_is_forgotten(
    watch: str,
) -> None:
    cache, metrics = Cache(), Metrics(CollectorRegistry())
    shared = cache, metrics, UnreadableObjects(metrics), print
    handler = informers._JobHandler(informers.JOB, *shared)
    source = JobsRolledBack(ApiClient(), "/jobs", watch, before_list=cache.before_job_list)
    async with source.api, cancelled_at_end(list_and_watch(source, handler)):
        await until(lambda: len(cache.jobs) == 2)
        await until(lambda: [name for _, name in cache.jobs] == ["job-0"])
        job = cache.job(("ns", "job-0"))
        assert job is not None
        assert job["metadata"]["resourceVersion"] == "40"


SUPPORT = [
    (
        plural,
        make_pod(
            f"{plural}-{index}",
            annotations={names.ANNOTATION_APPLIED: "hash"},
            labels=names.labels("job", names.TRAINER),
        ),
    )
    for plural in ("configmaps", "services", "networkpolicies", "poddisruptionbudgets")
    for index in range(300)
]


BROKEN = {
    "pod": ("pods", {**make_pod("broken"), "status": "none"}),
    "service": ("services", make_pod("broken", ownerReferences=[1])),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_object_that_cannot_be_read_is_skipped_counted_and_logged(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a list and in a watch; the objects before and after it are cached."""

    async def scenario(s: Synced) -> None:
        assert s.names() == {"before", "after"}
        for _ in range(2):
            s.server.put(*BROKEN[kind])
        s.server.put("pods", make_pod("last"))
        s.server.put("services", make_pod("last"))
        await until(lambda: "last" in s.names() and len(s.cache.applied) == 1)
        name, labels = "fluxtrain_operator_unreadable_objects_total", {"kind": kind}
        assert s.metrics.registry.get_sample_value(name, labels) == 3

    with caplog.at_level(logging.ERROR):
        run(tmp_path, (), [*pods("before"), BROKEN[kind], *pods("after")], scenario)
    assert caplog.text.count(f"{kind} ns/broken is skipped: AttributeError") == 3


APPLIED = {"ConfigMap": "v1", "Service": "v1"}


@synced(*SUPPORT)
async def test_supporting_objects_are_listed_for_all_jobs_together_and_by_metadata_only(
    s: Synced,
) -> None:
    assert len(s.cache.applied) == 1200
    objects = s.cache.applied.of("uid-job", APPLIED)
    assert len(objects) == 600
    assert {applied.applied_hash for applied in objects.values()} == {"hash"}
    lists = [r for r in s.server.requests if not r.watch]
    assert len(lists) < 10


@synced(SUPPORT[300])
async def test_a_deleted_or_changed_service_queues_its_job_at_once(s: Synced) -> None:
    (plural, manifest), name = SUPPORT[300], "services-0"
    s.enqueued.clear()
    changed = {"annotations": {names.ANNOTATION_APPLIED: "b"}}
    s.server.put(plural, {**manifest, "metadata": {**manifest["metadata"], **changed}})
    await until(lambda: s.enqueued == [KEY])
    s.server.remove(plural, "ns", name)
    await until(lambda: s.enqueued == [KEY, KEY])
    assert s.cache.applied.of("uid-job", APPLIED) == {}


@synced(SUPPORT[300])
async def test_objects_of_other_owners_queue_no_job(s: Synced) -> None:
    labels = {names.LABEL_JOB: "theirs"}
    s.enqueued.clear()
    for number in range(50):
        metadata = {"name": f"theirs-{number}", "namespace": "ns", "labels": labels}
        s.server.put("services", {"metadata": metadata})
        s.server.remove("services", "ns", f"theirs-{number}")
    s.server.remove("services", "ns", "services-0")
    await until(lambda: s.enqueued == [KEY])


@synced(*SUPPORT[300:302])
async def test_services_that_were_deleted_while_their_watch_had_expired_are_missed(
    s: Synced,
) -> None:
    s.enqueued.clear()
    s.server.hide("services")
    s.server.remove("services", "ns", "services-0")
    s.server.show()
    await until(lambda: s.enqueued == [KEY])
    assert set(s.cache.applied.of("uid-job", APPLIED)) == {("Service", "services-1")}


@synced()
async def test_pod_groups_are_watched_from_the_first_job_that_has_one(s: Synced) -> None:
    version = "scheduling.volcano.sh/v1beta1"
    assert not any("podgroups" in r.path for r in s.server.requests)
    s.server.put("podgroups", SUPPORT[0][1])
    await until(lambda: s.informers.has_groups(version))
    assert len(s.cache.applied.of("uid-job", {"PodGroup": version})) == 1
    s.enqueued.clear()
    s.server.remove("podgroups", "ns", "configmaps-0")
    await until(lambda: s.enqueued == [KEY])
    assert len([r for r in s.server.requests if "podgroups" in r.path and not r.watch]) == 1


NUM_PODS = 8


def cpu_seconds(process: BaseProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_restart(num_jobs: int, folder: Path) -> float:
    """Return the CPU seconds from the start until a pod that was lost before is recreated."""
    server = FakeApiServer()
    crowd.fill(server, num_jobs, NUM_PODS, num_nodes=num_jobs)
    lost = f"job-{num_jobs - 1}-{NUM_PODS - 1}"
    server.remove("pods", crowd.NAMESPACE, lost)
    server.oldest = server.version
    folder.mkdir()

    async def scenario() -> float:
        async with leader(server, folder) as process:
            pods = server.of("pods").objects
            await until_process(lambda: (crowd.NAMESPACE, lost) in pods, process)
            used = cpu_seconds(process)
        created = [r for r in server.requests if r.method == "POST" and r.path.endswith("/pods")]
        assert len(created) == 1, "no other pod was considered lost"
        paths = {r.path for r in server.requests if r.method in ("GET", "PATCH")}
        assert len(paths) < 20, "no request is sent per job"
        return used

    return asyncio.run(scenario())


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads CPU time from Linux's /proc"
)
def test_the_cpu_time_of_a_new_leader_is_linear_in_the_number_of_jobs(tmp_path: Path) -> None:
    """Four times the jobs need about four times as much; anything quadratic would need sixteen times."""
    few = measure_restart(60, tmp_path / "few")
    many = measure_restart(240, tmp_path / "many")
    assert many < 7 * few, f"{few:.1f} s for 480 pods, {many:.1f} s for 1,920"


POD = ("v1", "Pod")
ERROR = AttributeError("'str' object has no attribute 'get'")


class Reported(UnreadableObjects):
    """Records the events that are created, and when; the first ``num_refused`` are refused."""

    def __init__(self, num_refused: int = 0) -> None:
        super().__init__(Metrics(CollectorRegistry()))
        self.events, self.times = list[tuple[Reference, Event]](), list[float]()
        self.num_refused = num_refused

    async def create_event(self, reference: Reference, event: Event) -> None:
        self.times.append(now())
        if self.num_refused:
            self.num_refused -= 1
            raise ApiError(403, "forbidden: the namespace is being terminated")
        self.events.append((reference, event))

    async def post(self, seconds: float = 1000.0) -> None:
        """Create the events that are due in the next ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.post_events(self.create_event)

    @property
    def names(self) -> list[str]:
        return [reference["name"] for reference, _ in self.events]


def pod(name: str = "broken", **metadata: Any) -> Manifest:
    return make_pod(name, **metadata)


@in_virtual_time
async def test_the_event_is_about_the_object() -> None:
    reported = Reported()
    reported.report(POD, pod(), ERROR)
    await reported.post()
    ((reference, event),) = reported.events
    identity = {"name": "broken", "namespace": "ns", "uid": "broken"}
    assert reference == {"apiVersion": "v1", "kind": "Pod", **identity}
    assert (event.type, event.reason) == ("Warning", "Unreadable")
    assert event.message == f"ignored by the operator: AttributeError: {ERROR}"


@in_virtual_time
async def test_one_event_per_object_and_generation() -> None:
    reported = Reported()
    for generation, count in ((None, 3), (1, 2), (2, 2), (1, 1)):
        for _ in range(count):
            changes = {} if generation is None else {"generation": generation}
            reported.report(POD, pod(**changes), ERROR)
            await reported.post()
    assert len(reported.events) == 4
    reported.report(POD, pod("another"), ERROR)
    await reported.post()
    assert reported.names[-1] == "another"


@in_virtual_time
async def test_a_replica_that_becomes_leader_tells_what_it_has_read_before() -> None:
    reported = Reported()
    for _ in range(3):
        reported.report(POD, pod(), ERROR)
    assert not reported.events
    await reported.post(5)
    reported.report(POD, pod("later"), ERROR)
    await reported.post(5)
    assert reported.names == ["broken", "later"]


@in_virtual_time
async def test_a_refused_event_is_tried_again_when_the_object_is_read_again() -> None:
    reported = Reported(num_refused=1)
    for _ in range(2):
        reported.report(POD, pod(), ERROR)
        reported.report(POD, pod("other"), ERROR)
        await reported.post()
    assert reported.names == ["other", "broken"]


@in_virtual_time
async def test_many_objects_are_bounded_in_memory_and_in_rate() -> None:
    reported = Reported()
    for number in range(2 * MAX_KNOWN):
        reported.report(POD, pod(f"pod-{number}"), ERROR)
    await reported.post()
    assert reported.names == [f"pod-{number}" for number in range(MAX_KNOWN, 2 * MAX_KNOWN)]
    assert len(reported._known) == MAX_KNOWN
    assert reported.times[-1] - reported.times[0] > MAX_KNOWN / 10


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"metadata": None},
        {"metadata": []},
        {"metadata": {"name": "node-1", "uid": "u"}},  # without a namespace
        {"metadata": {"name": "a", "namespace": "ns"}},  # without a uid
        {"metadata": {"name": 1, "namespace": ["ns"], "uid": {}}},
    ],
)
@in_virtual_time
async def test_without_a_reference_there_is_no_event_and_no_error(manifest: Manifest) -> None:
    reported = Reported()
    reported.report(("v1", "Node"), manifest, ERROR)
    await reported.post()
    assert not reported.events
    name, labels = "fluxtrain_operator_unreadable_objects_total", {"kind": "node"}
    assert reported._metrics.registry.get_sample_value(name, labels) == 1


def test_the_operators_own_writes_queue_no_job() -> None:
    metrics, queued = Metrics(CollectorRegistry()), list[object]()
    shared = Cache(), metrics, UnreadableObjects(metrics), queued.append
    handler = informers._JobHandler(informers.JOB, *shared)
    for version, number in ((5, 1), (5, 1), (6, 2)):
        handler.on_upsert(make_training(resourceVersion=str(version)))
        assert len(queued) == number


@in_virtual_time
async def test_a_job_that_cannot_be_read_is_told() -> None:
    reported, queued = Reported(), list[object]()
    handler = informers._JobHandler(
        informers.JOB, Cache(), reported._metrics, reported, queued.append
    )
    job = make_training(spec={"lifecycle": {"startAfter": 5}}, generation=3)
    for _ in range(2):
        list_watch._pass(job, handler.on_upsert, handler)
    await reported.post()
    ((reference, event),) = reported.events
    assert (reference["kind"], reference["name"]) == ("FluxTraining", "job")
    assert reference["apiVersion"] == "fluxtrain.dev/v1alpha1"
    assert "TypeError" in event.message
    assert not queued
