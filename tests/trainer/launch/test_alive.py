"""A trainer reports its phase and its last sign of progress, in every phase."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from cluster.free_ports import free_port
from tests.paths import MICRO
from tests.trainer import ranks
from tests.trainer.commands import start
from tests.trainer.tiny_encoders import write_encoders
from tests.trainer.tiny_model import random_flux, save_flux, tiny_model

from fluxtrain.contract.process import Phase, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.parallel.distributed import World, process_group
from fluxtrain.sample import task
from fluxtrain.sample.task import sample_prompts
from fluxtrain.state import checkpoint
from fluxtrain.train.loop import train

pytestmark = pytest.mark.slow

Progress = dict[str, Any]
GROWING_SECONDS, BLOCKED_SECONDS = 2.5, 6.0
"""Seconds during which a checkpoint's file grows, then does not."""
TIMEOUT_SECONDS = 1
"""Of a request, which a response may wait for on busy cores."""
_JITTER_SECONDS = 0.02
"""Between a response and the time at which it is read."""
QUICK = {
    "preset": "micro",
    "schedule": {"steps": 1},
    "evaluation": {"every_samples": 0, "at_end": False},
}


def poll(port: int) -> Progress | None:
    """Return the progress of the trainer on ``port``, None if it does not respond."""
    try:
        address = f"http://127.0.0.1:{port}/progress"
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as response:
            progress: Progress = json.load(response)
            return progress
    except (OSError, HTTPException):  # the process may end in the middle of its response
        return None


def follow(port: int, is_over: Callable[[], bool]) -> Iterator[tuple[float, Progress]]:
    """Yield the time and the progress, polled until the run is over."""
    deadline = time.monotonic() + 240
    while not is_over() and time.monotonic() < deadline:
        if (progress := poll(port)) is not None:
            yield time.time(), progress
        time.sleep(0.05)


def num_progressed(phase: str, polled: list[tuple[float, Progress]]) -> int:
    """Return how many responses in ``phase`` show later progress than the one before."""
    times = [at - p["secondsSinceProgress"] for at, p in polled if p["phase"] == phase]
    return sum(after > before + _JITTER_SECONDS for before, after in pairwise(times))


def ended(processes: list[Any]) -> bool:
    return all(process.exitcode is not None for process in processes)


SLOW_FLAGS = (
    "--schedule.steps=1",
    "--data.synthetic.validation_samples=2000",
    "--evaluation.batch_size=1",
    "--evaluation.at_start=true",
    "--evaluation.at_end=false",
    "--sampling.at_end=true",
    "--sampling.num_steps=1000",
)
"""A run of one step with a long evaluation before and a long sampling after it."""


@pytest.mark.proof
def test_every_phase_of_a_run_is_reported_with_signs_of_progress(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    paths = ["--output", str(tmp_path / "run"), "--models", str(write_encoders(tmp_path))]
    flags = (f"--logging.metrics_port={port}", *SLOW_FLAGS)
    process = start("run", str(MICRO), *paths, *flags, log=log)
    polled = list(follow(port, lambda: process.poll() is not None))
    errors = log.read_text()
    assert process.poll() == 0, errors
    assert "Traceback" not in errors, "a client that disconnects is not logged"
    responses = [progress for _, progress in polled]
    assert {progress["rank"] for progress in responses} == {0}, "from the first response on"
    assert {progress["numNodes"] for progress in responses} == {1}
    assert {progress["phase"] for progress in responses} <= set(get_args(Phase))
    order = list(dict.fromkeys(progress["phase"] for progress in responses))
    phases = ["import", "load", "evaluate", "sample"]  # before and after the evaluation: step
    assert [phase for phase in order if phase in phases] == [p for p in phases if p in order], (
        "some are too short to be polled"
    )
    assert {*phases, "step"} <= responses[-1]["phaseSeconds"].keys()
    for phase in ("evaluate", "sample"):
        assert num_progressed(phase, polled) >= 3, phase
    assert all(0 <= progress["secondsSinceProgress"] < 30 for progress in responses)
    assert all(p["secondsSinceProgress"] <= p["secondsInPhase"] for p in responses)
    spent = [sum(progress["phaseSeconds"].values()) for progress in responses]
    assert spent == sorted(spent)
    took = polled[-1][0] - polled[0][0]
    assert spent[-1] - spent[0] == pytest.approx(took, abs=TIMEOUT_SECONDS)


def set_environment_of_one_node(world: World) -> None:
    os.environ |= {"LOCAL_RANK": f"{world.rank}", "LOCAL_WORLD_SIZE": f"{world.size}"}


def train_and_save_slowly(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Train; rank 0's checkpoint first grows slowly, then does not grow, then is written."""
    set_environment_of_one_node(world)
    save = checkpoint.dcp.save

    def save_slowly(state: Any, *, storage_writer: Any, process_group: Any) -> Any:
        if world.is_main:
            with (Path(storage_writer.path) / "slow.bin").open("wb", buffering=0) as file:
                begin = time.monotonic()
                while time.monotonic() < begin + GROWING_SECONDS:
                    file.write(b"x" * 1000)
                    time.sleep(0.1)
            (paths.output / "blocked.json").write_text(json.dumps(time.time()))
            time.sleep(BLOCKED_SECONDS)
        return save(state, storage_writer=storage_writer, process_group=process_group)

    checkpoint.dcp.save = save_slowly
    with process_group() as joined:
        train(config, paths, joined)


@pytest.mark.parametrize(("asynchronous", "size"), [(True, 1), (False, 2)])
def test_a_final_checkpoint_is_alive_while_its_file_grows(
    tmp_path: Path, asynchronous: bool, size: int
) -> None:
    port, paths = free_port(), RunPaths(tmp_path / "output", tmp_path, tmp_path)
    changes = {
        "logging": {"metrics_port": port},
        "checkpoint": {"asynchronous": asynchronous, "every_steps": 0},
    }
    processes = ranks.start(train_and_save_slowly, resolve(merge(QUICK, changes)), paths, size)
    polled = list(follow(port, lambda: ended(processes)))
    assert [process.exitcode for process in processes] == [0] * size, ranks.output_of(paths)
    blocked = json.loads((paths.output / "blocked.json").read_text())
    saving = [(now, progress) for now, progress in polled if progress["phase"] == "save"]
    while_growing = [(now, progress) for now, progress in saving if now < blocked]
    assert num_progressed("save", while_growing) >= 3
    assert saving[0][1]["step"] == 1, "the last step is done"
    # growth is detected up to half a second later, and later still on busy cores
    while_blocked = [
        (now, a) for now, a in saving if blocked + 3 < now < blocked + BLOCKED_SECONDS - 0.5
    ]
    assert len(while_blocked) > 10, "it responds while it is blocked"
    # a busy machine delays responses, so times differ by that; progress would be as late as the response
    latest = max(now - progress["secondsSinceProgress"] for now, progress in while_blocked)
    assert latest < blocked + 3, "and reports no progress"
    assert while_blocked[-1][1]["secondsSinceProgress"] > BLOCKED_SECONDS - 2
    assert polled[-1][1]["phase"] in ("save", "finish")


def test_a_stopped_process_reports_no_progress_for_that_time(tmp_path: Path) -> None:
    port, paths = free_port(), RunPaths(tmp_path / "output", tmp_path, tmp_path)
    changes = {
        "logging": {"metrics_port": port},
        "evaluation": {"at_start": True, "batch_size": 1},
        "data": {"synthetic": {"validation_samples": 20_000}},
    }
    (process,) = ranks.start(ranks.train_alone, resolve(merge(QUICK, changes)), paths)
    assert process.pid is not None
    try:
        for _, progress in follow(port, lambda: ended([process])):
            if progress["phase"] == "evaluate":
                break
        os.kill(process.pid, signal.SIGSTOP)
        stopped = time.time()
        assert poll(port) is None, "a stopped process does not respond"
        time.sleep(1)
        os.kill(process.pid, signal.SIGCONT)
        responses = follow(port, lambda: ended([process]))
        times = [now - progress["secondsSinceProgress"] for now, progress in islice(responses, 20)]
        assert max(times) > stopped + 1, "it continues"
        assert not [t for t in times if stopped + 0.2 < t < stopped + 0.9]
    finally:
        process.kill()
        process.join()


def draw_with_a_slow_rank(config: RunConfig, paths: RunPaths, world: World) -> None:
    """Draw; each image of rank 1 takes a second."""
    set_environment_of_one_node(world)
    drawing = task.denoise
    if world.rank == 1:

        def draw_slowly(*arguments: Any) -> Any:
            time.sleep(1)
            return drawing(*arguments)

        task.denoise = draw_slowly
    with process_group() as joined:
        sample_prompts(config, paths, joined)


def test_sampling_reports_progress_until_the_last_rank_of_the_node_is_done(tmp_path: Path) -> None:
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
    processes = ranks.start(draw_with_a_slow_rank, config, paths, 2)
    polled = list(follow(port, lambda: ended(processes)))
    assert [process.exitcode for process in processes] == [0, 0], ranks.output_of(paths)
    assert polled[0][1]["phase"] == "load"
    assert num_progressed("finish", polled) >= 3, "images of the other rank are signs of progress"
    assert {progress["rank"] for _, progress in polled} == {0}
