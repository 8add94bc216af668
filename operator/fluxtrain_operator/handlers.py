"""What kopf tells of: it only fills the store and puts keys on the queue. Only this file knows kopf."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from fluxtrain.contract.resource import GROUP, PLURAL, VERSION
from fluxtrain_operator import names
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.store import Store
from fluxtrain_operator.work_queue import WorkQueue


def registry_of(store: Store, queue: WorkQueue, metrics: Metrics) -> kopf.OperatorRegistry:
    """Return kopf's registry of our three watches: jobs, our pods, nodes."""
    registry = kopf.OperatorRegistry()

    async def job_changed(event: Any, **_: Any) -> None:
        store.is_filled = True
        metrics.heard("fluxtraining")
        echo = event["type"] == "MODIFIED" and store.knows(event["object"])
        key = store.set_job(event["object"], gone=event["type"] == "DELETED")
        if not echo:  # of our own write, which has been acted on
            queue.add(key)
        for waiting in store.waiting_for(key):
            queue.add(waiting)

    async def pod_changed(event: Any, **_: Any) -> None:
        metrics.heard("pod")
        key = store.set_pod(event["object"], gone=event["type"] == "DELETED")
        if key is None:
            return
        if event["type"] is None:  # listed: at the start, or after the watch was lost
            store.doubt(key)
        queue.add(key)

    async def node_changed(event: Any, **_: Any) -> None:
        metrics.heard("node")
        for key in store.set_node(event["object"], gone=event["type"] == "DELETED"):
            queue.add(key)

    def login(**facts: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**facts) or kopf.login_with_kubeconfig(**facts)

    kopf.on.login(registry=registry)(login)
    _fill_first(registry, store)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(job_changed)
    kopf.on.event("", "v1", "pods", registry=registry)(pod_changed)
    kopf.on.event("", "v1", "nodes", registry=registry)(node_changed)
    return registry


def end_with(registry: kopf.OperatorRegistry, rest: Callable[[], Awaitable[None]]) -> None:
    """Have ``rest`` end, when kopf ends, all tasks begun meanwhile.

    It would take them for its own, and wait five seconds for them, while another replica waits for the Lease.
    """

    async def over(**_: Any) -> None:
        await rest()

    kopf.on.cleanup(registry=registry)(over)


def _fill_first(registry: kopf.OperatorRegistry, store: Store) -> None:
    """Fill the store before the first event: kopf holds events back until what has an index is listed.

    A new leader that saw its jobs before their pods would take these for lost.
    """

    async def pod_listed(body: Any, **_: Any) -> None:
        store.set_pod(body)

    async def node_listed(body: Any, **_: Any) -> None:
        store.set_node(body)

    def is_wanted(**_: Any) -> bool:
        return not store.is_filled

    kopf.index("", "v1", "pods", when=is_wanted, registry=registry)(pod_listed)
    kopf.index("", "v1", "nodes", when=is_wanted, registry=registry)(node_listed)


class _NoDiffs(kopf.DiffBaseStorage):  # type: ignore[misc]  # kopf's types are not followed
    """Spares each event several copies of its object: kopf compares old and new for handlers of changes."""

    def build(self, **_: Any) -> None:
        """Return nothing to compare."""

    def fetch(self, **_: Any) -> None:
        """Return nothing to compare with."""

    def store(self, **_: Any) -> None:
        """Store nothing."""


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: our pods only, no events from log lines, nothing that could pause us."""
    found = kopf.OperatorSettings()
    managed = f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"
    found.watching.label_selectors["pods"] = managed
    found.watching.server_timeout = 600
    found.watching.client_timeout = 660
    found.networking.request_timeout = 30
    found.posting.enabled = False
    found.peering.standalone = True
    found.scanning.disabled = (
        True  # the resource is there before we are: no right to list definitions
    )
    found.persistence.finalizer = f"{GROUP}/unused"
    found.persistence.diffbase_storage = _NoDiffs()
    found.process.ultimate_exiting_timeout = 25
    return found
