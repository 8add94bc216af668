"""Delays before pods that the infrastructure lets fail are replaced: per pod and reason, in the status.

The first failure delays by ten seconds, each one that follows with the same reason by twice as long, up to
five minutes. A pod that has run for a minute begins anew. None of this costs a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fluxtrain.contract.resource.status import MAX_RETRIES, Restarts, Retry
from fluxtrain_operator import names
from fluxtrain_operator.planner.disruption import Delete
from fluxtrain_operator.planner.failures import SHORT_LIVED_SECONDS, Failure, retry_time
from fluxtrain_operator.planner.observed import Pod
from fluxtrain_operator.planner.situation import Situation
from fluxtrain_operator.timestamps import seconds, stamp

_EXPIRY_SECONDS = 3600.0
"""A failure that long after the last one does not follow it."""
_CLOCK_SECONDS = 5.0
"""By how much the API server's clock, which pods are created by, may be behind."""
_REPORTED_FROM, _MAX_COUNT = 2, 9999


def replacement_time(situation: Situation, failure: Failure) -> float:
    """Return the Unix time from which the pod of ``failure`` may be replaced."""
    return retry_time(failure, _num_restarts(situation, failure))


def _num_restarts(situation: Situation, failure: Failure) -> int:
    """Return how often the job was restarted for the reason of ``failure``; each has its own delays.

    Failures of the infrastructure count for each pod on its own. Older operators counted all
    reasons together.
    """
    if failure.infrastructure:
        return num_failures(situation, failure)
    restarts = situation.job.status.restarts or Restarts()
    return restarts.gang if restarts.charged is None else restarts.causes.get(failure.reason, 0)


def num_failures(situation: Situation, failure: Failure) -> int:
    """Return how often the pods before that of ``failure`` failed for the same reason, in a row."""
    retry = _retry_of(situation, failure.pod)
    if retry is None or retry.reason != failure.reason:
        return 0
    return max(0, retry.count - (retry.pod == failure.pod.uid))


def next_retries(
    situation: Situation, restarts_pods: bool, deletions: Sequence[Delete]
) -> list[Retry]:
    """Return the retries after ``deletions``; each failed pod counts when its deletion is requested.

    ``restarts_pods`` is whether pods that are deleted are replaced.
    """
    retries = {retry.index: retry for retry in _active(situation)}
    counted: set[int] = set()
    deleted = {deletion.uid for deletion in deletions} if restarts_pods else set()
    for failure in situation.failures:
        index = _index(situation, failure.pod)
        if not failure.infrastructure or failure.pod.uid not in deleted or index in counted:
            continue
        counted.add(index)
        retries.pop(index, None)
        if failure.is_short_lived:
            retries[index] = Retry(
                index=index,
                reason=failure.reason,
                count=min(_MAX_COUNT, num_failures(situation, failure) + 1),
                time=stamp(situation.now),
                pod=failure.pod.uid[:64],
            )
    newest = sorted(retries.values(), key=lambda retry: (retry.time, retry.index))[-MAX_RETRIES:]
    return sorted(newest, key=lambda retry: retry.index)


def repeated_failure(situation: Situation) -> tuple[str, str] | None:
    """Return reason and message of the pods that failed most often in a row; None if none did twice."""
    found = [*_failing(situation), *_failed_before(situation)]
    count, reason, message = max(found, default=(0, "", ""))
    return (reason, message) if count >= _REPORTED_FROM else None


def recovery_times(situation: Situation) -> Iterator[float]:
    """Yield the Unix times at which running pods will have run long enough to begin anew."""
    for retry in _active(situation):
        for pod in _successors(situation, retry):
            if pod.started is not None:
                yield pod.started + SHORT_LIVED_SECONDS


def _failing(situation: Situation) -> Iterator[tuple[int, str, str]]:
    for failure in situation.failures:
        if failure.infrastructure and failure.is_short_lived:
            before = num_failures(situation, failure)
            time = stamp(retry_time(failure, before))
            text = f"{failure.message}; {before + 1} times in a row, replaced at {time}"
            yield before + 1, failure.reason, text


def _failed_before(situation: Situation) -> Iterator[tuple[int, str, str]]:
    present = {_index(situation, failure.pod) for failure in situation.failures}
    job = situation.job
    for retry in _active(situation):
        if retry.index not in present:
            pod = "pods" if _is_queued(situation) else names.pod(job.name, retry.index)
            text = f"{pod} failed {retry.count} times in a row shortly after the start"
            yield retry.count, retry.reason, text


def _retry_of(situation: Situation, pod: Pod) -> Retry | None:
    index = _index(situation, pod)
    return next((retry for retry in _active(situation) if retry.index == index), None)


def _active(situation: Situation) -> list[Retry]:
    """Return the retries of pods that have not run long enough since."""
    return [r for r in situation.job.status.retries if not _is_over(situation, r)]


def _is_over(situation: Situation, retry: Retry) -> bool:
    time = seconds(retry.time)
    if time is None or abs(situation.now - time) > _EXPIRY_SECONDS:
        return True
    began = situation.now - SHORT_LIVED_SECONDS
    pods = _successors(situation, retry)
    return any(pod.started is not None and pod.started <= began for pod in pods)


def _successors(situation: Situation, retry: Retry) -> Iterator[Pod]:
    """Yield the running pods that were created after the last failure."""
    since = (seconds(retry.time) or 0.0) - _CLOCK_SECONDS
    for pod in situation.current:
        is_later = pod.created >= since and pod.uid != retry.pod
        if pod.running and is_later and _index(situation, pod) == retry.index:
            yield pod


def _index(situation: Situation, pod: Pod) -> int:
    """Return the index under which failures of ``pod`` count: Kueue's groups replace under another one."""
    return 0 if _is_queued(situation) else pod.index


def _is_queued(situation: Situation) -> bool:
    return situation.job.spec.scheduling.queue_name is not None
