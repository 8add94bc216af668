"""What kopf tells of jobs: it only fills the store and puts keys on the queue. Only this file knows kopf."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import PLURAL, VERSION
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.work_queue import WorkQueue
from fluxtrain_operator.metrics import Metrics


def registry_of(store: Cache, queue: WorkQueue, metrics: Metrics) -> kopf.OperatorRegistry:
    """Return kopf's registry of one watch, that of jobs."""
    registry = kopf.OperatorRegistry()

    async def job_changed(event: Any, **_: Any) -> None:
        metrics.heard("fluxtraining")
        echo = event["type"] == "MODIFIED" and store.knows(event["object"])
        key = store.set_job(event["object"], gone=event["type"] == "DELETED")
        if not echo:  # of our own write, which has been acted on
            queue.add(key)
        for waiting in store.waiting_for(key):
            queue.add(waiting)

    def login(**facts: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**facts) or kopf.login_with_kubeconfig(**facts)

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(job_changed)
    return registry


def end_with(registry: kopf.OperatorRegistry, rest: Callable[[], Awaitable[None]]) -> None:
    """Have ``rest`` end, when kopf ends, all tasks begun meanwhile.

    It would take them for its own, and wait five seconds for them, while another replica waits for the Lease.
    """

    async def over(**_: Any) -> None:
        await rest()

    kopf.on.cleanup(registry=registry)(over)


class _NoDiffs(kopf.DiffBaseStorage):  # type: ignore[misc]  # kopf's types are not followed
    """Spares each event several copies of its object: kopf compares old and new for handlers of changes."""

    def build(self, **_: Any) -> None:
        """Return nothing to compare."""

    def fetch(self, **_: Any) -> None:
        """Return nothing to compare with."""

    def store(self, **_: Any) -> None:
        """Store nothing."""


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: no events from log lines, nothing that could pause us."""
    found = kopf.OperatorSettings()
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
