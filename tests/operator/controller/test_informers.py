"""Informers: the cache has every pod and node after the sync, every change, and no deleted object."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fake_api_server import FakeApiServer, serving
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry
from tests.operator.controller.event_loop import until
from tests.operator.jobs import KEY, make_node, make_pod

from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.informers import Informers
from fluxtrain_operator.controller.list_watch import PAGE, ListWatch, list_and_watch
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.names import Key


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


@dataclass
class Synced:
    """A cache in sync with an API server, and the jobs that were enqueued."""

    cache: Cache
    enqueued: list[Key]

    def names(self, namespace: str = "ns") -> set[str]:
        return {pod["metadata"]["name"] for pod in self.cache.pods((namespace, "job"))}


def run(
    folder: Path,
    server: FakeApiServer,
    scenario: Callable[[Synced], Awaitable[None]],
    namespaces: tuple[str, ...] = (),
) -> None:
    """Run ``scenario`` with a synced cache while the informers run."""

    async def main() -> None:
        synced = Synced(Cache(), [])
        for namespace in ("ns", "one", "two", "three"):
            synced.cache.set_job(
                {"metadata": {"name": "job", "namespace": namespace, "uid": "uid-job"}}
            )
        metrics = Metrics(CollectorRegistry())
        async with (
            serving(server, folder) as kubeconfig,
            ApiClient(Configuration(host=host_of(kubeconfig))) as api,
        ):
            informers = Informers(api, synced.cache, metrics, synced.enqueued.append, namespaces)
            async with cancelled_at_end(informers.run()):
                async with asyncio.timeout(20):
                    await informers.wait_for_sync()
                async with asyncio.timeout(60):
                    await scenario(synced)

    asyncio.run(main())


@pytest.mark.parametrize("count", [0, 1, PAGE, 2 * PAGE + 1])
def test_the_sync_waits_for_all_pages(tmp_path: Path, count: int) -> None:
    server = FakeApiServer()
    for index in range(count):
        server.put("pods", make_pod(f"job-{index}"))
    server.put("nodes", make_node("n1", ready=False))

    async def scenario(synced: Synced) -> None:
        assert len(synced.names()) == count
        assert not synced.cache.nodes["n1"].ready

    run(tmp_path, server, scenario)


def test_only_labelled_pods_in_the_watched_namespaces_are_cached(tmp_path: Path) -> None:
    server = FakeApiServer()
    for name, namespace in (("a", "one"), ("b", "two"), ("c", "three")):
        server.put("pods", make_pod(name, namespace=namespace))
    server.put("pods", make_pod("d", namespace="one", labels={names.LABEL_JOB: "job"}))

    async def scenario(synced: Synced) -> None:
        cached = {name: synced.names(name) for name in ("one", "two", "three")}
        assert cached == {"one": {"a"}, "two": {"b"}, "three": set()}
        server.put("pods", make_pod("e", namespace="three"))
        server.put("pods", make_pod("f", namespace="two"))
        await until(lambda: synced.names("two") == {"b", "f"})
        assert synced.names("three") == set()

    run(tmp_path, server, scenario, ("one", "two"))


def test_every_change_is_handled_in_order(tmp_path: Path) -> None:
    server = FakeApiServer()
    server.put("nodes", make_node("n1"))

    async def scenario(synced: Synced) -> None:
        for index in range(100):
            server.put("pods", make_pod(f"job-{index}"))
        for index in range(0, 100, 2):
            server.remove("pods", "ns", f"job-{index}")
        await until(lambda: len(synced.names()) == 50 and "job-99" in synced.names())
        synced.enqueued.clear()
        server.put("nodes", make_node("n1", ready=False))
        await until(lambda: synced.enqueued == [KEY])
        server.remove("nodes", "", "n1")
        server.put("pods", make_pod("last"))
        await until(lambda: "last" in synced.names())
        assert not synced.cache.nodes["n1"].ready, "pods are on it"

    run(tmp_path, server, scenario)


def test_an_event_of_the_maximum_object_size_is_read(tmp_path: Path) -> None:
    server = FakeApiServer()

    async def scenario(synced: Synced) -> None:
        server.put("pods", make_pod("large", annotations={"a": "x" * 1_400_000}))
        server.put("pods", make_pod("after"))
        await until(lambda: synced.names() == {"large", "after"})

    run(tmp_path, server, scenario)


def test_changes_during_an_interrupted_watch_are_in_the_next_list(tmp_path: Path) -> None:
    """The resource versions from before have expired, so everything is listed again."""
    server = FakeApiServer()
    for name in ("stays", "goes"):
        server.put("pods", make_pod(name))
    for name in ("n1", "n2", "n3"):
        server.put("nodes", make_node(name))

    async def scenario(synced: Synced) -> None:
        server.hide("pods")
        server.remove("pods", "ns", "goes")
        server.put("pods", make_pod("comes"))
        server.show()
        await until(lambda: synced.names() == {"stays", "comes"})
        server.hide("nodes")
        for name in ("n1", "n2", "n3"):
            server.remove("nodes", "", name)
        server.put("nodes", make_node("n3", ready=False))
        synced.enqueued.clear()
        server.show()
        await until(lambda: "n2" not in synced.cache.nodes)
        assert not synced.cache.nodes["n1"].ready, "pods are on it"
        assert KEY in synced.enqueued
        await until(lambda: not synced.cache.nodes["n3"].ready)

    run(tmp_path, server, scenario)


def test_a_watch_that_ends_is_restarted_from_its_last_version(tmp_path: Path) -> None:
    server = FakeApiServer()

    async def scenario(synced: Synced) -> None:
        for index in range(3):
            for task in list(server.watching):
                task.cancel()
            server.put("pods", make_pod(f"pod-{index}"))
            await until(lambda name=f"pod-{index}": name in synced.names())
        lists = [r for r in server.requests if r.path.endswith("/pods") and not r.watch]
        assert len(lists) == 1

    run(tmp_path, server, scenario)


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


def test_supporting_objects_are_listed_for_all_jobs_together(tmp_path: Path) -> None:
    server, annotations = FakeApiServer(), {names.ANNOTATION_APPLIED: "hash"}
    for plural in ("configmaps", "services", "networkpolicies", "poddisruptionbudgets"):
        for index in range(300):
            server.put(plural, make_pod(f"{plural}-{index}", annotations=annotations))

    async def scenario(synced: Synced) -> None:
        objects = synced.cache.support.of("ns", "uid-job")
        assert len(objects) == 1200
        assert {applied.applied_hash for applied in objects.values()} == {"hash"}
        assert len(server.requests) < 10

    run(tmp_path, server, scenario)
