"""Informers: the cache has every pod and node after the sync, every change, and no deleted object."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fake_api_server import FakeApiServer, serving
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry
from tests.operator.controller.event_loop import until
from tests.operator.jobs import KEY, make_node, make_pod, make_training

from fluxtrain_operator.base import names
from fluxtrain_operator.base.job import Manifest
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.informers import Informers
from fluxtrain_operator.controller.list_watch import (
    PAGE,
    ListWatch,
    UnreadableObjects,
    list_and_watch,
)
from fluxtrain_operator.metrics import Metrics

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
        for namespace in ("ns", "one", "two", "three"):
            self.cache.set_job(make_training(namespace=namespace))

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
                await informers.wait_for_sync()
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
    *pods("d", namespace="one", labels={names.LABEL_JOB: "job"}),
    namespaces=("one", "two"),
)
async def test_only_labelled_pods_in_the_watched_namespaces_are_cached(s: Synced) -> None:
    cached = {name: s.names(name) for name in ("one", "two", "three")}
    assert cached == {"one": {"a"}, "two": {"b"}, "three": set()}
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
    labels = {names.LABEL_MANAGED_BY: names.FIELD_MANAGER}
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
    version, kinds = "scheduling.volcano.sh/v1beta1", ("PodGroup",)
    assert not any("podgroups" in r.path for r in s.server.requests)
    s.server.put("podgroups", SUPPORT[0][1])
    await until(lambda: s.informers.has_groups(version, kinds))
    assert len(s.cache.applied.of("uid-job", {"PodGroup": version})) == 1
    s.enqueued.clear()
    s.server.remove("podgroups", "ns", "configmaps-0")
    await until(lambda: s.enqueued == [KEY])
    assert len([r for r in s.server.requests if "podgroups" in r.path and not r.watch]) == 1
