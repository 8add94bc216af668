"""A trainer tells what it is at and when it last got something done, in every phase, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.free_ports import free_port
from tests.trainer import ranks
from tests.trainer.test_distributed import be_rank
from tests.trainer.test_train import MICRO, environment
from tests.trainer.tiny_encoders import write_encoders
from tests.trainer.tiny_model import random_flux, save_flux, tiny_model

from fluxtrain import checkpoint
from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import Phase
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.distributed import World, process_group
from fluxtrain.sample import task as gallery
from fluxtrain.sample.task import sample_prompts
from fluxtrain.train import train

Answer = dict[str, Any]
GROWS, BLOCKED = 2.5, 4.0
"""Seconds that a checkpoint's bytes come in, and that none does."""
QUICK = {
    "preset": "micro",
    "schedule": {"steps": 1},
    "evaluation": {"every_samples": 0, "at_end": False},
}


def ask(port: int) -> Answer | None:
    """Return what the trainer on ``port`` says, None where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=1) as answer:
            found: Answer = json.load(answer)
            return found
    except OSError:
        return None


def follow(port: int, is_over: Callable[[], bool]) -> Iterator[tuple[float, Answer]]:
    """Yield the time and the answer, again and again, as long as the run goes on."""
    deadline = time.monotonic() + 240
    while not is_over() and time.monotonic() < deadline:
        if (answer := ask(port)) is not None:
            yield time.time(), answer
        time.sleep(0.05)


def times_in(phase: str, heard: list[tuple[float, Answer]]) -> list[float]:
    """Return the different times of life that were told in ``phase``."""
    return sorted({answer["aliveTime"] for _, answer in heard if answer["phase"] == phase})


def ended(processes: list[Any]) -> bool:
    return all(process.exitcode is not None for process in processes)


def slow_run(folder: Path, port: int) -> subprocess.Popen[str]:
    """Start one step with an evaluation of thousands of batches before it and a long grid after it."""
    flags = [
        f"--logging.metrics_port={port}",
        "--schedule.steps=1",
        "--data.synthetic.validation_samples=6000",
        "--evaluation.batch_size=1",
        "--evaluation.at_start=true",
        "--evaluation.at_end=false",
        "--sampling.at_end=true",
        "--sampling.num_steps=1000",
    ]
    paths = ["--output", str(folder / "run"), "--models", str(write_encoders(folder))]
    command = [sys.executable, "-m", "fluxtrain.cli", "run", str(MICRO), *paths]
    return subprocess.Popen(
        [*command, *flags],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_every_phase_of_a_run_is_told_with_its_signs_of_progress(tmp_path: Path) -> None:
    port = free_port()
    process = slow_run(tmp_path, port)
    heard = list(follow(port, lambda: process.poll() is not None))
    _, words = process.communicate(timeout=60)
    assert process.returncode == 0, words
    assert "Traceback" not in words, "who does not wait for an answer is no news"
    answers = [answer for _, answer in heard]
    assert {answer["rank"] for answer in answers} == {0}, "from the first answer on"
    assert {answer["numNodes"] for answer in answers} == {1}
    assert {answer["phase"] for answer in answers} <= set(get_args(Phase))
    order = [answer["phase"] for answer in answers]
    assert order[0] == "loading"
    assert order.index("evaluating") < order.index("sampling")
    for phase in ("evaluating", "sampling"):
        assert len(times_in(phase, heard)) >= 5, f"{phase}: {times_in(phase, heard)}"
    told = [answer["aliveTime"] for answer in answers]
    assert told == sorted(told)
    assert all(now - answer["aliveTime"] < 30 for now, answer in heard)


def be_rank_of_one_node(world: World, port: int) -> None:
    be_rank(world, port)
    os.environ |= {"LOCAL_RANK": f"{world.rank}", "LOCAL_WORLD_SIZE": f"{world.size}"}


def train_and_save_slowly(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Train; rank 0's checkpoint comes byte by byte, then for a while not at all, then in truth."""
    be_rank_of_one_node(world, port)
    saving = checkpoint.dcp.save

    def save_slowly(state: Any, *, storage_writer: Any, process_group: Any) -> Any:
        if world.is_main:
            with (Path(storage_writer.path) / "slow.bin").open("wb", buffering=0) as file:
                begin = time.monotonic()
                while time.monotonic() < begin + GROWS:
                    file.write(b"x" * 1000)
                    time.sleep(0.1)
            (paths.output / "blocked.json").write_text(json.dumps(time.time()))
            time.sleep(BLOCKED)
        return saving(state, storage_writer=storage_writer, process_group=process_group)

    checkpoint.dcp.save = save_slowly
    with process_group() as met:
        train(config, paths, met)


@pytest.mark.parametrize(("asynchronous", "size"), [(True, 1), (False, 2)])
def test_a_final_checkpoint_is_alive_as_long_as_its_bytes_come(
    tmp_path: Path, asynchronous: bool, size: int
) -> None:
    port, paths = free_port(), RunPaths(tmp_path / "output", tmp_path, tmp_path)
    changes = {
        "logging": {"metrics_port": port},
        "checkpoint": {"asynchronous": asynchronous, "every_steps": 0},
    }
    run = partial(train_and_save_slowly, port=free_port())
    processes = ranks.start(run, resolve(merge(QUICK, changes)), paths, size)
    heard = list(follow(port, lambda: ended(processes)))
    assert [process.exitcode for process in processes] == [0] * size, ranks.said(paths)
    blocked = json.loads((paths.output / "blocked.json").read_text())
    saving = [(now, answer) for now, answer in heard if answer["phase"] == "saving"]
    while_it_grew = [(now, answer) for now, answer in saving if now < blocked]
    assert len(times_in("saving", while_it_grew)) >= 3
    assert saving[0][1]["step"] == 1, "the last step is done"
    # the last bytes may be seen up to half a second later
    still = [(now, a) for now, a in saving if blocked + 1 < now < blocked + BLOCKED - 0.5]
    assert len(still) > 10, "it answers while it is blocked"
    assert len(times_in("saving", still)) == 1, "and claims no progress"
    assert times_in("saving", still)[0] < blocked + 1
    assert heard[-1][1]["phase"] in ("saving", "finishing", "complete")


def test_a_process_that_was_stopped_claims_nothing_for_that_time(tmp_path: Path) -> None:
    port, paths = free_port(), RunPaths(tmp_path / "output", tmp_path, tmp_path)
    changes = {
        "logging": {"metrics_port": port},
        "evaluation": {"at_start": True, "batch_size": 1},
        "data": {"synthetic": {"validation_samples": 20_000}},
    }
    (process,) = ranks.start(ranks.train_alone, resolve(merge(QUICK, changes)), paths)
    assert process.pid is not None
    try:
        for _, answer in follow(port, lambda: ended([process])):
            if answer["phase"] == "evaluating":
                break
        os.kill(process.pid, signal.SIGSTOP)
        stopped = time.time()
        assert ask(port) is None, "who is stopped does not answer"
        time.sleep(1)
        os.kill(process.pid, signal.SIGCONT)
        answers = follow(port, lambda: ended([process]))
        going = [answer["aliveTime"] for _, answer in islice(answers, 20)]
        assert max(going) > stopped + 1, "and goes on where it was"
        assert not [told for told in going if stopped + 0.2 < told < stopped + 0.9]
    finally:
        process.kill()
        process.join()


def draw_with_a_slow_mate(config: RunConfig, paths: RunPaths, world: World, *, port: int) -> None:
    """Draw; each picture of rank 1 takes a second."""
    be_rank_of_one_node(world, port)
    drawing = gallery.denoise
    if world.rank == 1:

        def slowly(*arguments: Any) -> Any:
            time.sleep(1)
            return drawing(*arguments)

        gallery.denoise = slowly
    with process_group() as met:
        sample_prompts(config, paths, met)


def test_a_gallery_is_watched_until_the_last_rank_of_the_node_has_drawn(tmp_path: Path) -> None:
    write_encoders(tmp_path)
    save_flux(random_flux(tiny_model()), tmp_path)
    port, paths = free_port(), RunPaths(tmp_path / "output", tmp_path, tmp_path)
    config = resolve(
        {
            "preset": "micro",
            "task": "sample",
            "model": tiny_model().model_dump(mode="json"),
            "initial_weights": "weights.safetensors",
            "data": {"text_length": 8},
            "encoders": {"precision": "float32"},
            "sampling": {"prompts": [f"number {i}" for i in range(8)], "num_steps": 4},
            "logging": {"metrics_port": port},
        }
    )
    processes = ranks.start(partial(draw_with_a_slow_mate, port=free_port()), config, paths, 2)
    heard = list(follow(port, lambda: ended(processes)))
    assert [process.exitcode for process in processes] == [0, 0], ranks.said(paths)
    assert heard[0][1]["phase"] == "loading"
    assert len(times_in("finishing", heard)) >= 3, "its mate's pictures are signs of progress"
    assert {answer["rank"] for _, answer in heard} == {0}
