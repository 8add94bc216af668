"""``fluxtrain run --nodes``: several nodes without Kubernetes, here launchers on one machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.paths import MICRO
from tests.trainer.commands import Forked, Job, children
from tests.trainer.outputs import ledger, losses

from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_USAGE
from fluxtrain.rendezvous.messages import KEY_FILE

pytestmark = pytest.mark.slow

STEPS, PAUSE = 70, 0.1


class Run(Job):
    """A run of which each node is a process group on this machine."""

    def node(self, rank: int | None, nodes: str, *options: str) -> Forked:
        """Start a node; options given here override those of all nodes."""
        rank_option = [] if rank is None else [f"--node-rank={rank}"]
        usual = (
            *(f"--rendezvous=127.0.0.1:{self.port}", "--processes=1", f"--schedule.steps={STEPS}"),
            *("--checkpoint.every_steps=10", "--logging.every_steps=1", "--logging.ledger=true"),
            *("--evaluation.every_samples=0", "--evaluation.at_end=false"),
            "--logging.metrics_port=0",
        )
        given = {option.partition("=")[0] for option in options}
        return self.start(
            *("run", str(MICRO), f"--output={self.output}", f"--nodes={nodes}", *rank_option),
            *(option for option in usual if option.partition("=")[0] not in given),
            *options,
            pause=PAUSE,
        )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.kill()


def processes_of(node: Forked) -> list[int]:
    """Return the launcher of ``node`` and its descendants, as Slurm signals them."""
    found = [node.pid]
    for pid in found:
        found += children(pid)
    return found


@pytest.mark.proof
def test_the_others_go_on_without_a_lost_node_and_with_it_again(run: Run) -> None:
    nodes = [run.node(rank, "2:3") for rank in (2, 0, 1)]
    run.wait_for_step(10)
    nodes[2].kill()
    run.wait_for(lambda: run.ranks() == [2])
    run.wait_for_step(run.step() + 10)
    nodes[2] = run.node(1, "2:3")  # within the time in which its predecessor may still live
    run.wait_for_ends(nodes, EXIT_OK)
    assert run.ranks() == [2, 3]
    assert list(losses(run.output)) == list(range(1, STEPS + 1))
    assert {len(indices) for indices in ledger(run.output).values()} == {16}
    assert "world of 3 nodes; this is node 2" in run.log(0).read_text()
    assert "world of 2 nodes; this is node 1" in run.log(0).read_text()
    summaries = [run.log(n).read_text().count("resolved config") for n in range(4)]
    assert summaries == [0, 1, 0, 0], "only the node with the rendezvous prints it"


def test_nodes_meet_at_an_ipv6_address(run: Run) -> None:
    options = (f"--rendezvous=[::1]:{run.port}", "--schedule.steps=4")
    nodes = [run.node(rank, "2", *options) for rank in (1, 0)]
    run.wait_for_ends(nodes, EXIT_OK)
    assert list(losses(run.output)) == [1, 2, 3, 4]
    assert f"rendezvous at [::1]:{run.port}\n" in run.log(1).read_text()


@pytest.mark.proof
def test_a_run_of_fixed_size_waits_for_the_node_with_the_rendezvous(run: Run) -> None:
    first, second = run.node(0, "2"), run.node(1, "2")
    run.wait_for_step(10)
    first.kill()
    run.wait_for(lambda: "no answer of the rendezvous" in run.log(1).read_text())
    assert second.poll() is None
    first = run.node(0, "2")
    run.wait_for_ends((first, second), EXIT_OK)
    assert run.ranks() == [2]
    assert list(losses(run.output)) == list(range(1, STEPS + 1))


@pytest.mark.proof
def test_a_stop_of_every_process_saves_a_checkpoint_even_if_it_is_repeated(run: Run) -> None:
    """Slurm signals each process of a step, those that load data included, and some twice."""
    data = ["--data.num_workers=2", "--checkpoint.every_steps=0"]
    nodes = [run.node(rank, "2", *data) for rank in (0, 1)]
    run.wait_for_step(10)
    groups = [processes_of(node) for node in nodes]
    assert all(len(group) >= 4 for group in groups), "launcher, trainer and two that load data"
    for _ in range(2):
        for pid in groups[0] + groups[1]:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    run.wait_for_ends(nodes, EXIT_STOPPED, seconds=120)
    stopped_at = max(losses(run.output))
    assert (run.output / "checkpoints" / f"step_{stopped_at:010}" / "DONE").exists(), run.logs()
    assert "Traceback" not in run.logs()
    run.wait_for_ends([run.node(0, "1")], EXIT_OK, seconds=240)
    assert list(losses(run.output)) == list(range(1, STEPS + 1))


def test_the_stop_of_the_node_with_the_rendezvous_stops_all(run: Run) -> None:
    first, second = run.node(0, "1:2"), run.node(1, "1:2")
    run.wait_for_step(10)
    first.send_signal(signal.SIGTERM)
    run.wait_for_ends((first, second), EXIT_STOPPED, seconds=120)
    assert "another node has ended the run" in run.log(1).read_text()


def test_the_stop_of_another_node_does_not(run: Run) -> None:
    first, second = run.node(None, "1:2"), run.node(1, "1:2")
    run.wait_for_step(10)
    second.send_signal(signal.SIGTERM)
    run.wait_for_ends((first, second), EXIT_OK, EXIT_STOPPED, seconds=120)
    assert list(losses(run.output)) == list(range(1, STEPS + 1))


@pytest.mark.proof
def test_nodes_that_cannot_take_part_are_refused_and_the_others_train(run: Run) -> None:
    first, second = run.node(0, "3"), run.node(1, "3")
    run.wait_for(lambda: "2 of 3 nodes have come" in run.logs())
    twice = run.node(1, "3")
    other = run.node(2, "3", "--optim.learning_rate=1e-3")
    run.wait_for_ends((twice, other), EXIT_USAGE, seconds=120)
    refused = [run.log(n).read_text().splitlines()[-1] for n in (2, 3)]
    assert "fluxtrain: --node-rank: got 1; " in refused[0]
    assert "has this rank already" in refused[0]
    assert refused[1].endswith("; these fields differ: optim.learning_rate")
    third = run.node(2, "3")
    run.wait_for_ends((first, second, third), EXIT_OK)


def test_a_node_tells_what_it_waits_for_and_gives_up(run: Run) -> None:
    short = "--rendezvous-timeout=1"
    run.wait_for_ends([run.node(1, "2", short)], EXIT_STORAGE, seconds=120)
    assert f"{run.output / KEY_FILE}: absent for 1 s" in run.log(0).read_text()
    run.wait_for_ends([run.node(0, "2", short)], EXIT_ERROR, seconds=120)
    assert "1 of 2 nodes have come to the rendezvous, for 1 s" in run.log(1).read_text()
    run.wait_for_ends([run.node(1, "2", short)], EXIT_ERROR, seconds=120)
    text = f"no answer of the rendezvous at 127.0.0.1:{run.port} ([Errno 111] Connection refused)"
    assert f"{text}, for 1 s" in run.log(2).read_text()
