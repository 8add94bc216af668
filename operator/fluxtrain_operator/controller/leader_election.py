"""Election by Lease: of several replicas one reconciles, the others stand by."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, CoordinationV1Api, V1Lease, V1LeaseSpec, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException

from fluxtrain_operator.errors import ApiError

LOG = logging.getLogger(__name__)
_FAILURES = (ApiException, aiohttp.ClientError, TimeoutError, OSError)
_NEVER = float("-inf")


@dataclass(frozen=True)
class Terms:
    """How long a Lease holds, in seconds: the values of Kubernetes' own controllers.

    They outlast an API server that restarts, and no training waits for the operator meanwhile.
    """

    lease: int = 15
    """A Lease that has not changed for so long is anybody's."""
    renew: float = 10.0
    """Its holder stops so long after the last renewal, well before anybody else may begin."""
    retry: float = 2.0
    """Between two renewals, and between two looks of those who stand by."""
    request: float = 5.0
    """An API server that takes longer is asked anew."""


TERMS = Terms()
# Linux counts the time asleep only in the former, macOS in the latter.
_UPTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def uptime() -> float:
    """Return the seconds since the machine started, those included in which it or we stood still."""
    return time.clock_gettime(_UPTIME)


class Election:
    """One replica's part in the election.

    What it holds it holds by its own clock, counted from before the renewal was sent. So a replica that was
    frozen, or cut off from the API server, knows that it does not lead any more without asking anybody.
    """

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        terms: Terms = TERMS,
        clock: Callable[[], float] = uptime,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """Stand for the Lease ``name``; ``heard`` is called whenever the API server has answered.

        ``api`` should carry nothing else: a renewal must not wait for a connection.
        """
        self.identity = f"{identity}_{uuid.uuid4().hex[:8]}"  # no two processes are ever the same
        self._leases = CoordinationV1Api(api)
        self._namespace, self._name = namespace, name
        self._terms, self._clock, self._heard = terms, clock, heard
        self._until = _NEVER
        self._known: Any = None
        self._known_since = _NEVER
        self._complaint = ""

    @property
    def holds(self) -> bool:
        """Return whether this replica leads, and no other can."""
        return self._clock() < self._until

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the Lease, then do ``work`` until it ends or the Lease is lost; let go of it at last."""
        while not await self._attempt():
            await asyncio.sleep(self._terms.retry)
        working = asyncio.ensure_future(work())
        keeping = asyncio.create_task(self._keep())
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            for task in (working, keeping):  # the Lease is kept until the work has come to its end
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
            await self._let_go()

    async def _keep(self) -> None:
        """Renew the Lease until it is lost, or may be."""
        while True:
            await asyncio.sleep(min(self._terms.retry, max(0.0, self._until - self._clock())))
            if not self.holds:
                LOG.error("%s leads no longer: its Lease was not renewed in time", self.identity)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until - self._clock()):
                    await self._attempt()

    async def _attempt(self) -> bool:
        """Take or renew the Lease where that is ours to do; return whether we hold it now."""
        begun = self._clock()
        try:
            mine = self.holds and self._known is not None and await self._write(self._known)
            if not mine:  # not held, or somebody else has written
                lease = await self._read()
                mine = self._is_free(lease) and await self._write(lease)
                if not mine:
                    self._until = _NEVER
        except _FAILURES as error:
            self._complain(f"{type(error).__name__}: {_reason(error)}")
            return False
        if mine:
            self._until = begun + self._terms.renew
        self._complain("")
        return mine

    def _is_free(self, lease: Any) -> bool:
        """Return whether ``lease`` is not there, ours, let go of, or has not changed for too long."""
        if lease is None:
            return True
        spec, known = lease.spec, self._known and self._known.spec
        if known is None or (spec.holder_identity, spec.renew_time) != (
            known.holder_identity,
            known.renew_time,
        ):
            self._known_since = self._clock()
        self._known = lease
        if spec.holder_identity in (None, "", self.identity):
            return True
        holders_own = spec.lease_duration_seconds or self._terms.lease
        return self._clock() - self._known_since >= holders_own

    async def _read(self) -> Any:
        """Return the Lease, None where there is none."""
        try:
            lease = await self._leases.read_namespaced_lease(
                self._name, self._namespace, _request_timeout=self._terms.request
            )
        except ApiException as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            lease = None
        self._heard()
        return lease

    async def _write(self, before: Any, *, holder: str | None = None) -> bool:
        """Put our name, or ``holder``, in the place of ``before``; False where somebody else was first."""
        self._known = None
        name, was = self.identity if holder is None else holder, before and before.spec
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        taken = was is None or was.holder_identity != self.identity
        spec = V1LeaseSpec(
            holder_identity=name,
            lease_duration_seconds=self._terms.lease if name else 1,
            acquire_time=now if taken else was.acquire_time,
            renew_time=now,
            lease_transitions=0 if was is None else (was.lease_transitions or 0) + taken,
        )
        metadata = before.metadata if before else V1ObjectMeta(name=self._name)
        return await self._send(V1Lease(metadata=metadata, spec=spec), new=before is None)

    async def _send(self, lease: V1Lease, *, new: bool) -> bool:
        where = (self._namespace,) if new else (self._name, self._namespace)
        send = (
            self._leases.create_namespaced_lease if new else self._leases.replace_namespaced_lease
        )
        try:
            self._known = await send(*where, lease, _request_timeout=self._terms.request)
        except ApiException as error:
            if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                raise
        self._heard()
        return self._known is not None

    async def _let_go(self) -> None:
        """Take our name off the Lease, so that the next leader need not wait for it to expire.

        A renewal that was cut off may have been heard, or is still on its way: look, and look again.
        """
        if not self.holds:
            return
        self._until = _NEVER
        with suppress(*_FAILURES):  # it expires by itself
            for _ in range(2):
                lease = await self._read()
                ours = lease is not None and lease.spec.holder_identity == self.identity
                if not ours or await self._write(lease, holder=""):
                    return

    def _complain(self, text: str) -> None:
        """Log what is wrong, once for as long as it is."""
        if text and text != self._complaint:
            LOG.warning("Lease %s/%s: %s", self._namespace, self._name, text)
        self._complaint = text


class FencedClient(ApiClient):  # type: ignore[misc]  # the client has no types
    """A client that sends no change unless ``election`` is held; reads are free.

    What was sent before the Lease was lost may still arrive after it: the versions and uids that
    changes name are the fence for that.
    """

    def __init__(self, election: Election) -> None:
        """Use the default configuration."""
        super().__init__()
        self._election = election

    async def call_api(self, method: str, url: str, *rest: Any, **options: Any) -> Any:
        """Send a request; ApiError where it would change something and we do not lead."""
        if method != "GET" and not self._election.holds:
            raise ApiError(0, f"{method} {url}: not sent, as this replica does not lead any more")
        return await super().call_api(method, url, *rest, **options)


def _reason(error: BaseException) -> str:
    return str(getattr(error, "reason", "") or error)
