"""The task end to end: real trainings in their own processes, one of which runs out of memory."""

from __future__ import annotations

import csv
import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.commands import fluxtrain, start

from fluxtrain.benchmark.trial import is_out_of_memory
from fluxtrain.errors import EXIT_STOPPED, EXIT_USAGE

FILE = """
apiVersion: fluxtrain.dev/v1alpha1
kind: FluxTraining
metadata: {name: benchmark}
spec:
  run:
    preset: micro
    task: benchmark
    data: {num_workers: 0}
    logging: {metrics_port: 0}
    benchmark:
      {micro_batch_sizes: [2, 60000], scaling: [weak], steps: 5, warmup_steps: 1, memory_gib: 2}
"""


def rows(output: Path) -> list[dict[str, str]]:
    with (output / "benchmark.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.proof
@pytest.mark.slow
def test_a_batch_that_does_not_fit_costs_only_its_own_processes(tmp_path: Path) -> None:
    file, output = tmp_path / "job.yaml", tmp_path / "run"
    file.write_text(FILE)
    command = ("run", str(file), "--output", str(output), "--processes", "2")
    done = fluxtrain(*command)
    assert done.returncode == 0, done.stderr
    small, large, alone = rows(output)
    assert (small["micro_batch_size"], small["num_ranks"], small["status"]) == ("2", "2", "done")
    assert float(small["slowest"]) <= float(small["images_per_second_per_gpu"])
    assert float(small["tflops_per_gpu"]) > 0
    assert (small["mfu"], small["mfu_peak"]) == ("", "unknown")
    assert (large["micro_batch_size"], large["status"]) == ("60000", "out of memory"), done.stderr
    assert (alone["micro_batch_size"], alone["num_ranks"], alone["status"]) == ("2", "1", "done")
    assert "images/s/rank" in done.stdout
    assert "weak scaling: 32 px" in done.stdout
    assert (output / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    assert not list(output.glob("trials/*/checkpoints/step_*")), "nothing is saved"
    again = fluxtrain(*command)
    assert again.returncode == 0, again.stderr
    assert len(list((output / "trials").iterdir())) == 3, "nothing is measured twice"
    assert again.stdout == done.stdout
    trials: list[dict[str, Any]] = json.loads((output / "benchmark.json").read_text())["trials"]
    assert "memory" in trials[1]["reason"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_ends_with_what_it_needs(tmp_path: Path) -> None:
    """Exit code 2 and no allocator's words: their line is in benchmark.json."""
    file, output = tmp_path / "job.yaml", tmp_path / "run"
    file.write_text(FILE.replace("[2, 60000]", "[60000]"))
    done = fluxtrain("run", str(file), "--output", str(output))
    assert done.returncode == EXIT_USAGE, done.stderr
    said = "batch 60000 each: out of memory; it needs GPUs, or more memory"
    assert f"{said}; examples/benchmark-cpu.yaml has a model for CPUs" in done.stderr
    assert "Allocator" not in done.stderr
    (trial,) = json.loads((output / "benchmark.json").read_text())["trials"]
    assert "memory" in trial["reason"]


def trial_processes(output: Path) -> list[int]:
    """Return the processes of trials that write below ``output``."""
    found = list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                f"FLUXTRAIN_OUTPUT={output / 'trials'}".encode()
                in (folder / "environ").read_bytes()
            ):
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_a_benchmark_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    file, output = tmp_path / "job.yaml", tmp_path / "run"
    file.write_text(FILE.replace("steps: 5", "steps: 5000000"))
    process = start("run", str(file), "--output", str(output), log=tmp_path / "log")
    try:
        deadline = time.monotonic() + 120
        while not trial_processes(output) and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == EXIT_STOPPED, (tmp_path / "log").read_text()
    finally:
        process.kill()
    assert trial_processes(output) == []
    message = (tmp_path / "log").read_text().splitlines()[-1]
    assert message.endswith(f"{output} holds what was measured; the same command continues")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("HIP out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("memory"), False),
    ],
)
def test_memory_errors_are_told_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    wrapped = RuntimeError("a worker failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) == expected
