"""How many pods are created at a time: those of a namespace together, however many jobs it has."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.operator.jobs import make_training

from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.executor import _POD_SLOTS, Executor, JobState
from fluxtrain_operator.planner.plan import load

Manifest = dict[str, Any]


class SlowStore:
    """An API server that counts the requests of each namespace that are in flight."""

    def __init__(self) -> None:
        self.in_flight, self.most = Counter[str](), Counter[str]()
        self.created = Counter[str]()

    async def create(self, manifest: Manifest) -> Manifest:
        namespace = manifest["metadata"]["namespace"]
        self.in_flight[namespace] += 1
        self.most[namespace] = max(self.most[namespace], self.in_flight[namespace])
        await asyncio.sleep(0.001)
        self.in_flight[namespace] -= 1
        self.created[namespace] += 1
        return {**manifest, "metadata": {**manifest["metadata"], "uid": f"{self.created.total()}"}}


def test_the_jobs_of_a_namespace_share_its_slots() -> None:
    store = SlowStore()
    executor = Executor(Cache(), store)  # type: ignore[arg-type]

    async def create(namespace: str, name: str) -> None:
        manifest = make_training()
        manifest["metadata"] |= {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}
        job = load(manifest, "trainer:1")
        pods: list[Manifest] = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{name}-{number}", "namespace": namespace},
            }
            for number in range(40)
        ]
        await executor._create_pods(job, pods, JobState(job.uid))

    async def main() -> None:
        jobs = [("busy", f"job-{number}") for number in range(5)] + [("quiet", "job")]
        await asyncio.gather(*(create(*job) for job in jobs))

    asyncio.run(main())
    assert store.created == {"busy": 200, "quiet": 40}
    assert store.most == {"busy": _POD_SLOTS, "quiet": _POD_SLOTS}
