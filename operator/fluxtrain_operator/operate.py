"""The operator's life: win the election, watch, reconcile."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import aiohttp
import kopf
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from fluxtrain.errors import EXIT_USAGE
from fluxtrain_operator import server
from fluxtrain_operator.controller import kopf_handlers as handlers
from fluxtrain_operator.controller.api_client import KubernetesApi
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.informers import Informers
from fluxtrain_operator.controller.leader_election import Election, FencedClient
from fluxtrain_operator.controller.reconcile import Reconciler, is_conflict
from fluxtrain_operator.controller.work_queue import WorkQueue
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.names import Key
from fluxtrain_operator.options import Options, parse

LOG = logging.getLogger("fluxtrain_operator")
NUM_WORKERS = 8
"""Jobs that are reconciled at a time; each waits for the API server most of it."""
MIN_INTERVAL_SECONDS = 0.5
"""Between two reconciles of a job: while its pods come up, one status tells of several."""
NUM_CONNECTIONS = 32
"""To the API server; more at a time make it no faster, and each costs a handshake."""


async def operate(options: Options, stop: asyncio.Event) -> None:
    """Serve the probes, wait for the Lease, reconcile until ``stop`` is set or the Lease is lost."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    metrics, health = Metrics(registry), server.Health()
    close = await server.serve(registry, health, options.address, options.port)
    await _load_credentials()
    lease = options.lease_namespace, options.lease_name, options.identity
    try:
        async with ApiClient() as asking, _client_of_trainers() as http:
            election = Election(asking, *lease, heard=health.hear)

            async def work() -> None:
                metrics.leader.set(1)
                LOG.info("leading as %s", election.identity)
                async with FencedClient(election) as api:
                    await _reconcile_all(options, api, http, metrics, health)
                stop.set()

            leading = asyncio.create_task(election.lead(work))
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
    """List pods and nodes; then have kopf watch the jobs, and reconcile them."""
    store = Cache()

    def failed(key: Key, error: Exception) -> None:
        if is_conflict(error):
            return
        metrics.reconcile_errors.inc()
        LOG.error("%s/%s: %s", *key, error, exc_info=not str(error))

    queue = WorkQueue(failed, MIN_INTERVAL_SECONDS)
    metrics.queue_length.set_function(lambda: len(queue))
    cluster = KubernetesApi(api, http, metrics.asked)
    reconciler = Reconciler(
        store, cluster, metrics, options.image, queue.add, options.supplemental_groups
    )
    feeds = Informers(api, store, metrics, queue.add, options.namespaces)

    async def work(key: Key) -> float | None:
        health.begin(key)
        try:
            return await reconciler.reconcile(key)
        finally:
            health.end(key)

    async def reconcile() -> None:
        # A leader that saw its jobs before their pods would take these for lost.
        await feeds.filled()
        LOG.info("pods and nodes are listed")
        queue.reorder(lambda key: 0 if store.is_short(key) else 1)
        await queue.run(work, NUM_WORKERS)

    tasks = [asyncio.create_task(feeds.run()), asyncio.create_task(reconcile())]

    async def rest() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await reconciler.answers.close()

    registry = handlers.registry_of(store, queue, metrics)
    handlers.end_with(registry, rest)
    watches = kopf.operator(
        registry=registry,
        settings=handlers.settings(),
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
    )
    watching = asyncio.create_task(watches)
    try:  # kopf takes over the signals, so its end is the operator's
        await asyncio.wait({*tasks, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, watching):
            if task.done() and not task.cancelled():
                task.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, rest(), return_exceptions=True)


def _client_of_trainers() -> aiohttp.ClientSession:
    """Return a client without a limit, as waiting for a connection would be taken for no answer."""
    return aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))


async def _load_credentials() -> None:
    """Use the pod's service account, or the kubeconfig of whoever runs this by hand."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        kubernetes_config.load_incluster_config()
    else:
        await kubernetes_config.load_kube_config()
    configuration = Configuration.get_default_copy()
    configuration.connection_pool_maxsize = NUM_CONNECTIONS
    # No proxy and no netrc of the environment: the watches know none, and each look costs 0.3 ms of CPU.
    configuration.client_session_kwargs = {"trust_env": False}
    Configuration.set_default(configuration)


async def main(arguments: list[str] | None = None) -> int:
    """Run the operator until SIGTERM; 1 where the Lease was lost, so that kubelet starts it anew.

    2 where there is no cluster to operate on.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    options, stop = parse(arguments), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        await operate(options, stop)
    except ConfigException as error:
        LOG.error(
            "no cluster to operate on: neither a pod's service account nor a kubeconfig: %s", error
        )
        return EXIT_USAGE
    return 0 if stop.is_set() else 1
