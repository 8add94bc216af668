"""What trainers last said of themselves: asked every few seconds, beside the reconciles and not in them.

A pod that does not answer costs its own two seconds, and no other job's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fluxtrain.contract.progress import COMPLETE, FINISHING
from fluxtrain_operator.controller.cache import Cache
from fluxtrain_operator.names import Key
from fluxtrain_operator.progress import Progress

_WAITING = (FINISHING, COMPLETE)
"""Phases in which rank 0 is done, and other ranks may not be."""
PROGRESS_SECONDS = 10.0
"""How often a job that trains is asked for its progress."""
_PODS_AT_A_TIME = 256  # each costs an open file as long as it does not answer
_JOBS_AT_A_TIME = 64
_SILENT_PER_SECOND = 25.0
"""Pods, of all jobs where nobody answered, that are asked in a second: each costs a millisecond."""

Ask = Callable[[str, int], Awaitable[Progress | None]]
"""Returns what the trainer at an address and port says, None where it says nothing."""


@dataclass(frozen=True)
class Answer:
    """What a trainer said, and the pod that it was in."""

    uid: str
    progress: Progress


@dataclass
class Asking:
    """A job whose trainers are asked: where, of which pods, and with what answer."""

    port: int
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    pods: frozenset[str] = frozenset()
    answer: Answer | None = None
    task: asyncio.Task[None] | None = None


class ProgressPoller:
    """The last answer of each job that is followed."""

    def __init__(
        self,
        store: Cache,
        ask: Ask,
        news: Callable[[Key], None],
        seconds: float = PROGRESS_SECONDS,
    ) -> None:
        """Ask the running pods in ``store`` every ``seconds``; tell ``news`` when an answer differs."""
        self._store, self._ask, self._news, self._seconds = store, ask, news, seconds
        self._jobs: dict[Key, Asking] = {}
        self._places = asyncio.Semaphore(_PODS_AT_A_TIME)
        self._turns = asyncio.Semaphore(_JOBS_AT_A_TIME)
        self._silent: dict[Key, int] = {}  # number of pods of the jobs where nobody answered
        self._num_silent = 0

    def __len__(self) -> int:
        """Return the number of jobs that are followed."""
        return len(self._jobs)

    def follow(self, key: Key, port: int) -> None:
        """Ask the job's pods from now on; at once where pods came or went while it trained."""
        asking = self._jobs.setdefault(key, Asking(port))
        asking.port = port
        if asking.task is None or asking.task.done():
            asking.task = asyncio.create_task(self._go_on(key, asking))
        elif asking.answer is not None and asking.pods != self._running(key).keys():
            asking.wake.set()

    def leave(self, key: Key) -> None:
        """Ask no more, and forget the answer."""
        asking = self._jobs.pop(key, None)
        self._note_silent(key, 0)
        if asking is not None and asking.task is not None:
            asking.task.cancel()

    def last(self, key: Key) -> Progress | None:
        """Return what rank 0 said last; None where it did not answer, or its pod runs no more."""
        said = self.witness(key)
        return said if said is not None and said.rank == 0 else None

    def witness(self, key: Key) -> Progress | None:
        """Return what rank 0 said last, or another rank where only that one answered."""
        answer = asking.answer if (asking := self._jobs.get(key)) else None
        return answer.progress if answer and answer.uid in self._running(key) else None

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = [asking.task for asking in self._jobs.values() if asking.task is not None]
        for key in list(self._jobs):
            self.leave(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _go_on(self, key: Key, asking: Asking) -> None:
        while True:
            asking.wake.clear()
            asking.pods = frozenset(self._running(key))
            async with self._turns:
                before, asking.answer = asking.answer, await self._find(key, asking)
            self._note_silent(key, 0 if asking.answer else len(asking.pods))
            if asking.answer != before:
                self._news(key)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause(asking)):
                    await asking.wake.wait()

    def _pause(self, asking: Asking) -> float:
        """Return the seconds to the next round; where very many do not answer, they are asked less often."""
        share = 0.0 if asking.answer else self._num_silent / _SILENT_PER_SECOND
        return max(self._seconds, share)

    def _note_silent(self, key: Key, num_pods: int) -> None:
        self._num_silent += num_pods - self._silent.pop(key, 0)
        if num_pods:
            self._silent[key] = num_pods

    async def _find(self, key: Key, asking: Asking) -> Answer | None:
        """Return the answer of rank 0: of the pod where it was before, else of any other.

        Where rank 0 does not answer, the lowest rank that does tells whether the job lives.
        """
        pods, known, port = self._running(key), asking.answer, asking.port
        if known is not None and known.progress.rank == 0 and known.uid in pods:
            progress = await self._ask_one(pods.pop(known.uid), port)
            if progress is not None and progress.rank == 0:
                others = await self._ask_all(pods, port) if progress.phase in _WAITING else []
                return Answer(known.uid, _with_signs_of(progress, others))
        return min(
            await self._ask_all(pods, port), key=lambda answer: answer.progress.rank, default=None
        )

    async def _ask_all(self, pods: Mapping[str, str], port: int) -> list[Answer]:
        """Return what those of ``pods``, addresses by uid, say that answer."""
        found = await asyncio.gather(*(self._ask_one(address, port) for address in pods.values()))
        said = zip(pods, found, strict=True)
        return [Answer(uid, progress) for uid, progress in said if progress is not None]

    async def _ask_one(self, address: str, port: int) -> Progress | None:
        async with self._places:
            return await self._ask(address, port)

    def _running(self, key: Key) -> dict[str, str]:
        """Return the addresses of the pods that run, by uid."""
        return {
            str(pod["metadata"].get("uid", "")): str(pod["status"]["podIP"])
            for pod in self._store.pods(key)
            if _runs(pod)
        }


def _with_signs_of(progress: Progress, others: list[Answer]) -> Progress:
    """Return ``progress`` with the newest sign of progress of all: rank 0 waits for the others here."""
    signs = (progress.alive, *(answer.progress.alive for answer in others))
    newest = max((sign for sign in signs if sign is not None), default=None)
    return replace(progress, alive=newest)


def _runs(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and bool(status.get("podIP"))
