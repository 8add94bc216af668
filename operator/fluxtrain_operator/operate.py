"""Run the operator: leader election, informers, reconciles, probes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from fluxtrain.errors import EXIT_USAGE
from fluxtrain_operator import server
from fluxtrain_operator.controller import kopf_handlers
from fluxtrain_operator.controller.api_client import KubernetesApi
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.fault_budget import FaultBudget
from fluxtrain_operator.controller.informers import Informers
from fluxtrain_operator.controller.leader_election import FencedClient, LeaderElector
from fluxtrain_operator.controller.reconcile import Reconciler, is_conflict
from fluxtrain_operator.controller.work_queue import WorkQueue
from fluxtrain_operator.log_format import configure_logging
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.names import Key
from fluxtrain_operator.node_health import NodeMarks
from fluxtrain_operator.options import Options, parse

LOG = logging.getLogger("fluxtrain_operator")
NUM_WORKERS = 8
"""Jobs reconciled concurrently; each waits for the API server most of the time."""
MIN_INTERVAL_SECONDS = 0.5
"""Minimum interval of a job's reconciles: one status then reports several pods that start."""
NUM_CONNECTIONS = 32
"""Connections to the API server; more are no faster, and each needs a handshake."""


async def operate(options: Options, stop: asyncio.Event) -> None:
    """Serve the probes, acquire the Lease, reconcile until ``stop`` is set or the Lease is lost."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    metrics, health = Metrics(registry), server.Health()
    close = await server.serve(registry, health, options.address, options.port)
    lease = options.lease_namespace, options.lease_name, options.identity
    try:
        await _load_credentials()
        async with ApiClient() as lease_client, _trainer_client() as http:
            elector = LeaderElector(lease_client, *lease, on_response=health.record_response)

            async def work() -> None:
                metrics.leader.set(1)
                LOG.info("leading as %s", elector.identity)
                async with FencedClient(elector) as api:
                    await _reconcile_all(options, api, http, metrics, health)
                stop.set()

            leading = asyncio.create_task(elector.run(work))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not leading.done():
                leading.cancel()
            try:
                await leading
            except asyncio.CancelledError:
                LOG.info("stopped")
    finally:
        await close()


async def _reconcile_all(
    options: Options,
    api: ApiClient,
    http: aiohttp.ClientSession,
    metrics: Metrics,
    health: server.Health,
) -> None:
    """Run the informers, the kopf watch of jobs and the reconciles until one of them ends."""
    cache = Cache(NodeMarks(options.node_health))

    def on_error(key: Key, error: Exception) -> None:
        if is_conflict(error):
            return
        metrics.reconcile_errors.inc()
        LOG.error("%s/%s: %s", *key, error, exc_info=not str(error))

    queue = WorkQueue(on_error, MIN_INTERVAL_SECONDS)
    metrics.queue_length.set_function(lambda: len(queue))
    client = KubernetesApi(api, http, metrics.count_request)
    informers = Informers(api, cache, metrics, queue.add, options.namespaces)
    reconciler = Reconciler(
        cache,
        client,
        metrics,
        options.image,
        queue.add,
        informers.has_groups,
        options.rendezvous_image,
        options.pod_defaults,
        FaultBudget(options.disruption_percent),
    )

    async def work(key: Key) -> float | None:
        health.start_work(key)
        try:
            return await reconciler.reconcile(key)
        finally:
            health.finish_work(key)

    async def reconcile() -> None:
        # Without its pods in the cache, a job would be taken for one that has lost them.
        await informers.wait_for_sync()
        LOG.info("caches synced")
        queue.sort(lambda key: 0 if cache.misses_pods(key) else 1)
        await queue.run(work, NUM_WORKERS)

    tasks = [asyncio.create_task(informers.run()), asyncio.create_task(reconcile())]

    async def stop_tasks() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await reconciler.poller.close()
        await reconciler.members.close()

    registry = kopf_handlers.make_registry(cache, queue, metrics)
    kopf_handlers.add_cleanup(registry, stop_tasks)
    watching = asyncio.create_task(kopf_handlers.run(registry, options.namespaces))
    try:  # kopf handles the signals: when it ends, the operator ends
        await asyncio.wait({*tasks, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, watching):
            if task.done() and not task.cancelled():
                task.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, stop_tasks(), return_exceptions=True)


def _trainer_client() -> aiohttp.ClientSession:
    """Return a client without a connection limit: waiting for a connection would count as no response."""
    return aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))


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
