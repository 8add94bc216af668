"""One job among many: what is too deep or too large is refused, and the largest that is not blocks nobody."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from tests.operator.controller.test_ownership import KEY, Keeper, Scene, run
from tests.operator.controller.test_reconcile import make_job

from fluxtrain.errors import ConfigError
from fluxtrain_operator import names
from fluxtrain_operator.bounds import MOST_BYTES, MOST_DEPTH, require_bounded
from fluxtrain_operator.errors import UnreadableError
from fluxtrain_operator.job import Manifest
from fluxtrain_operator.planner.changes import MOST_PODS
from fluxtrain_operator.planner.plan import load

LARGEST = MOST_BYTES["spec.podTemplate"]


def nested(depth: int, kind: str = "mapping") -> Any:
    """Return a value of so many mappings, or lists, in each other."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if kind == "mapping" else [value]
    return value


def templated(template: Any, nodes: int = 1) -> Manifest:
    manifest = make_job()
    manifest["spec"] |= {"podTemplate": template, "nodes": {"min": 1, "max": nodes}}
    return manifest


@pytest.mark.parametrize("kind", ["mapping", "list"])
@pytest.mark.parametrize("depth", [MOST_DEPTH + 1, 1_000, 100_000])
def test_a_spec_that_is_too_deep_is_refused_with_its_place(kind: str, depth: int) -> None:
    template = {"spec": {"affinity": {"a": nested(depth, kind)}}}
    with pytest.raises(ConfigError, match="must be nested at most 32 deep") as caught:
        load(templated(template), "trainer:1")
    assert str(caught.value).startswith("spec.podTemplate.spec.affinity.a")
    assert len(str(caught.value)) < 200


def test_the_deepest_and_the_largest_spec_are_taken() -> None:
    require_bounded(nested(MOST_DEPTH), "spec")
    with pytest.raises(ConfigError):
        require_bounded(nested(MOST_DEPTH + 1), "spec")
    require_bounded({"a": "x" * (LARGEST - 100)}, "spec.podTemplate")
    for value in ({"a": "x" * LARGEST}, {"x" * LARGEST: 1}, [0] * LARGEST, {"a": [""] * LARGEST}):
        with pytest.raises(ConfigError, match="must be at most 64 KiB as JSON"):
            require_bounded(value, "spec.podTemplate")


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"affinity": {"a": "x" * 1_000_000}}},
        {"spec": {"affinity": {str(n): {} for n in range(20_000)}}},
        {"spec": {"hostAliases": [{"ip": "192.0.2.1"}] * 65}},
        {"spec": {"containers": [{"name": "trainer", "volumeMounts": [{"mountPath": "/a"}] * 65}]}},
        {"spec": {"initContainers": [{"name": "a", "image": "a", "env": [{"name": "A"}] * 129}]}},
    ],
)
def test_what_has_no_end_is_refused(template: Manifest) -> None:
    with pytest.raises(ConfigError, match="at most"):
        load(templated(template), "trainer:1")


class Odd(dict[str, Any]):
    """A spec that nobody has thought of."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "podTemplate":
            raise MemoryError("too much")
        return super().get(key, default)


def test_a_job_that_nobody_can_read_is_told_so_and_harms_no_other() -> None:
    odd = {**make_job("odd"), "spec": Odd(make_job()["spec"])}
    with pytest.raises(
        UnreadableError, match="this operator cannot read it: MemoryError: too much"
    ):
        load(odd, "trainer:1")

    async def main() -> list[float | None]:
        scene = Scene()
        scene.store.set_job(odd)
        told = [await scene.reconciler.reconcile(("ns", name)) for name in ("odd", "job")]
        condition = scene.cluster.own("Pod", "uid-job")
        assert len(condition) == 5
        await scene.reconciler.answers.close()
        return told

    again, _ = asyncio.run(main())
    assert again is not None, "another day it may be read"
    assert again >= 60


def test_a_job_that_nobody_can_read_does_not_fail_for_good() -> None:
    scene = Scene(spec=Odd(make_job()["spec"]))
    run(scene, 1)
    assert scene.cluster.condition("Healthy")[:2] == ("False", "InvalidSpec")
    assert "phase" not in scene.cluster.status


class Sending(Keeper):
    """An API server whose client writes each request as JSON, as the real one does."""

    async def create(self, manifest: Manifest) -> Manifest | None:
        json.dumps(manifest)
        return await super().create(manifest)


TEMPLATES = {
    "none": {},
    "variables": {
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": f"A{n}", "value": "x" * 440} for n in range(128)],
            }
        ]
    },
    "mappings": {"affinity": {f"k{n}": {"a": {"b": n}} for n in range(2_000)}},
    "aliases": {"hostAliases": [{"ip": "192.0.2.1", "hostnames": ["h" * 900]}] * 64},
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("nodes", [64, 4096])
def test_the_largest_job_never_holds_up_the_lease(template: str, nodes: int) -> None:
    """The renewal waits for the loop: what counts is the longest time in which nothing else has a turn."""
    manifest = templated({"spec": TEMPLATES[template]}, nodes)
    assert len(json.dumps(manifest["spec"]["podTemplate"])) < LARGEST
    scene = Scene()
    manifest["metadata"]["resourceVersion"] = "2"
    scene.store.set_job(manifest)
    scene.reconciler.cluster = scene.cluster = Sending()  # type: ignore[assignment]
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        for _ in range(3):
            again = await scene.reconciler.reconcile(KEY)
            await asyncio.sleep(0)
        assert nodes <= 2 * MOST_PODS or again == 0.0, "it goes on by itself"
        ticking.cancel()
        await scene.reconciler.answers.close()

    asyncio.run(main())
    assert len(scene.cluster.own("Pod")) == min(nodes, 3 * MOST_PODS) + 1
    assert longest < 1.0, f"nothing else had a turn for {longest:.2f} s"


def test_pods_of_one_job_share_a_template_and_are_told_apart() -> None:
    scene = Scene()
    shared = {"spec": {"tolerations": [{"key": "spot"}], **TEMPLATES["aliases"]}}
    manifest = templated(shared, 3)
    manifest["metadata"]["resourceVersion"] = "2"
    scene.store.set_job(manifest)
    run(scene, 1)
    made = [scene.cluster.objects["Pod", f"job-{n}"] for n in range(3)]
    assert all(pod["spec"]["hostAliases"] == TEMPLATES["aliases"]["hostAliases"] for pod in made)
    assert [pod["metadata"]["labels"][names.LABEL_INDEX] for pod in made] == ["0", "1", "2"]
    assert [pod["spec"]["hostname"] for pod in made] == ["job-0", "job-1", "job-2"]
