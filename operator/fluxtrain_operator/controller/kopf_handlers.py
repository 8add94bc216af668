"""The kopf watch of jobs, which only updates the cache and queues jobs; no other module imports kopf."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import kopf

from fluxtrain.contract.model_base import GROUP
from fluxtrain.contract.resource.fluxtraining import KIND, PLURAL, VERSION
from fluxtrain_operator.base.names import Key
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.list_watch import UnreadableObjects
from fluxtrain_operator.metrics import Metrics


def make_registry(
    cache: Cache, enqueue: Callable[[Key], None], metrics: Metrics, unreadable: UnreadableObjects
) -> kopf.OperatorRegistry:
    """Return kopf's registry with one watch, that of jobs."""
    registry = kopf.OperatorRegistry()

    async def on_job(event: Any, **_: Any) -> None:
        metrics.record_watch_event("fluxtraining")
        is_own_write = event["type"] == "MODIFIED" and cache.has_version(event["object"])
        try:
            key = cache.set_job(event["object"], deleted=event["type"] == "DELETED")
        except Exception as error:  # kopf would retry it
            unreadable.report((f"{GROUP}/{VERSION}", KIND), event["object"], error)
            return
        if not is_own_write:
            enqueue(key)
        for dependent in cache.jobs_after(key):
            enqueue(dependent)

    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(on_job)
    return registry


def add_cleanup(registry: kopf.OperatorRegistry, stop: Callable[[], Awaitable[None]]) -> None:
    """Call ``stop``, which ends our tasks, when kopf stops.

    kopf would otherwise wait five seconds for them, and another replica as long for the Lease.
    """

    async def cleanup(**_: Any) -> None:
        await stop()

    kopf.on.cleanup(registry=registry)(cleanup)


def run(registry: kopf.OperatorRegistry, namespaces: tuple[str, ...]) -> Coroutine[Any, Any, None]:
    """Return a coroutine that watches the jobs of ``namespaces``, or of all, until a signal or cancelled."""
    operator: Coroutine[Any, Any, None] = kopf.operator(
        registry=registry,
        settings=_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
    return operator


class _NoDiffs(kopf.DiffBaseStorage):  # type: ignore[misc]  # kopf's types are not followed
    """Stores no last-handled state: kopf would copy each object several times to compare with it."""

    def build(self, **_: Any) -> None: ...

    def fetch(self, **_: Any) -> None: ...

    def store(self, **_: Any) -> None: ...


def _settings() -> kopf.OperatorSettings:
    """Return kopf's settings: no events from log records, no peering, no finalizer."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = 600
    settings.watching.client_timeout = 660
    settings.networking.request_timeout = 30
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True  # the CRD exists already, and we may not list CRDs
    settings.persistence.finalizer = f"{GROUP}/unused"
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.process.ultimate_exiting_timeout = 25
    return settings
