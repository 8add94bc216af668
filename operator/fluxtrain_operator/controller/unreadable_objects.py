"""Objects that cannot be read: they are skipped, counted and logged, and an event tells their owner.

An object gets one event per generation from each leader, and Kubernetes drops events after an hour. Objects
without a namespace, such as nodes, get none: the operator may create events in watched namespaces only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fluxtrain_operator.controller.applied_objects import Kind
from fluxtrain_operator.controller.pace import Pace
from fluxtrain_operator.errors import ApiError
from fluxtrain_operator.mappings import mapping
from fluxtrain_operator.metrics import Metrics
from fluxtrain_operator.planner.plan import Event

LOG = logging.getLogger(__name__)
Reference = Mapping[str, str]
"""``apiVersion``, ``kind``, ``name``, ``namespace`` and ``uid`` of an object."""
CreateEvent = Callable[[Reference, Event], Awaitable[None]]
"""Creates an event about an object."""
REASON = "Unreadable"
MAX_KNOWN = 1000
"""Objects that are remembered; of more, the oldest are told again when they are read again."""
_EVENTS_PER_SECOND = 5.0
_MAX_LENGTH = 500
_MAX_NAME = 253


class UnreadableObjects:
    """Reports objects that the operator skips."""

    def __init__(self, metrics: Metrics) -> None:
        """Count them in ``metrics``; events wait until `post_events` runs."""
        self._metrics = metrics
        self._known: dict[str, object] = {}  # generations by uid
        self._waiting: dict[str, tuple[Reference, Event]] = {}  # by uid
        self._wake = asyncio.Event()

    def report(self, kind: Kind, manifest: Mapping[str, Any], error: Exception) -> None:
        """Report the object in ``manifest``, of which anything may be malformed."""
        label = kind[1].lower()
        self._metrics.unreadable_objects.labels(label).inc()
        reference = _reference(kind, manifest)
        name = f"{reference['namespace']}/{reference['name']}"
        text = f"{type(error).__name__}: {str(error)[:_MAX_LENGTH]}"
        LOG.error("%s %s is skipped: %s", label, name, text)
        generation = mapping(manifest, "metadata").get("generation")
        uid, is_known = reference["uid"], self._known.get(reference["uid"], self) == generation
        if not uid or not reference["namespace"] or is_known:
            return
        self._known.pop(uid, None)
        self._known[uid] = generation
        self._waiting[uid] = reference, Event("Warning", REASON, f"ignored by the operator: {text}")
        while len(self._known) > MAX_KNOWN:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._waiting.pop(oldest, None)
        self._wake.set()

    async def post_events(self, create_event: CreateEvent) -> None:
        """Create the events by ``create_event`` until cancelled; only the leader calls this."""
        pace = Pace(_EVENTS_PER_SECOND)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await pace.wait()
                reference, event = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await create_event(reference, event)
                except ApiError as error:  # such as a namespace that is being deleted
                    self._known.pop(reference["uid"], None)
                    LOG.warning("no event about %s: %s", reference["name"], error)


def _reference(kind: Kind, manifest: Mapping[str, Any]) -> Reference:
    metadata = mapping(manifest, "metadata")
    identity = {key: _text(metadata.get(key)) for key in ("name", "namespace", "uid")}
    return {"apiVersion": kind[0], "kind": kind[1], **identity}


def _text(value: object) -> str:
    return value[:_MAX_NAME] if isinstance(value, str) else ""
