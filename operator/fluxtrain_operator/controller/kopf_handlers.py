"""kopf's part of the operator: credentials, signals, an orderly end; no other module imports kopf.

It watches nothing: a watch of kopf that is refused in one namespace ends the operator of all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import kopf

from fluxtrain.contract.model_base import GROUP


def make_registry(stop: Callable[[], Awaitable[None]]) -> kopf.OperatorRegistry:
    """Return kopf's registry, which calls ``stop``, which ends our tasks, when kopf stops.

    kopf would otherwise wait five seconds for them, and another replica as long for the Lease.
    """
    registry = kopf.OperatorRegistry()

    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    async def cleanup(**_: Any) -> None:
        await stop()

    kopf.on.login(registry=registry)(login)
    kopf.on.cleanup(registry=registry)(cleanup)
    return registry


def run(registry: kopf.OperatorRegistry) -> Coroutine[Any, Any, None]:
    """Return a coroutine that runs until a signal or cancelled."""
    operator: Coroutine[Any, Any, None] = kopf.operator(
        registry=registry, settings=_settings(), standalone=True, clusterwide=True
    )
    return operator


def _settings() -> kopf.OperatorSettings:
    """Return kopf's settings: no events from log records, no peering, no finalizer."""
    settings = kopf.OperatorSettings()
    settings.networking.request_timeout = 30
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/unused"
    settings.process.ultimate_exiting_timeout = 25
    return settings
