"""Run the operator: leader election, informers, reconciles, probes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import aiohttp
from aiohttp import web
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from fluxtrain.errors import EXIT_USAGE
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.base.node_health import NodeMarks
from fluxtrain_operator.controller import kopf_handlers
from fluxtrain_operator.controller.api_client import KubernetesApi
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.executor import FaultBudget
from fluxtrain_operator.controller.informers import Informers
from fluxtrain_operator.controller.leader_election import (
    FencedClient,
    LeaderElector,
    NamespaceClaims,
)
from fluxtrain_operator.controller.list_watch import Reference, UnreadableObjects
from fluxtrain_operator.controller.reconcile import Reconciler, is_conflict
from fluxtrain_operator.controller.work_queue import WorkQueue
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.options import Options, configure_logging, parse
from fluxtrain_operator.planner.plan import Event

LOG = logging.getLogger("fluxtrain_operator")
NUM_WORKERS = 10
"""Jobs reconciled concurrently, at most 8 of one namespace; each mostly waits for the API server."""
MIN_INTERVAL_SECONDS = 0.5
"""Minimum interval of a job's reconciles: one status then reports several pods that start."""
UNSERVED_SECONDS = 5.0
"""Until the next look at whether the namespace of a job is served again."""
NUM_CONNECTIONS = 32
"""Connections to the API server; more are no faster, and each needs a handshake."""


async def operate(options: Options, stop: asyncio.Event) -> None:
    """Serve the probes and run a replica until ``stop`` is set or the Lease is lost."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    metrics, health = Metrics(registry), Health()
    close = await serve(registry, health, options.address, options.port)
    lease = options.lease_namespace, options.lease_name, options.identity
    try:
        await _load_credentials()
        # without a limit: waiting for a connection would count as no response of a trainer
        connector = aiohttp.TCPConnector(limit=0)
        trainers = aiohttp.ClientSession(trust_env=False, connector=connector)
        async with ApiClient() as lease_client, trainers as http:
            elector = LeaderElector(lease_client, *lease, on_response=health.record_response)
            async with FencedClient(elector) as api:
                replica = _Replica(options, elector, api, http, metrics, health)
                running = asyncio.create_task(replica.run(stop))
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                running.cancel()
                try:
                    await running
                except asyncio.CancelledError:
                    LOG.info("stopped")
    finally:
        await close()


class _Replica:
    """One process of the operator: watches all objects, and reconciles the jobs while it leads."""

    def __init__(
        self,
        options: Options,
        elector: LeaderElector,
        api: ApiClient,
        http: aiohttp.ClientSession,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._elector = elector
        self._metrics, self._health = metrics, health
        self._cache = Cache(NodeMarks(options.node_health))
        self._queue = WorkQueue(self._on_error, MIN_INTERVAL_SECONDS)
        metrics.queue_length.set_function(lambda: len(self._queue))
        self._client = client = KubernetesApi(api, http, metrics.count_request)
        self._unreadable = UnreadableObjects(metrics)
        self._informers = Informers(
            api,
            self._cache,
            metrics,
            self._unreadable,
            self._enqueue,
            options.namespaces,
            options.watch_nodes,
        )
        release = f"{options.lease_namespace}/{options.lease_name}"
        self._claims = claims = NamespaceClaims(api, release)
        metrics.foreign_namespaces.set_function(lambda: claims.num_others)
        health.unserved = lambda: self._informers.unserved
        self._reconciler = Reconciler(
            self._cache,
            client,
            metrics,
            options.image,
            self._enqueue,
            self._informers.has_groups,
            options.rendezvous_image,
            options.pod_defaults,
            options.job_policy,
            options.network_rules,
            FaultBudget(options.disruption_percent),
            admit=self._admit,
        )

    def _enqueue(self, key: Key) -> None:
        """Queue a job if this replica leads; a new leader queues all."""
        if self._elector.is_leader:
            self._queue.add(key)

    async def _admit(self, namespace: str) -> float:
        """Return 0 if the jobs of ``namespace`` can be reconciled, else the seconds until the next try."""
        if self._informers.why_unserved(namespace):
            return UNSERVED_SECONDS
        return await self._claims.try_claim(namespace)

    def _on_error(self, key: Key, error: Exception) -> None:
        if not is_conflict(error):
            self._metrics.reconcile_errors.inc()
            LOG.error("%s/%s: %s", *key, error, exc_info=not str(error))

    async def run(self, stop: asyncio.Event) -> None:
        """Watch, and reconcile while leading, until the Lease is lost; set ``stop`` when kopf ends."""
        informing, electing = map(asyncio.create_task, (self._informers.run(), self._elect()))

        async def stop_tasks() -> None:
            for task in (electing, informing):  # in this order: the Lease is released first
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        registry = kopf_handlers.make_registry(stop_tasks)
        watching = asyncio.create_task(kopf_handlers.run(registry))
        tasks = informing, electing, watching
        try:  # kopf handles the signals: when it ends, the operator ends
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()
            if watching.done() or electing.cancelled():
                stop.set()
        finally:
            await stop_tasks()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _elect(self) -> None:
        """Compete for the Lease once a namespace is served; end when the Lease is lost."""
        await self._informers.wait_for_sync()
        LOG.info("caches synced")
        await self._elector.run(self._lead)

    async def _lead(self) -> None:
        """Reconcile all jobs, first those that miss pods, then those that change."""
        self._metrics.leader.set(1)
        LOG.info("leading as %s", self._elector.identity)
        for key in sorted(self._cache.jobs, key=lambda key: not self._cache.misses_pods(key)):
            self._queue.add(key)
        posting = asyncio.create_task(self._unreadable.post_events(self._create_event))
        renewing = asyncio.create_task(self._claims.renew(self._informers.active_namespaces))
        try:
            await self._queue.run(self._work, NUM_WORKERS)
        finally:
            posting.cancel()
            renewing.cancel()
            await self._reconciler.poller.close()
            await self._reconciler.members.close()

    async def _create_event(self, regarding: Reference, event: Event) -> None:
        await self._client.create_event_about(regarding, event, time.time())

    async def _work(self, key: Key) -> float | None:
        self._health.start_work(key)
        try:
            return await self._reconciler.reconcile(key)
        finally:
            self._health.finish_work(key)


async def _load_credentials() -> None:
    """Use the pod's service account, or the kubeconfig outside a cluster."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        kubernetes_config.load_incluster_config()
    else:
        await kubernetes_config.load_kube_config()
    configuration = Configuration.get_default_copy()
    configuration.connection_pool_maxsize = NUM_CONNECTIONS
    # No proxy and no netrc from the environment: kopf ignores them too, and each lookup costs 0.3 ms of CPU.
    configuration.client_session_kwargs = {"trust_env": False}
    Configuration.set_default(configuration)


async def main(arguments: list[str] | None = None) -> int:
    """Run the operator until SIGTERM; return 1 if the Lease was lost, 2 without cluster credentials."""
    options, stop = parse(arguments), asyncio.Event()
    configure_logging(options.log_format)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        await operate(options, stop)
    except ConfigException as error:
        LOG.error("no cluster credentials, neither a service account nor a kubeconfig: %s", error)
        return EXIT_USAGE
    return 0 if stop.is_set() else 1


STUCK_SECONDS = 300.0
"""A reconcile that takes longer is stuck: the liveness probe fails and kubelet restarts the replica."""
SILENT_SECONDS = 10.0
"""A replica without a response from the API server for so long could not lead: it is not ready."""


class Health:
    """What the liveness and readiness probes report."""

    def __init__(self) -> None:
        """Start unready, as the API server has not responded yet."""
        self._last_response = float("-inf")
        self._started: dict[object, float] = {}
        self.unserved: Callable[[], tuple[bool, list[str]]] = lambda: (False, [])

    def record_response(self) -> None:
        self._last_response = time.monotonic()

    def start_work(self, work: object) -> None:
        self._started[work] = time.monotonic()

    def finish_work(self, work: object) -> None:
        self._started.pop(work, None)

    def readiness(self) -> tuple[bool, str]:
        """Return whether this replica leads or could take over, and a text that says why not.

        One namespace that is served suffices: the text names each that is not.
        """
        no_namespace, unserved = self.unserved()
        if not no_namespace and time.monotonic() - self._last_response >= SILENT_SECONDS:
            return False, "no response from the API server\n"
        return not no_namespace, "\n".join([*([] if no_namespace else ["ok"]), *unserved, ""])

    @property
    def alive(self) -> bool:
        """Return whether no work is stuck."""
        now = time.monotonic()
        return all(now - started < STUCK_SECONDS for started in self._started.values())


async def serve(
    registry: CollectorRegistry, health: Health, address: str, port: int
) -> Callable[[], Awaitable[None]]:
    """Serve on ``address``, or on every one, until the returned function is called and awaited."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    async def healthz(request: web.Request) -> web.Response:
        return _probe(health.alive, "ok\n" if health.alive else "a reconcile is stuck\n")

    async def readyz(request: web.Request) -> web.Response:
        return _probe(*health.readiness())

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address or None, port).start()
    return runner.cleanup


def _probe(passed: bool, text: str) -> web.Response:
    return web.Response(
        text=text, status=HTTPStatus.OK if passed else HTTPStatus.SERVICE_UNAVAILABLE
    )
