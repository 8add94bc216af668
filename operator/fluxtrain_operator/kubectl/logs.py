"""What pods print: ``kubectl fluxtrain logs NAME``, and ``stacks NAME``, where all ranks of a job are.

The log is that of rank 0, or the whole MLPerf log in it. ``fluxtrain stacks``, run in each pod, asks its
ranks one after the other. Their stacks are then lines of the pod's log, and the log's timestamps, of the same
clock as the command's, say which rank printed which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fluxtrain.contract.process import (
    MLPERF_FILE,
    MLPERF_TOKEN,
    OUTPUT_PATH,
    STACKS_COMMAND,
    RankProcess,
    ranges,
    read_ranks,
)
from fluxtrain_operator.base import names
from fluxtrain_operator.base.names import seconds, stamp
from fluxtrain_operator.kubectl.client import Kubectl, KubectlError

_CONTAINER = f"--container={names.TRAINER}"
_FIRST_KEY = "cache_clear"
"""Key of the first event of a whole log."""
_WHERE = (
    f"; the whole MLPerf log is the file {OUTPUT_PATH}/{MLPERF_FILE} of the job's output volume "
    "(spec.storage.output)"
)


def logs(kubectl: Kubectl, name: str, mlperf_only: bool) -> tuple[str, str]:
    """Return the log of the job ``name``, and a note about it. Raises KubectlError.

    Any pod may have rank 0, and whichever has it prints all earlier lines of the MLPerf log, so one pod's log
    holds all: the one with the newest line.
    """
    texts = _read(kubectl, _pods(kubectl, name, "", _WHERE))
    pod = rank_0_of(texts)
    if not mlperf_only:
        return texts[pod], f"log of pod {pod}"
    lines = mlperf_log(texts[pod].splitlines())
    if not lines:
        raise KubectlError(f"no pod of {name} has logged an MLPerf event{_WHERE}")
    whole = (
        ""
        if _event(lines[0]).get("key") == _FIRST_KEY
        else "; its beginning was removed by the kubelet"
    )
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
    results = kubectl.run_all(("logs", pod, _CONTAINER) for pod in pods)
    answers = dict(zip(pods, results, strict=True))
    texts = {pod: text for pod, text in answers.items() if isinstance(text, str)}
    if not texts:
        raise next(error for error in answers.values() if isinstance(error, KubectlError))
    return texts


def _newest(lines: Iterable[str]) -> float:
    """Return the time of the newest MLPerf event, in milliseconds; 0 without one."""
    times = (_event(line).get("time_ms") for line in mlperf_log(lines))
    return max((time for time in times if isinstance(time, int | float)), default=0.0)


def _event(line: str) -> dict[str, object]:
    try:
        values = json.loads(line.removeprefix(MLPERF_TOKEN))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


_SECONDS = 90.0
"""A pod may take this long: a start of Python, and 0.3 s for each of its ranks."""
_NO_TRAINER = (
    "no trainer runs in it at the moment: its agent waits for the other nodes, or restarts"
)


@dataclass(frozen=True)
class _Pod:
    name: str
    ranks: list[RankProcess]


def stacks(kubectl: Kubectl, name: str) -> tuple[str, list[str]]:
    """Return the report on the job ``name``, and one line for each pod that could not be asked.

    Raises KubectlError if the job has no running pods, or if none could be asked.
    """
    pods = _pods(kubectl, name, "running ")
    asked, problems = _ask(kubectl, pods)
    if not asked:
        raise KubectlError("\n".join(problems))
    printed: list[RankStacks] = []
    for pod, log in zip(asked, _logs(kubectl, asked), strict=True):
        if isinstance(log, KubectlError):
            problems.append(f"{pod.name}: {log}")
        else:
            printed += stacks_of(pod.name, pod.ranks, log)
    return report(printed), problems


def _pods(kubectl: Kubectl, name: str, which: str, hint: str = "") -> list[str]:
    job = kubectl.job(name)
    pods = kubectl.pods(job, names.trainer_selector(name))
    phases = {p["metadata"]["name"]: (p.get("status") or {}).get("phase") for p in pods}
    listed = [pod for pod, phase in phases.items() if phase == "Running" or not which]
    if not listed:
        why = f"`kubectl fluxtrain why {name} -n {job['metadata']['namespace']}` says why"
        raise KubectlError(f"{name} has no {which}pods; {why}{hint}")
    return listed


def _ask(kubectl: Kubectl, pods: list[str]) -> tuple[list[_Pod], list[str]]:
    """Run the command in ``pods``; return those with ranks, and a line for each other one."""
    commands = (("exec", pod, _CONTAINER, "--", *STACKS_COMMAND) for pod in pods)
    asked, problems = [], []
    for pod, answer in zip(pods, kubectl.run_all(commands, _SECONDS), strict=True):
        ranks = [] if isinstance(answer, KubectlError) else read_ranks(answer)
        if ranks:
            asked.append(_Pod(pod, ranks))
        else:
            problem = answer if isinstance(answer, KubectlError) else _NO_TRAINER
            problems.append(f"{pod}: {problem}")
    return asked, problems


def _logs(kubectl: Kubectl, pods: list[_Pod]) -> Iterator[str | KubectlError]:
    """Yield the log of each of ``pods``, with timestamps, from when its first rank was asked."""
    since = (stamp(min(rank.time for rank in pod.ranks)) for pod in pods)
    options = ("--timestamps", _CONTAINER)
    return kubectl.run_all(
        ("logs", pod.name, *options, f"--since-time={time}")
        for pod, time in zip(pods, since, strict=True)
    )


_STACK_LINE = re.compile(
    r'(Current thread|Thread) 0x|  File ".*", line (\d+|\?+) in |  \.\.\.$|  <.+>$'
)
"""A line that Python's faulthandler prints."""
_MAIN = "Current thread"
"""Begins the stack of the thread that handled the signal, which is the main thread."""
_STATES = {
    "D": "waits in the kernel, for storage or a device",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}


@dataclass(frozen=True)
class RankStacks:
    """The stacks of one rank."""

    rank: int
    pod: str
    lines: tuple[str, ...]
    note: str = ""
    """What else there is to say, such as why it has printed none."""

    @property
    def position(self) -> tuple[str, ...]:
        """Return the frames of the main thread, innermost first; empty if they are unknown."""
        start = next((n for n, line in enumerate(self.lines) if line.startswith(_MAIN)), None)
        if start is None:
            return ()
        frames = []
        for line in self.lines[start + 1 :]:
            if not line.startswith("  "):
                break
            frames.append(line.strip())
        return tuple(frames)


def stacks_of(pod: str, ranks: Sequence[RankProcess], log: str) -> list[RankStacks]:
    """Return the stacks of ``ranks`` of ``pod``, of which ``log`` has a timestamp before each line.

    The lines of a rank are those between the time at which it was asked and that of the next one.
    """
    lines = [parts for parts in map(_timed, log.splitlines()) if parts is not None]
    ends = [*(rank.time for rank in ranks[1:]), float("inf")]
    result = []
    for rank, end in zip(ranks, ends, strict=True):
        own = tuple(line for time, line in lines if rank.time <= time < end)
        result.append(RankStacks(rank.rank, pod, own if rank.asked else (), _note(rank, own)))
    return result


def report(ranks: Sequence[RankStacks]) -> str:
    """Return where how many ranks are, the rarest position first, then the stacks of each rank."""
    ordered = sorted(ranks, key=lambda rank: rank.rank)
    return "\n\n".join([_summary(ordered), *map(_section, ordered)])


def _summary(ranks: Sequence[RankStacks]) -> str:
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        groups.setdefault(rank.position, []).append(rank.rank)
    listed = sorted(groups.items(), key=lambda group: len(group[1]))
    unknown = ("unknown: no stacks",)
    return "\n".join(
        f"{'rank' if len(own) == 1 else 'ranks'} {', '.join(ranges(own))}: {(at or unknown)[0]}"
        for at, own in listed
    )


def _section(rank: RankStacks) -> str:
    note = f": {rank.note}" if rank.note else ""
    return "\n".join([f"== rank {rank.rank}, pod {rank.pod}{note}", *rank.lines])


def _note(rank: RankProcess, lines: tuple[str, ...]) -> str:
    state = f"process {rank.pid} {_STATES[rank.state]}" if rank.state in _STATES else ""
    if not rank.asked:
        return "it still imports modules, and cannot print its stacks yet"
    return state if lines else state or "it has printed no stacks"


def _timed(line: str) -> tuple[float, str] | None:
    """Return the time and the text of a line of a stack; None for any other line."""
    stamp, _, text = line.partition(" ")
    time = seconds(stamp)
    return (time, text) if time is not None and _STACK_LINE.match(text) else None
