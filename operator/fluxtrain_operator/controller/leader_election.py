"""Leader election by Lease: of several replicas one reconciles, the others stand by.

Of several releases that watch a namespace one reconciles its jobs, which another Lease there decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
from kubernetes.aio.client import ApiClient, CoordinationV1Api, V1Lease, V1LeaseSpec, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException

from fluxtrain_operator.base import names
from fluxtrain_operator.base.errors import ApiError

LOG = logging.getLogger(__name__)
_FAILURES = (ApiException, aiohttp.ClientError, TimeoutError, OSError)
_NEVER = float("-inf")


@dataclass(frozen=True)
class LeaseTiming:
    """The durations of the election in seconds, by default those of Kubernetes' own controllers."""

    lease_duration: int = 15
    """A Lease that has not changed for so long may be taken by another replica."""
    renew_deadline: float = 10.0
    """The leader stops so long after its last renewal, before another replica may start."""
    retry_period: float = 2.0
    """Interval of renewals, and of the reads of replicas that stand by."""
    request_timeout: float = 5.0


DEFAULT_TIMING = LeaseTiming()
# CLOCK_MONOTONIC includes the time of a suspended machine on macOS, but not on Linux.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time() -> float:
    """Return the seconds since the machine booted, including the time for which it was suspended."""
    return time.clock_gettime(_BOOT_CLOCK)


class LeaderElector:
    """One replica's part in the election.

    Leadership ends by the local clock, counted from before the renewal was sent. A replica that was
    frozen, or is cut off from the API server, therefore stops without any request.
    """

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        timing: LeaseTiming = DEFAULT_TIMING,
        clock: Callable[[], float] = boot_time,
        on_response: Callable[[], None] = lambda: None,
        is_shared: bool = False,
    ) -> None:
        """Compete for the Lease ``name``; call ``on_response`` with every response of the API server.

        ``api`` must be used for nothing else: a renewal must not wait for a connection. Another process may
        have the same ``identity`` only if it ``is_shared``.
        """
        self.identity = identity if is_shared else f"{identity}_{uuid.uuid4().hex[:8]}"
        self._leases = CoordinationV1Api(api)
        self._namespace, self._name = namespace, name
        self._timing, self._clock, self._on_response = timing, clock, on_response
        self._leads_until = _NEVER
        self._observed: Any = None
        self._observed_at = _NEVER
        self._last_warning = ""

    @property
    def is_leader(self) -> bool:
        """Return whether this replica is the leader, so that no other can be."""
        return self._clock() < self._leads_until

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Acquire the Lease, then run ``work`` until it ends or the Lease is lost; release the Lease."""
        while not await self.try_acquire_or_renew():
            await asyncio.sleep(self._timing.retry_period)
        working = asyncio.ensure_future(work())
        renewing = asyncio.create_task(self._renew())
        try:
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            for task in (working, renewing):  # in this order: renew until the work has ended
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
            await self._release()

    async def _renew(self) -> None:
        """Renew the Lease until it is lost or the renew deadline has passed."""
        while True:
            left = max(0.0, self._leads_until - self._clock())
            await asyncio.sleep(min(self._timing.retry_period, left))
            if not self.is_leader:
                LOG.error("%s lost the Lease: not renewed in time", self.identity)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._leads_until - self._clock()):
                    await self.try_acquire_or_renew()

    @property
    def other(self) -> str:
        """Return the other holder of the Lease, as it was last read; empty if there is none."""
        holder = self._observed.spec.holder_identity if self._observed else ""
        return "" if holder in (None, self.identity) else str(holder)

    async def try_acquire_or_renew(self) -> bool:
        """Write the Lease if it is ours or available; return whether this replica is the leader now."""
        started = self._clock()
        try:
            renewed = (
                self.is_leader and self._observed is not None and await self._write(self._observed)
            )
            if not renewed:  # not the leader, or another client has written the Lease
                lease = await self._read()
                renewed = self._is_available(lease) and await self._write(lease)
                if not renewed:
                    self._leads_until = _NEVER
        except _FAILURES as error:
            reason = getattr(error, "reason", "") or error
            self._warn_once(f"{type(error).__name__}: {reason}")
            return False
        if renewed:
            self._leads_until = started + self._timing.renew_deadline
        self._last_warning = ""
        return renewed

    def _is_available(self, lease: Any) -> bool:
        """Return whether ``lease`` is missing, ours, released, or unchanged for its duration."""
        if lease is None:
            return True
        spec, observed = lease.spec, self._observed and self._observed.spec
        if observed is None or (spec.holder_identity, spec.renew_time) != (
            observed.holder_identity,
            observed.renew_time,
        ):
            self._observed_at = self._clock()
        self._observed = lease
        if spec.holder_identity in (None, "", self.identity):
            return True
        duration = spec.lease_duration_seconds or self._timing.lease_duration
        return self._clock() - self._observed_at >= duration

    async def _read(self) -> Any:
        try:
            lease = await self._leases.read_namespaced_lease(
                self._name, self._namespace, _request_timeout=self._timing.request_timeout
            )
        except ApiException as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            lease = None
        self._on_response()
        return lease

    async def _write(self, before: Any, *, holder: str | None = None) -> bool:
        """Replace ``before`` with a Lease held by us, or by ``holder``; return False on a conflict."""
        self._observed = None
        name, old = self.identity if holder is None else holder, before and before.spec
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        acquired = old is None or old.holder_identity != self.identity
        spec = V1LeaseSpec(
            holder_identity=name,
            lease_duration_seconds=self._timing.lease_duration if name else 1,
            acquire_time=now if acquired else old.acquire_time,
            renew_time=now,
            lease_transitions=0 if old is None else (old.lease_transitions or 0) + acquired,
        )
        metadata = before.metadata if before else V1ObjectMeta(name=self._name)
        return await self._send(V1Lease(metadata=metadata, spec=spec), is_new=before is None)

    async def _send(self, lease: V1Lease, *, is_new: bool) -> bool:
        leases = self._leases
        send = leases.create_namespaced_lease if is_new else leases.replace_namespaced_lease
        names = (self._namespace,) if is_new else (self._name, self._namespace)
        try:
            self._observed = await send(
                *names, lease, _request_timeout=self._timing.request_timeout
            )
        except ApiException as error:
            if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                raise
        self._on_response()
        return self._observed is not None

    async def _release(self) -> None:
        """Clear the holder, so that the next leader need not wait until the Lease expires.

        A cancelled renewal may still be processed by the API server: on a conflict, try once more.
        """
        if not self.is_leader:
            return
        self._leads_until = _NEVER
        with suppress(*_FAILURES):  # otherwise it expires
            for _ in range(2):
                lease = await self._read()
                is_ours = lease is not None and lease.spec.holder_identity == self.identity
                if not is_ours or await self._write(lease, holder=""):
                    return

    def _warn_once(self, text: str) -> None:
        """Log a warning, unless the last one was the same and no request has succeeded since."""
        if text != self._last_warning:
            LOG.warning("Lease %s/%s: %s", self._namespace, self._name, text)
        self._last_warning = text


CLAIM_TIMING = LeaseTiming(
    lease_duration=names.CLAIM_SECONDS, renew_deadline=150.0, retry_period=60.0
)
_CLAIM_ERROR_SECONDS = 5.0
"""Until the next try after a failed request."""


class _Claim(NamedTuple):
    """What a release knows of the Lease of one namespace."""

    elector: LeaderElector
    lock: asyncio.Lock
    """Held during a try, so that the other jobs of the namespace wait for its result."""


class NamespaceClaims:
    """The namespaces whose jobs this release reconciles; those that another has claimed are left alone."""

    def __init__(
        self,
        api: ApiClient,
        holder: str,
        *,
        timing: LeaseTiming = CLAIM_TIMING,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """Claim namespaces for ``holder``, the name that all replicas of this release share."""
        self._api, self._holder, self._timing, self._clock = api, holder, timing, clock
        self._claims: dict[str, _Claim] = {}
        self._next_try: dict[str, float] = {}
        self._others: dict[str, str] = {}

    @property
    def num_others(self) -> int:
        return len(self._others)

    async def try_claim(self, namespace: str) -> float:
        """Return 0 if the jobs of ``namespace`` are ours, else the seconds until the next try."""
        elector, lock = self._claim(namespace)
        async with lock:
            left = self._next_try.get(namespace, _NEVER) - self._clock()
            if elector.is_leader or left > 0:
                return 0.0 if elector.is_leader else left
            if await elector.try_acquire_or_renew():
                if self._others.pop(namespace, ""):
                    LOG.warning("%s: its jobs are reconciled here from now on", namespace)
                return 0.0
            other = elector.other
            if other and self._others.get(namespace) != other:
                self._others[namespace] = other
                LOG.warning("%s: its jobs are left to %s, which claims it", namespace, other)
            left = self._timing.retry_period if other else _CLAIM_ERROR_SECONDS
            self._next_try[namespace] = self._clock() + left
            return left

    async def renew(self, namespaces: Callable[[], Iterable[str]]) -> None:
        """Renew our claims of ``namespaces`` until cancelled; the others expire."""
        while True:
            await asyncio.sleep(self._timing.retry_period)
            for namespace in sorted(namespaces()):
                elector, lock = self._claim(namespace)
                async with lock:
                    if elector.is_leader:
                        await elector.try_acquire_or_renew()

    def _claim(self, namespace: str) -> _Claim:
        if namespace not in self._claims:
            elector = LeaderElector(
                self._api,
                namespace,
                names.CLAIM,
                self._holder,
                timing=self._timing,
                clock=self._clock,
                is_shared=True,
            )
            self._claims[namespace] = _Claim(elector, asyncio.Lock())
        return self._claims[namespace]


class FencedClient(ApiClient):  # type: ignore[misc]  # the client has no types
    """A client that sends writes only while ``elector`` is the leader; it always sends reads.

    A write that was sent before the Lease was lost may arrive after it: resource versions and uids in
    the writes protect against that.
    """

    def __init__(self, elector: LeaderElector) -> None:
        super().__init__()
        self._elector = elector

    async def call_api(self, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        """Send a request; raise ApiError for a write if this replica is not the leader."""
        if method != "GET" and not self._elector.is_leader:
            raise ApiError(0, f"{method} {url}: not sent, this replica is not the leader")
        return await super().call_api(method, url, *args, **kwargs)
