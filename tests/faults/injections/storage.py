"""Faults of the storage and of the numbers: full, slow, corrupt, not finite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ClusterError
from tests.end_to_end.jobs import expected_samples
from tests.end_to_end.stage import condition, suspend, wait_for
from tests.faults import encoded_data, inside_pods
from tests.faults.target import CHECKPOINT_STEPS, Target

from fluxtrain.contract.process import CHECKPOINTS_FOLDER
from fluxtrain.state.run_state import latest

SLOW_SECONDS = 2.0
DAMAGED_STEPS = 40
"""More than a data loader reads ahead."""
BLOCK = bytes(1 << 20)
CLOCK_STEP_SECONDS = 3600.0


@contextmanager
def disk_full(target: Target) -> Iterator[None]:
    """Fill the file system of the output until the job reports it, and make room again."""
    filler = target.output / "filler"
    try:
        _fill(filler)
        wait_for(lambda: _mentions(target, "StorageError"), target.debug_text, seconds=90)
    finally:
        filler.unlink(missing_ok=True)
    yield


@contextmanager
def slow_disk(target: Target) -> Iterator[None]:
    """Let each fsync take seconds during some checkpoints."""
    with flagged(target.flag(inside_pods.SLOW_DISK), str(SLOW_SECONDS)):
        target.wait_for_steps(3 * CHECKPOINT_STEPS)
    yield


@contextmanager
def clock_stepped(target: Target) -> Iterator[None]:
    """Set the wall clock of one pod an hour ahead."""
    pod = target.pod_of_rank(1)["metadata"]["name"]
    flag = target.flag(inside_pods.CLOCK.format(pod=pod))
    with flagged(flag, str(CLOCK_STEP_SECONDS)):
        target.wait_for_steps(3 * CHECKPOINT_STEPS)
        yield


@contextmanager
def nan_gradient(target: Target) -> Iterator[None]:
    """Make gradients not finite until the job has failed, then create it again."""
    with flagged(target.flag(inside_pods.NAN_GRADIENT), "1"):
        wait_for(lambda: target.phase == "Failed", target.debug_text, seconds=60)
    assert condition(target.status, "Failed")["reason"] == "Diverged"
    target.recreate()
    yield


@contextmanager
def checkpoint_truncated(target: Target) -> Iterator[None]:
    """Truncate the newest checkpoint of a suspended job, and resume: the one before is used."""
    namespace = target.jobs.namespace
    suspend(target.kubectl, namespace, target.name, True)
    wait_for(
        lambda: target.phase == "Suspended" and not target.pods, target.debug_text, seconds=200
    )
    newest = latest(target.output / CHECKPOINTS_FOLDER)
    assert newest is not None
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    before = target.step
    suspend(target.kubectl, namespace, target.name, False)
    wait_for(lambda: target.step > before, target.debug_text)
    assert list(newest.parent.glob(f"damaged_*_{newest.name}")), "it is kept aside"
    yield


@contextmanager
def shard_corrupt(target: Target) -> Iterator[None]:
    """Damage a training sample that is needed some steps later."""
    step = target.step + DAMAGED_STEPS
    (index, *_) = expected_samples(target.spec["run"], step)[step]
    encoded_data.damage(target.output, index)
    target.wait_for_steps(DAMAGED_STEPS + 1)
    logs = [target.kubectl("logs", name, target.jobs.here) for name in target.pods]
    assert any(f"{encoded_data.key(index)}" in text for text in logs), "a log names the sample"
    yield


@contextmanager
def flagged(flag: Path, text: str) -> Iterator[None]:
    """Ask for a fault inside of the pods."""
    flag.write_text(text)
    try:
        yield
    finally:
        flag.unlink()


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(BLOCK)
        except OSError:
            return


def _mentions(target: Target, reason: str) -> bool:
    """Return whether a condition or an event of the job has ``reason``."""
    try:
        reasons = {c["reason"] for c in target.status.get("conditions", ())}
        events = target.kubectl.get("events.events.k8s.io", target.jobs.here)["items"]
    except ClusterError:
        return False
    mine = [e for e in events if e.get("regarding", {}).get("name") == target.name]
    return reason in reasons | {str(e.get("reason")) for e in mine}
