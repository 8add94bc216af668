"""examples/slurm on a real Slurm of three nodes: the end of the time, a requeue, scancel, a lost node."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import slurm
from cluster.console import wait_until
from cluster.errors import ClusterError
from cluster.slurm import Slurm
from tests.paths import EXAMPLES, MICRO
from tests.trainer.outputs import losses, mlperf_values

pytestmark = pytest.mark.proof

SCRIPT = EXAMPLES / "slurm" / "train.sbatch"
OPTIONS = (
    *("--processes=1", "--schedule.steps=1000000", "--data.num_workers=1"),
    *("--logging.every_steps=1", "--logging.metrics_port=0"),
    *("--evaluation.every_samples=0", "--evaluation.at_end=false"),
    "--checkpoint.every_steps=0",
)


class Job:
    """A job of examples/slurm on all nodes that continues with two."""

    def __init__(self, machine: Slurm, folder: Path) -> None:
        self.machine, self.folder, self.output = machine, folder, folder / "output"
        variables = {
            "FLUXTRAIN": str(Path(sys.executable).parent / "fluxtrain"),
            "MIN_NODES": "2",
            "OMP_NUM_THREADS": "1",
        }
        options = (f"--output={self.output}", *OPTIONS)
        command = ("sbatch", "--parsable", "--nodes=3", SCRIPT, MICRO, *options)
        self.number = machine.run(*command, env=variables).strip()

    def wait_for(self, done: Callable[[], bool], what: str, seconds: float = 400) -> None:
        try:
            wait_until(done, what, seconds=seconds)
        except ClusterError as error:
            raise AssertionError(f"{error}\n{self.log()}\n{self.machine.logs()}") from None

    def wait_for_state(self, *states: str) -> None:
        what = f"state {' or '.join(states)}"
        self.wait_for(lambda: self.machine.state(self.number) in states, what)

    def wait_for_steps(self, count: int) -> None:
        """Wait for as many further steps."""
        first = self.step()
        self.wait_for(lambda: self.step() >= first + count, f"{count} steps after {first}")

    def step(self) -> int:
        try:
            return max(losses(self.output), default=0)
        except (OSError, ValueError):
            return 0

    def ranks(self) -> list[int]:
        """Return the number of ranks after each resume."""
        return [value["num_ranks"] for value in mlperf_values(self.output, "run_resumed")]

    def checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint, 0 without one."""
        folders = (path.parent for path in (self.output / "checkpoints").glob("step_*/DONE"))
        return max((int(folder.name.removeprefix("step_")) for folder in folders), default=0)

    def log(self) -> str:
        path = self.folder / f"fluxtrain-{self.number}.log"
        return path.read_text()[-4000:] if path.exists() else "no log"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for Slurm's daemons")
    slurm.ensure()
    with slurm.running(tmp_path) as machine:
        yield machine


def test_a_job_continues_after_its_time_limit_and_saves_when_cancelled(
    machine: Slurm, tmp_path: Path
) -> None:
    job = Job(machine, tmp_path)
    job.wait_for_steps(10)

    machine.run("scancel", "--batch", "--signal=USR1", job.number)  # as before the time limit
    job.wait_for_state("PENDING")
    assert job.checkpoint() == job.step() > 0, job.log()
    assert "the time is over; the job queues again" in job.log()

    # later than the second in which the nodes revoked the job's credential, or they refuse the next one
    machine.run("scontrol", "update", f"JobId={job.number}", "StartTime=now+5seconds")
    job.wait_for(lambda: job.ranks() == [3], "three ranks in the next time slice")
    job.wait_for_steps(10)

    machine.run("scancel", job.number)
    job.wait_for_state("CANCELLED")
    job.wait_for(lambda: job.checkpoint() == job.step(), "a checkpoint of the last step", 150)
    assert list(losses(job.output)) == list(range(1, job.step() + 1))


def test_the_other_nodes_go_on_when_slurm_gives_up_one(machine: Slurm, tmp_path: Path) -> None:
    job = Job(machine, tmp_path)
    job.wait_for_steps(5)

    assert kill_node("n3") > 1, "its daemon and its launcher"
    job.wait_for(lambda: job.ranks() == [2], "a resume on two ranks")
    machine.run("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=lost")
    job.wait_for_steps(20)
    assert machine.state(job.number) == "RUNNING", job.log()
    assert list(losses(job.output)) == list(range(1, len(losses(job.output)) + 1))


def kill_node(name: str) -> int:
    """Kill Slurm's daemon of a node and all that it has started there; return how many processes."""
    marks = f"\0-N\0{name}\0".encode(), f"SLURMD_NODENAME={name}\0".encode()
    killed = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if any(mark in text for mark, text in zip(marks, texts, strict=True)):
            os.kill(int(folder.name), signal.SIGKILL)
            killed += 1
    return killed
