"""What the operator knows of pods and nodes: everything at the start, every change, nothing that is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry
from tests.operator.controller.fake_api_server import FakeApiServer, serving

from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.informers import Informers
from fluxtrain_operator.controller.list_watch import PAGE, Source, follow
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.names import Key

KEY = ("ns", "job")


def pod(name: str, job: str = "job", namespace: str = "ns", **metadata: Any) -> dict[str, Any]:
    labels = {names.LABEL_JOB: job, names.LABEL_MANAGED_BY: names.FIELD_MANAGER}
    common: dict[str, Any] = {"name": name, "namespace": namespace, "labels": labels}
    common["ownerReferences"] = [{"uid": "u", "controller": True}]
    return {"metadata": {**common, **metadata}, "spec": {"nodeName": "n1"}}


def node(name: str, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"metadata": {"name": name}, "status": {"conditions": conditions}}


@dataclass
class Scene:
    """An API server, and an operator's store that follows it."""

    server: FakeApiServer
    store: Cache
    news: list[Key]

    def names(self, key: Key = KEY) -> set[str]:
        return {p["metadata"]["name"] for p in self.store.pods(key)}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.01)


def play(
    folder: Path,
    server: FakeApiServer,
    scenario: Callable[[Scene], Awaitable[None]],
    namespaces: tuple[str, ...] = (),
) -> None:
    """Fill a store from ``server``, then play ``scenario`` while it follows."""

    async def main() -> None:
        async with serving(server, folder) as kubeconfig:
            host = kubeconfig.read_text().split('"server": "')[1].split('"')[0]
            async with ApiClient(Configuration(host=host)) as api:
                scene = Scene(server, Cache(), [])
                for namespace in ("ns", "one", "two", "three"):
                    metadata = {"name": "job", "namespace": namespace, "uid": "u"}
                    scene.store.set_job({"metadata": metadata})
                metrics = Metrics(CollectorRegistry())
                feeds = Informers(api, scene.store, metrics, scene.news.append, namespaces)
                running = asyncio.create_task(feeds.run())
                try:
                    async with asyncio.timeout(20):
                        await feeds.filled()
                    await scenario(scene)
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("count", [0, 1, PAGE, 2 * PAGE + 1])
def test_all_pages_are_listed_before_anything_is_decided(tmp_path: Path, count: int) -> None:
    server = FakeApiServer()
    for index in range(count):
        server.put("pods", pod(f"job-{index}"))
    server.put("nodes", node("n1", ready=False))

    async def scenario(scene: Scene) -> None:
        assert len(scene.names()) == count
        assert not scene.store.nodes["n1"].ready

    play(tmp_path, server, scenario)


def test_only_our_pods_in_our_namespaces_are_known(tmp_path: Path) -> None:
    server = FakeApiServer()
    server.put("pods", pod("a", namespace="one"))
    server.put("pods", pod("b", namespace="two"))
    server.put("pods", pod("c", namespace="three"))
    server.put("pods", pod("d", namespace="one", labels={names.LABEL_JOB: "job"}))

    async def scenario(scene: Scene) -> None:
        known = {name: scene.names((name, "job")) for name in ("one", "two", "three")}
        assert known == {"one": {"a"}, "two": {"b"}, "three": set()}
        server.put("pods", pod("e", namespace="three"))
        server.put("pods", pod("f", namespace="two"))
        await scene.until(lambda: scene.names(("two", "job")) == {"b", "f"})
        assert scene.names(("three", "job")) == set()

    play(tmp_path, server, scenario, ("one", "two"))


def test_every_change_is_told_of_in_its_order(tmp_path: Path) -> None:
    server = FakeApiServer()
    server.put("nodes", node("n1"))

    async def scenario(scene: Scene) -> None:
        for index in range(100):
            server.put("pods", pod(f"job-{index}"))
        for index in range(0, 100, 2):
            server.remove("pods", "ns", f"job-{index}")
        await scene.until(lambda: len(scene.names()) == 50 and "job-99" in scene.names())
        scene.news.clear()
        server.put("nodes", node("n1", ready=False))
        await scene.until(lambda: scene.news == [KEY])
        server.remove("nodes", "", "n1")
        server.put("pods", pod("last"))
        await scene.until(lambda: "last" in scene.names())
        assert not scene.store.nodes["n1"].ready, "pods are on it"

    play(tmp_path, server, scenario)


def test_an_object_as_large_as_they_get_comes_through(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.server.put("pods", pod("large", annotations={"a": "x" * 1_400_000}))
        scene.server.put("pods", pod("after"))
        await scene.until(lambda: scene.names() == {"large", "after"})

    play(tmp_path, FakeApiServer(), scenario)


def test_what_went_and_came_while_nobody_could_watch_is_known_afterwards(tmp_path: Path) -> None:
    """The versions from before are too old then: all is listed anew."""
    server = FakeApiServer()
    for name in ("stays", "goes"):
        server.put("pods", pod(name))
    for name in ("n1", "n2", "n3"):
        server.put("nodes", node(name))

    async def scenario(scene: Scene) -> None:
        server.hide("pods")
        server.remove("pods", "ns", "goes")
        server.put("pods", pod("comes"))
        server.show()
        await scene.until(lambda: scene.names() == {"stays", "comes"})
        server.hide("nodes")
        server.remove("nodes", "", "n1")
        server.remove("nodes", "", "n2")
        server.remove("nodes", "", "n3")
        server.put("nodes", node("n3", ready=False))
        scene.news.clear()
        server.show()
        await scene.until(lambda: "n2" not in scene.store.nodes)
        assert not scene.store.nodes["n1"].ready, "pods are on it"
        assert KEY in scene.news
        await scene.until(lambda: not scene.store.nodes["n3"].ready)

    play(tmp_path, server, scenario)


def test_a_watch_that_ends_goes_on_from_where_it_was(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        for round_ in range(3):
            for task in list(server.watching):
                task.cancel()
            server.put("pods", pod(f"round-{round_}"))
            await scene.until(lambda name=f"round-{round_}": name in scene.names())
        lists = [r for r in server.requests if r.path.endswith("/pods") and not r.watch]
        assert len(lists) == 1

    server = FakeApiServer()
    play(tmp_path, server, scenario)


def test_an_api_server_that_fails_for_a_while_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Feed:
        def __init__(self) -> None:
            self.names: list[str] = []

        def there(self, manifest: Any) -> None:
            self.names.append(manifest["metadata"]["name"])

        def gone(self, manifest: Any) -> None: ...

        def only(self, uids: set[str], version: int) -> None: ...

        def heard(self) -> None: ...

    async def main() -> None:
        server, feed = FakeApiServer(), Feed()
        async with ApiClient(Configuration(host="http://127.0.0.1:1")) as api:
            following = asyncio.create_task(follow(Source(api, "/api/v1/pods"), feed))
            await asyncio.sleep(0.5)
            assert not following.done()
            async with serving(server, tmp_path) as kubeconfig:
                host = kubeconfig.read_text().split('"server": "')[1].split('"')[0]
                server.put("pods", pod("at-last"))
                api.configuration.host = host
                async with asyncio.timeout(20):
                    while feed.names != ["at-last"]:
                        await asyncio.sleep(0.01)
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    told = [r for r in caplog.records if "/api/v1/pods" in r.getMessage()]
    assert len(told) == 1, "once for as long as it is so"


def test_what_is_around_pods_is_listed_for_all_jobs_together(tmp_path: Path) -> None:
    server = FakeApiServer()
    labels = {names.LABEL_JOB: "job", names.LABEL_MANAGED_BY: names.FIELD_MANAGER}
    owner = {"uid": "u", "controller": True}
    for plural in ("configmaps", "services", "networkpolicies", "poddisruptionbudgets"):
        for index in range(300):
            metadata = {"name": f"{plural}-{index}", "namespace": "ns", "labels": labels}
            notes = {names.ANNOTATION_APPLIED: "hash"}
            server.put(
                plural,
                {"metadata": {**metadata, "annotations": notes, "ownerReferences": [owner]}},
            )

    async def scenario(scene: Scene) -> None:
        found = scene.store.support.of("ns", "u")
        assert len(found) == 1200
        assert {applied.hashed for applied in found.values()} == {"hash"}
        assert len(server.requests) < 10

    play(tmp_path, server, scenario)
