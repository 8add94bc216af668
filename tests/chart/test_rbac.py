"""RBAC: the operator's requests need exactly the permissions that the chart grants and the docs explain."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry
from tests.chart.objects import CHART, Manifest, Template, one
from tests.operator.jobs import KEY, OWNER, make_training
from tests.paths import ROOT

from fluxtrain_operator.base import names
from fluxtrain_operator.controller.api_client import SUPPORT_KINDS, KubernetesApi
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.informers import Informers
from fluxtrain_operator.controller.leader_election import LeaderElector
from fluxtrain_operator.controller.list_watch import UnreadableObjects
from fluxtrain_operator.controller.reconcile import Reconciler
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.plan import load
from fluxtrain_operator.resources import Slot, training_pod
from fluxtrain_operator.resources.scheduling import _GANGS, POD_GROUP, gang_of

Permission = tuple[str, str, str]
"""Resource as ``plural[/subresource][.group]``, verb, and scope: watched, cluster or own."""

NUM_WATCHES = 10
"""Of jobs, pods, nodes, four kinds of supporting objects, and three of pod groups."""
LONG_AGO = "2020-01-01T00:00:00Z"
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
PATH = re.compile(
    r"/apis?/(?:(?P<group>[^/]+)/)?v[^/]+/(?:namespaces/(?P<namespace>[^/]+)/)?(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)


def permissions_of(method: str, path: str, watch: bool) -> Iterator[tuple[str, str]]:
    """Yield the permissions that the API server checks for a request."""
    match = PATH.fullmatch(path)
    if match is None:
        return  # discovery is allowed to every authenticated user
    resource = match["plural"] + (f"/{match['sub']}" if match["sub"] else "")
    resource += f".{match['group']}" if match["group"] else ""
    if method == "PATCH":
        yield resource, "create"  # an apply may create
    reading = "watch" if watch else "get" if match["name"] else "list"
    yield resource, VERBS.get(method, reading)


OWN: Manifest = {
    "uid": "old",
    "labels": {names.LABEL_JOB: "job"},
    "ownerReferences": [OWNER],
}
OLD = (
    "stale",
    "job",
    names.network_policy("job"),
    names.disruption_budget("job"),
    names.pod_group("job"),
    load(make_training(), "trainer").spec_revision.name,
)
"""Names such that each kind has an outdated object and undesired ones."""


class Recorder:
    """An API server that accepts every request, returns old objects of the job, and records permissions."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.leases: dict[str, Manifest] = {}

    async def answer(self, request: web.Request) -> web.Response:
        watch = "watch" in request.query
        self.seen |= set(permissions_of(request.method, request.path, watch))
        if watch:
            return web.Response(text="")
        body = await request.json() if request.can_read_body else {}
        if "/leases" in request.path:
            return self._lease(request, body)
        if re.fullmatch("/apis/[^/]+/[^/]+", request.path):  # which kinds an API has
            return web.json_response({"resources": [{"kind": "PodGroup"}]})
        if request.method == "GET":
            items = [{"metadata": {"name": name, **OWN}} for name in OLD]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        if request.method == "PUT":
            body["metadata"]["resourceVersion"] = "2"
        return web.json_response(body)

    def _lease(self, request: web.Request, body: Manifest) -> web.Response:
        if body:
            self.leases["lease"] = body
        if not self.leases:
            return web.json_response({"code": 404, "message": "not found"}, status=404)
        return web.json_response(self.leases["lease"])


def make_job(gang: str = "None", phase: str | None = None, **spec: Any) -> Manifest:
    status: Manifest = {"phase": "Pending", "attempt": 1}  # a new job's objects are not listed
    if phase is not None:
        condition = {"type": phase, "status": "True", "reason": "Over", "message": ""}
        times = {"lastTransitionTime": LONG_AGO, "observedGeneration": 1}
        status = {"phase": phase, "attempt": 1, "conditions": [{**condition, **times}]}
    added = {"resourceVersion": "1", "generation": 1, "creationTimestamp": LONG_AGO}
    return make_training({"scheduling": {"gang": gang}, **spec}, status, **added)


JOBS = [
    make_job("None", nodes={"min": 1, "max": 2}),
    make_job("Coscheduling"),
    make_job("Volcano"),
    make_job("Native"),
    make_job(phase="Complete", lifecycle={"ttlSecondsAfterFinished": 1}),
    make_job(lifecycle={"suspend": True}),
]


async def used_permissions() -> set[tuple[str, str]]:
    """Return the permissions that reconciling JOBS, the watches and the leader election need."""
    recorder, app = Recorder(), web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.answer)
    running = web.AppRunner(app, access_log=None)
    await running.setup()
    site = web.TCPSite(running, "127.0.0.1", 0)
    await site.start()
    address = f"http://127.0.0.1:{running.addresses[0][1]}"
    try:
        async with (
            ApiClient(Configuration(host=address)) as api,
            aiohttp.ClientSession() as http,
        ):
            for manifest in JOBS:
                await reconcile(KubernetesApi(api, http), manifest)
            await watch_everything(api, recorder)
            election = LeaderElector(api, "ns", "lease", "me").run(lambda: asyncio.sleep(0))
            await asyncio.wait_for(election, 30)
    finally:
        await running.cleanup()
    return recorder.seen


async def reconcile(cluster: KubernetesApi, manifest: Manifest) -> None:
    cache = Cache()
    cache.set_job(manifest)
    gang = gang_of(load(manifest, "trainer"))
    for kind, version in (SUPPORT_KINDS | {POD_GROUP: gang.api_version}).items():
        for name in OLD:
            cache.applied.set(
                (version, kind), {"metadata": {"name": name, "namespace": "ns", **OWN}}
            )
    if manifest["spec"].get("lifecycle", {}).get("suspend"):
        pod = training_pod(load(manifest, "trainer"), Slot(0))
        pod["metadata"] |= {"uid": "pod", "resourceVersion": "2"}
        cache.set_pod(pod)
    metrics = Metrics(CollectorRegistry())
    reconciler = Reconciler(cache, cluster, metrics, "trainer")
    await reconciler.reconcile(KEY)


async def watch_everything(api: ApiClient, recorder: Recorder) -> None:
    """Run the informers of a namespace until all of their watches are open."""
    metrics = Metrics(CollectorRegistry())
    unreadable = UnreadableObjects(metrics)
    informers = Informers(api, Cache(), metrics, unreadable, lambda key: None, ["ns"])
    running = asyncio.create_task(informers.run())
    try:
        async with asyncio.timeout(30):
            await asyncio.sleep(0)  # until it has begun
            await informers.wait_for_sync()
            for gang in _GANGS.values():
                while gang.api_version and not informers.has_groups(gang.api_version):
                    await asyncio.sleep(0.01)
            while sum(verb == "watch" for _, verb in recorder.seen) < NUM_WATCHES:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def granted(rendered: list[Manifest]) -> set[Permission]:
    """Return the permissions of the chart's bound roles."""
    result = set()
    for role in rendered:
        if role["kind"] not in ("Role", "ClusterRole") or not bound(rendered, role):
            continue
        scope = "own" if role["metadata"]["name"].endswith("-election") else "watched"
        scope = "cluster" if role["metadata"]["name"].endswith("-nodes") else scope
        for rule in role["rules"]:
            assert len(rule["apiGroups"]) == 1
            group = f".{rule['apiGroups'][0]}" if rule["apiGroups"][0] else ""
            result |= {
                (f"{r}{group}", verb, scope) for r in rule["resources"] for verb in rule["verbs"]
            }
    return result


def bound(rendered: list[Manifest], role: Manifest) -> bool:
    name = role["metadata"]["name"]
    return any(m.get("roleRef", {}).get("name") == name for m in rendered)


def explained() -> set[Permission]:
    """Return the rows of the table in docs/operator.md."""
    result, resources = set(), list[str]()
    for line in (ROOT / "docs" / "operator.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2] in ("watched", "cluster", "own"):
            resources = re.findall(r"`([^`]+)`", cells[0]) or resources
            assert cells[3], line
            result |= {(resource, cells[1], cells[2]) for resource in resources}
    return result


def test_the_docs_explain_every_permission_and_no_other(template: Template) -> None:
    assert explained() == granted(template())


def test_the_operator_uses_every_permission_and_no_other(template: Template) -> None:
    used = asyncio.run(used_permissions())
    assert used == {(resource, verb) for resource, verb, _ in granted(template())}


def test_nothing_is_granted_by_wildcard_and_no_secret_is_readable(template: Template) -> None:
    for resource, verb, _ in granted(template()):
        assert "*" not in resource + verb
        assert resource.split("/")[0] != "serviceaccounts"
        assert resource.split("/")[0] != "secrets" or verb == "create"
        assert resource not in ("pods/exec", "pods/attach", "pods/portforward")


def test_watched_namespaces_have_a_role_each_and_the_cluster_none(template: Template) -> None:
    rendered = template('watchNamespaces=["a","b"]')
    jobs = [m for m in rendered if m["metadata"]["name"].endswith("-jobs")]
    assert sorted((m["kind"], m["metadata"]["namespace"]) for m in jobs) == [
        ("Role", "a"),
        ("Role", "b"),
        ("RoleBinding", "a"),
        ("RoleBinding", "b"),
    ]
    assert granted(rendered) == granted(template())


def test_the_profile_namespaced_creates_no_object_of_the_cluster(template: Template) -> None:
    values = yaml.safe_load((CHART / "profiles" / "namespaced.yaml").read_text())
    settings = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    rendered = template(*settings, 'watchNamespaces=["a"]', apis=("monitoring.coreos.com/v1",))
    assert [m["metadata"]["name"] for m in rendered if "namespace" not in m["metadata"]] == []
    missing = granted(template()) - granted(rendered)
    assert missing == {("nodes", "list", "cluster"), ("nodes", "watch", "cluster")}
    (container,) = one(rendered, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"name": "FLUXTRAIN_WATCH_NODES", "value": "false"} in container["env"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gang", "group"),
    [
        ("coscheduling", "scheduling.x-k8s.io"),
        ("volcano", "scheduling.volcano.sh"),
        ("native", "scheduling.k8s.io"),
    ],
)
def test_permissions_for_pod_groups_can_be_left_out(
    gang: str, group: str, template: Template
) -> None:
    missing = granted(template()) - granted(template(f"gangs.{gang}=false"))
    assert missing
    assert all(resource.endswith(f".{group}") for resource, _, _ in missing)


def test_every_binding_is_for_the_operators_account_only(template: Template) -> None:
    rendered = template('watchNamespaces=["a"]')
    account = one(rendered, "ServiceAccount")["metadata"]
    for binding in (m for m in rendered if "roleRef" in m):
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
        assert any(m["metadata"]["name"] == binding["roleRef"]["name"] for m in rendered)
