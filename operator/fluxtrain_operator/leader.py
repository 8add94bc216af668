"""Election by Lease: of several replicas one reconciles, the others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kubernetes.aio.client import ApiClient, CoordinationV1Api, V1Lease, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 15, 10, 2
"""As in client-go: a dead leader is replaced within LEASE + RETRY seconds."""


async def lead(
    api: ApiClient, namespace: str, name: str, identity: str, work: Callable[[], Awaitable[None]]
) -> None:
    """Wait for the Lease, then do ``work`` until it ends or the Lease is lost; let go of it at last."""
    ended = asyncio.Event()
    failure: list[BaseException] = []

    async def guarded() -> None:
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()

    async def lost() -> None:
        ended.set()

    lock = _Lock(name, namespace, identity, api)
    config = Config(lock, LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS, guarded, lost)
    election = asyncio.create_task(LeaderElection(config).run())
    waiting = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({election, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (election, waiting):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await _let_go(api, namespace, name, identity)
    if failure:
        raise failure[0]


class _Lock(LeaseLock):  # type: ignore[misc]  # the client has no types
    """The library's lock; its own ``create`` passes an argument that its own client refuses (37.0.2)."""

    async def create(
        self, name: str, namespace: str, election_record: LeaderElectionRecord
    ) -> bool:
        """Create the Lease; False where somebody else was first."""
        spec = self.update_lease(election_record)
        lease = V1Lease(metadata=V1ObjectMeta(name=name), spec=spec)
        try:
            await self.api_instance.create_namespaced_lease(namespace, lease)
        except ApiException:
            return False
        return True


async def _let_go(api: ApiClient, namespace: str, name: str, identity: str) -> None:
    """Empty the Lease if it is still ours, so that the next leader need not wait for it to expire."""
    leases = CoordinationV1Api(api)
    with suppress(Exception):  # it expires by itself
        lease = await leases.read_namespaced_lease(name, namespace)
        if lease.spec.holder_identity == identity:
            lease.spec.holder_identity = ""
            lease.spec.lease_duration_seconds = 1
            await leases.replace_namespaced_lease(name, namespace, lease)
