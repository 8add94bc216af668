"""``kubectl fluxtrain stacks NAME``: where all ranks of a job are, from the stacks that they print.

``fluxtrain stacks``, run in each pod, asks its ranks one after the other. Their stacks are then lines of the
pod's log, and the log's timestamps, of the same clock as the command's, say which rank printed which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fluxtrain.contract.stacks import STACKS_COMMAND, RankProcess, read_ranks
from fluxtrain_operator import names
from fluxtrain_operator.kubectl.client import Kubectl
from fluxtrain_operator.kubectl.errors import KubectlError
from fluxtrain_operator.kubectl.stack_text import RankStacks, report, stacks_of
from fluxtrain_operator.timestamps import stamp

_SECONDS = 90.0
"""A pod may take this long: a start of Python, and 0.3 s for each of its ranks."""
_CONTAINER = f"--container={names.TRAINER}"
_OLD_IMAGE = "invalid choice: 'stacks'"


@dataclass(frozen=True)
class _Pod:
    name: str
    ranks: list[RankProcess]


def stacks(kubectl: Kubectl, name: str) -> tuple[str, list[str]]:
    """Return the report on the job ``name``, and one line for each pod that could not be asked.

    Raises KubectlError if the job has no running pods, or if none could be asked.
    """
    pods = _running_pods(kubectl, name)
    asked, problems = _ask(kubectl, pods)
    if not asked:
        raise KubectlError("\n".join(problems))
    found: list[RankStacks] = []
    for pod, log in zip(asked, _logs(kubectl, asked), strict=True):
        if isinstance(log, KubectlError):
            problems.append(f"{pod.name}: {log}")
        else:
            found += stacks_of(pod.name, pod.ranks, log)
    return report(found), problems


def _running_pods(kubectl: Kubectl, name: str) -> list[str]:
    pods = kubectl.pods(kubectl.job(name), names.trainer_selector(name))
    running = [
        p["metadata"]["name"] for p in pods if (p.get("status") or {}).get("phase") == "Running"
    ]
    if not running:
        raise KubectlError(f"{name} has no running pods; `kubectl fluxtrain why {name}` says why")
    return running


def _ask(kubectl: Kubectl, pods: list[str]) -> tuple[list[_Pod], list[str]]:
    """Run the command in ``pods``; return those with ranks, and a line for each other one."""
    commands = (("exec", pod, _CONTAINER, "--", *STACKS_COMMAND) for pod in pods)
    asked, problems = [], []
    for pod, answer in zip(pods, kubectl.run_all(commands, _SECONDS), strict=True):
        ranks = [] if isinstance(answer, KubectlError) else read_ranks(answer)
        if ranks:
            asked.append(_Pod(pod, ranks))
        else:
            problems.append(f"{pod}: {_problem(answer)}")
    return asked, problems


def _problem(answer: str | KubectlError) -> str:
    if not isinstance(answer, KubectlError):
        return (
            "no trainer runs in it at the moment: its agent waits for the other nodes, or restarts"
        )
    if _OLD_IMAGE in str(answer):
        return "its image is older than this plugin, and has no command for stacks"
    return str(answer)


def _logs(kubectl: Kubectl, pods: list[_Pod]) -> Iterator[str | KubectlError]:
    """Yield the log of each of ``pods``, with timestamps, from when its first rank was asked."""
    since = (stamp(min(rank.time for rank in pod.ranks)) for pod in pods)
    options = ("--timestamps", _CONTAINER)
    return kubectl.run_all(
        ("logs", pod.name, *options, f"--since-time={time}")
        for pod, time in zip(pods, since, strict=True)
    )
