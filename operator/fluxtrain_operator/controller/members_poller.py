"""Polls /members of rendezvous pods: which pods of a job are silent, earlier than Kubernetes reports it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain_operator import names
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.pace import Pace
from fluxtrain_operator.members import NOT_HEARD, Heard
from fluxtrain_operator.names import Key

MEMBERS_SECONDS = 4.0
"""Polling interval of a job."""
RETRY_SECONDS = 1.0
"""The same while a rendezvous pod that answered before does not."""
SILENT_SECONDS, SILENT_POLLS = 10.0, 3
"""A rendezvous pod that answered before is silent if it has not for this long, and this often in a row."""
_JOBS_PER_SECOND = 100.0
"""Requests per second for all jobs: each costs a millisecond."""

FetchMembers = Callable[[str, int], Awaitable[Heard | None]]
"""Returns which pods the service at an address and port hears of, or None if there is no response."""


@dataclass
class _PolledJob:
    port: int
    task: asyncio.Task[None] | None = None
    uid: str = ""
    """Uid of the rendezvous pod that answered last."""
    answered: float = 0.0
    num_failed: int = 0
    """Polls since that answer."""
    heard: Heard = NOT_HEARD


class MembersPoller:
    """Which pods of each polled job are heard of."""

    def __init__(self, cache: Cache, fetch: FetchMembers, on_change: Callable[[Key], None]) -> None:
        """Poll the rendezvous pods in ``cache``; call ``on_change`` with jobs if that changes."""
        self._cache, self._fetch, self._on_change = cache, fetch, on_change
        self._jobs: dict[Key, _PolledJob] = {}
        self._first_polls = Pace(_JOBS_PER_SECOND)

    def start(self, key: Key, port: int) -> None:
        """Poll the job's rendezvous pod from now on."""
        job = self._jobs.setdefault(key, _PolledJob(port))
        job.port = port
        if job.task is None or job.task.done():
            job.task = asyncio.create_task(self._poll(key, job))

    def stop(self, key: Key) -> None:
        """Stop polling the job."""
        job = self._jobs.pop(key, None)
        if job is not None and job.task is not None:
            job.task.cancel()

    async def close(self) -> None:
        """Stop polling all jobs."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for key in list(self._jobs):
            self.stop(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def heard(self, key: Key) -> Heard:
        """Return which pods of the job are heard of."""
        job = self._jobs.get(key)
        return job.heard if job else NOT_HEARD

    async def _poll(self, key: Key, job: _PolledJob) -> None:
        await self._first_polls.wait()
        while True:
            before, job.heard = job.heard, await self._ask(key, job)
            if job.heard != before:
                self._on_change(key)
            interval = RETRY_SECONDS if job.num_failed else MEMBERS_SECONDS
            await asyncio.sleep(max(interval, len(self._jobs) / _JOBS_PER_SECOND))

    async def _ask(self, key: Key, job: _PolledJob) -> Heard:
        pod = next((pod for pod in self._cache.pods(key) if _serves_members(pod)), None)
        if pod is None:
            job.num_failed = 0
            return NOT_HEARD
        uid = str(pod["metadata"].get("uid", ""))
        heard = await self._fetch(str(pod["status"]["podIP"]), job.port)
        now = asyncio.get_running_loop().time()
        if heard is not None:
            job.uid, job.answered, job.num_failed = uid, now, 0
            return heard
        job.num_failed = job.num_failed + 1 if job.uid == uid else 0
        if job.num_failed >= SILENT_POLLS and now - job.answered >= SILENT_SECONDS:
            return Heard(silent=frozenset({uid}))
        return Heard(silent=job.heard.silent - {job.uid})


def _serves_members(pod: Mapping[str, Any]) -> bool:
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return (
        labels.get(names.LABEL_COMPONENT) == names.RENDEZVOUS
        and notes.get(names.ANNOTATION_RENDEZVOUS) == names.RENDEZVOUS_VERSION
        and "deletionTimestamp" not in metadata
        and status.get("phase") == "Running"
        and bool(status.get("podIP"))
    )
