"""Polls the /progress of training pods, independently of reconciles: a pod that hangs delays no job.

The rendezvous pod answers too, with what agents report of their ranks: one that is frozen does not answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fluxtrain.contract.process import FINISH
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import Key, mapping
from fluxtrain_operator.base.reports import NO_MEMBERS, MembersReport, Progress
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.controller.work_queue import Pace

PROGRESS_SECONDS = 10.0
"""Polling interval of a job."""
_SILENT_SECONDS = 20.0
"""If rank 0 has made no progress for this long, all pods are polled."""
_MAX_REQUESTS = 256  # each needs an open file until its timeout
_MAX_JOBS = 64
_FIRST_POLLS_PER_SECOND = 50.0
"""Jobs per second that are polled for the first time: a new leader polls all pods of all jobs."""
_MAX_SILENT_PER_SECOND = 25.0
"""Requests per second to the pods of all jobs without a response: each costs a millisecond."""

FetchProgress = Callable[[str, int], Awaitable[Progress | None]]
"""Returns the progress at an address and port, or None if there is no response."""


@dataclass(frozen=True)
class PodProgress:
    """The progress that the pod with ``uid`` reported."""

    uid: str
    progress: Progress
    received: float = field(default_factory=time.monotonic, compare=False)
    """Monotonic time of the response."""


@dataclass
class _PolledJob:
    port: int
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    pods: frozenset[str] = frozenset()
    """Uids of the running pods at the last poll."""
    latest: PodProgress | None = None
    task: asyncio.Task[None] | None = None


class ProgressPoller:
    """The latest progress of each polled job."""

    def __init__(
        self,
        cache: Cache,
        fetch: FetchProgress,
        on_change: Callable[[Key], None],
        interval_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        """Poll the running pods in ``cache``; call ``on_change`` with jobs whose progress changed."""
        self._cache, self._fetch, self._on_change = cache, fetch, on_change
        self._interval_seconds = interval_seconds
        self._jobs: dict[Key, _PolledJob] = {}
        self._request_slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._job_slots = asyncio.Semaphore(_MAX_JOBS)
        self._first_polls = Pace(_FIRST_POLLS_PER_SECOND)
        self._silent: dict[Key, int] = {}  # number of pods of each job without any response
        self._num_silent = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, key: Key, port: int) -> None:
        """Poll the job's pods from now on; poll at once if pods of a job with progress came or went."""
        job = self._jobs.setdefault(key, _PolledJob(port))
        job.port = port
        if job.task is None or job.task.done():
            job.task = asyncio.create_task(self._poll(key, job))
        elif job.latest is not None and job.pods != self._addresses(key).keys():
            job.wake.set()

    def stop(self, key: Key) -> None:
        """Stop polling the job and drop its progress."""
        job = self._jobs.pop(key, None)
        self._set_silent(key, 0)
        if job is not None and job.task is not None:
            job.task.cancel()

    def rank_0(self, key: Key) -> Progress | None:
        """Return the latest progress of rank 0; None without a response, or if its pod has stopped."""
        progress = self.lowest_rank(key)
        return progress if progress is not None and _is_rank_0(progress) else None

    def lowest_rank(self, key: Key) -> Progress | None:
        """Return the latest progress of rank 0, or of the lowest rank that responded instead of it.

        If no trainer did, only what agents report.
        """
        latest = job.latest if (job := self._jobs.get(key)) else None
        if latest is None or latest.uid not in self._addresses(key):
            return None
        return replace(latest.progress, age=time.monotonic() - latest.received)

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for key in list(self._jobs):
            self.stop(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, key: Key, job: _PolledJob) -> None:
        await self._first_polls.wait()
        while True:
            job.wake.clear()
            job.pods = frozenset(self._addresses(key))
            async with self._job_slots:
                before, job.latest = job.latest, await self._fetch_job(key, job)
            self._set_silent(key, 0 if _has_response(job.latest) else len(job.pods))
            if job.latest != before:
                self._on_change(key)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval(job)):
                    await job.wake.wait()

    def _interval(self, job: _PolledJob) -> float:
        """Return the seconds until the next poll: longer if very many pods do not respond."""
        is_silent = not _has_response(job.latest)
        seconds = self._num_silent / _MAX_SILENT_PER_SECOND if is_silent else 0.0
        return max(self._interval_seconds, seconds)

    def _set_silent(self, key: Key, num_pods: int) -> None:
        self._num_silent += num_pods - self._silent.pop(key, 0)
        if num_pods:
            self._silent[key] = num_pods

    async def _fetch_job(self, key: Key, job: _PolledJob) -> PodProgress | None:
        """Return the progress of rank 0: from the pod that had it before, otherwise from any other.

        If rank 0 does not respond, the lowest rank that does shows whether the job makes progress. If rank 0
        makes none, all ranks show whether another does, and which of them stopped first; agents report those
        that do not respond.
        """
        pods, latest = self._addresses(key), job.latest
        if latest is not None and _is_rank_0(latest.progress) and latest.uid in pods:
            progress = await self._fetch_pod(key, latest.uid, pods.pop(latest.uid), job.port)
            if progress is not None and _is_rank_0(progress):
                silent = (progress.seconds_since_progress or 0.0) >= _SILENT_SECONDS
                asks_others = progress.phase == FINISH or silent  # it may wait for them
                others = await self._fetch_pods(key, pods, job.port) if asks_others else []
                return _merged([PodProgress(latest.uid, progress), *others])
        return _merged(await self._fetch_pods(key, pods, job.port))

    async def _fetch_pods(self, key: Key, pods: Mapping[str, str], port: int) -> list[PodProgress]:
        """Return the progress of those of ``pods``, addresses by uid, that respond."""
        reports = await asyncio.gather(
            *(self._fetch_pod(key, uid, address, port) for uid, address in pods.items())
        )
        return [PodProgress(u, p) for u, p in zip(pods, reports, strict=True) if p is not None]

    async def _fetch_pod(self, key: Key, uid: str, address: str, port: int) -> Progress | None:
        async with self._request_slots:
            progress = await self._fetch(address, port)
        if progress is None or not progress.by_agents:
            return progress and progress.in_pod(uid)
        by_uid = {pod["metadata"].get("uid"): pod for pod in self._cache.pods(key)}
        labels = mapping(mapping(by_uid.get(uid, {}), "metadata"), "labels")
        is_service = labels.get(names.LABEL_COMPONENT) == names.RENDEZVOUS
        return progress.of_pods(by_uid) if is_service else None

    def _addresses(self, key: Key) -> dict[str, str]:
        """Return the addresses of the running pods by uid."""
        return {
            str(pod["metadata"].get("uid", "")): str(status["podIP"])
            for pod in self._cache.pods(key)
            if (status := mapping(pod, "status")).get("phase") == "Running"
            if status.get("podIP")
        }


def _is_rank_0(progress: Progress) -> bool:
    return progress.rank == 0 and not progress.by_agents


def _has_response(latest: PodProgress | None) -> bool:
    return latest is not None and not latest.progress.by_agents


def _merged(reports: list[PodProgress]) -> PodProgress | None:
    """Return the report of the lowest rank, with the ranks of all; None without reports.

    What agents report counts for the ranks of which no trainer responded.
    """
    ordered = sorted(reports, key=lambda report: (report.progress.by_agents, report.progress.rank))
    lowest = next(iter(ordered), None)
    if lowest is None or len(reports) == 1:
        return lowest
    progress = lowest.progress.with_ranks(report.progress for report in reversed(ordered))
    return replace(lowest, progress=progress)


MEMBERS_SECONDS = 4.0
"""Polling interval of a job."""
RETRY_SECONDS = 1.0
"""The same while a rendezvous pod that answered before does not."""
SILENT_SECONDS, SILENT_POLLS = 10.0, 3
"""A rendezvous pod that answered before is silent if it has not for this long, and this often in a row."""
_JOBS_PER_SECOND = 100.0
"""Requests per second for all jobs: each costs a millisecond."""

FetchMembers = Callable[[str, int], Awaitable[MembersReport | None]]
"""Returns which pods the service at an address and port hears of, or None if there is no response."""


@dataclass
class _PolledMembers:
    port: int
    task: asyncio.Task[None] | None = None
    uid: str = ""
    """Uid of the rendezvous pod that answered last."""
    answered: float = 0.0
    num_failed: int = 0
    """Polls since that answer."""
    heard: MembersReport = NO_MEMBERS


class MembersPoller:
    """Which pods of each polled job are heard of."""

    def __init__(self, cache: Cache, fetch: FetchMembers, on_change: Callable[[Key], None]) -> None:
        """Poll the rendezvous pods in ``cache``; call ``on_change`` with jobs if that changes."""
        self._cache, self._fetch, self._on_change = cache, fetch, on_change
        self._jobs: dict[Key, _PolledMembers] = {}
        self._first_polls = Pace(_JOBS_PER_SECOND)

    def start(self, key: Key, port: int) -> None:
        job = self._jobs.setdefault(key, _PolledMembers(port))
        job.port = port
        if job.task is None or job.task.done():
            job.task = asyncio.create_task(self._poll(key, job))

    def stop(self, key: Key) -> None:
        job = self._jobs.pop(key, None)
        if job is not None and job.task is not None:
            job.task.cancel()

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for key in list(self._jobs):
            self.stop(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def heard(self, key: Key) -> MembersReport:
        job = self._jobs.get(key)
        return job.heard if job else NO_MEMBERS

    async def _poll(self, key: Key, job: _PolledMembers) -> None:
        await self._first_polls.wait()
        while True:
            before, job.heard = job.heard, await self._ask(key, job)
            if job.heard != before:
                self._on_change(key)
            interval = RETRY_SECONDS if job.num_failed else MEMBERS_SECONDS
            await asyncio.sleep(max(interval, len(self._jobs) / _JOBS_PER_SECOND))

    async def _ask(self, key: Key, job: _PolledMembers) -> MembersReport:
        pod = next((pod for pod in self._cache.pods(key) if _serves_members(pod)), None)
        if pod is None:
            job.num_failed = 0
            return NO_MEMBERS
        uid = str(pod["metadata"].get("uid", ""))
        heard = await self._fetch(str(pod["status"]["podIP"]), job.port)
        now = asyncio.get_running_loop().time()
        if heard is not None:
            job.uid, job.answered, job.num_failed = uid, now, 0
            return heard
        job.num_failed = job.num_failed + 1 if job.uid == uid else 0
        if job.num_failed >= SILENT_POLLS and now - job.answered >= SILENT_SECONDS:
            return MembersReport(silent=frozenset({uid}))
        return MembersReport(silent=job.heard.silent - {job.uid})


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
