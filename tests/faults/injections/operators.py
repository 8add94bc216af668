"""Faults of the operator: killed, frozen."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.commands import run
from tests.end_to_end.stage import Operator, wait_for
from tests.faults.injections.pods import delete
from tests.faults.target import Target
from tests.paths import ROOT

LEASE = "fluxtrain-operator"
PREVIOUS = "cdc1e3c91ac53850f8fbee771ee92ead90e29dc5"
"""The last commit before agents met through our rendezvous service."""
WATCHED_STEPS = 40
"""Longer than an operator takes to read all objects and to act."""


@contextmanager
def operator_killed(target: Target) -> Iterator[None]:
    """Kill the operator, delete a pod while there is none, and start it again."""
    before = target.uids()
    target.jobs.operator.stop(signal.SIGKILL)
    delete(target, target.pod_of_rank(1)["metadata"]["name"])
    target.jobs.operator.start()
    target.wait_for_new_pods(before)
    yield


@contextmanager
def leader_frozen(target: Target) -> Iterator[None]:
    """Freeze the leader, delete a pod, and thaw it when the standby has replaced the pod."""
    before, leader = target.uids(), target.jobs.operator
    standby = _start_standby(target)
    assert leader.process is not None
    leader.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: holder(target).startswith(standby.identity), standby.log, seconds=60)
        delete(target, target.pod_of_rank(1)["metadata"]["name"])
        target.wait_for_new_pods(before)
    finally:
        leader.process.send_signal(signal.SIGCONT)
    assert leader.process.wait(30) == 1, "the old leader did not exit"
    yield


@contextmanager
def operator_upgraded(target: Target) -> Iterator[None]:
    """Run the previous version, this one, which replaces a deleted pod, and the previous one again."""
    previous = _previous_version(target)
    ours, before = target.jobs.operator, target.uids()
    try:
        hand_over(target, previous)
        target.wait_for_steps(WATCHED_STEPS)
        assert target.uids() == before, "the previous version replaced a pod"
        hand_over(target, ours)
        delete(target, target.pod_of_rank(1)["metadata"]["name"])
        target.wait_for_new_pods(before)
        target.wait_until_steady()
        before = target.uids()
        hand_over(target, previous)
        target.wait_for_steps(WATCHED_STEPS)
        assert target.uids() == before, "the previous version replaced a pod"
    finally:
        hand_over(target, ours)
    yield


def _previous_version(target: Target) -> Operator:
    """Return an operator with the code of `PREVIOUS`, from git's history."""
    folder = target.output.parent / "previous"
    folder.mkdir()
    archive = folder / "code.tar"
    run(["git", "archive", f"--output={archive}", PREVIOUS, "operator", "trainer"], folder=ROOT)
    run(["tar", "--extract", f"--file={archive}", f"--directory={folder}"])
    return Operator(target.kubectl, target.jobs.namespace, folder, "previous", code=folder)


def hand_over(target: Target, successor: Operator) -> None:
    """Stop the operator and start ``successor``; return when it leads."""
    target.jobs.operator.stop()
    target.jobs.operator = successor
    successor.start()
    wait_for(lambda: holder(target).startswith(successor.identity), successor.log, seconds=60)


def _start_standby(target: Target) -> Operator:
    folder = Path(target.output.parent) / "standby"
    folder.mkdir()
    standby = Operator(target.kubectl, target.jobs.namespace, folder, "standby")
    standby.start()
    target.jobs.operator = standby
    return standby


def holder(target: Target) -> str:
    """Return the identity that holds the Lease."""
    lease = target.kubectl.get("lease", LEASE, target.jobs.here)
    return str(lease["spec"].get("holderIdentity", ""))
