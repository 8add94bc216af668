"""``kubectl fluxtrain logs NAME``: the log of rank 0, or the whole MLPerf log in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fluxtrain.contract.process import MLPERF_FILE, MLPERF_TOKEN, OUTPUT_PATH
from fluxtrain_operator import names
from fluxtrain_operator.kubectl.client import Kubectl, KubectlError

_FIRST_KEY = "cache_clear"
"""Key of the first event of a whole log."""


def logs(kubectl: Kubectl, name: str, mlperf_only: bool) -> tuple[str, str]:
    """Return the log of the job ``name``, and a note about it. Raises KubectlError.

    Any pod may have rank 0, and whichever has it prints all earlier lines of the MLPerf log, so one pod's log
    holds all: the one with the newest line.
    """
    pods = kubectl.pods(kubectl.job(name), names.trainer_selector(name))
    listed = [pod["metadata"]["name"] for pod in pods]
    if not listed:
        raise KubectlError(f"{name} has no pods{_where()}")
    texts = _read(kubectl, listed)
    pod = rank_0_of(texts)
    if not mlperf_only:
        return texts[pod], f"log of pod {pod}"
    lines = mlperf_log(texts[pod].splitlines())
    if not lines:
        raise KubectlError(f"no pod of {name} has logged an MLPerf event{_where()}")
    whole = "" if _key(lines[0]) == _FIRST_KEY else "; its beginning was removed by the kubelet"
    return "\n".join(lines) + "\n", f"MLPerf log of pod {pod}{whole}"


def rank_0_of(texts: dict[str, str]) -> str:
    """Return the pod whose log in ``texts`` has the newest MLPerf event; without any, the longest log."""
    return max(texts, key=lambda pod: (_newest(texts[pod].splitlines()), len(texts[pod])))


def mlperf_log(lines: Iterable[str]) -> list[str]:
    """Return the MLPerf events among ``lines``, from where they were repeated for the last time.

    Processes that restart in a pod print all earlier events anew.
    """
    events = [line[line.rindex(MLPERF_TOKEN) :].strip() for line in lines if MLPERF_TOKEN in line]
    starts = [number for number, line in enumerate(events) if line == events[0]]
    return events[starts[-1] :] if starts else []


def _read(kubectl: Kubectl, pods: Sequence[str]) -> dict[str, str]:
    """Return the logs that can be read, by pod; raise the first error if there is none."""
    container = f"--container={names.TRAINER}"
    results = kubectl.run_all(("logs", pod, container) for pod in pods)
    answers = dict(zip(pods, results, strict=True))
    texts = {pod: text for pod, text in answers.items() if isinstance(text, str)}
    if not texts:
        raise next(error for error in answers.values() if isinstance(error, KubectlError))
    return texts


def _newest(lines: Iterable[str]) -> float:
    """Return the time of the newest MLPerf event, in milliseconds; 0 without one."""
    times = (_event(line).get("time_ms") for line in mlperf_log(lines))
    return max((time for time in times if isinstance(time, int | float)), default=0.0)


def _key(line: str) -> object:
    return _event(line).get("key")


def _event(line: str) -> dict[str, object]:
    try:
        values = json.loads(line.removeprefix(MLPERF_TOKEN))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _where() -> str:
    """Return where the log is without pods."""
    return (
        f"; the whole MLPerf log is the file {OUTPUT_PATH}/{MLPERF_FILE} of the job's output volume "
        "(spec.storage.output)"
    )
