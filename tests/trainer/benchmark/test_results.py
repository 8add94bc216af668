"""Results are kept after each trial, and belong to one config."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.benchmark.report import render
from fluxtrain.benchmark.results import (
    CSV_FILE,
    JSON_FILE,
    Measurement,
    Outcome,
    Result,
    Results,
    Status,
    Trial,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.contract.run.setting import Setting
from fluxtrain.errors import ConfigError, DataError

SETTING = Setting(512, 512, "bfloat16", "none", 0.25, None)
FACTS = {"device": "AMD Instinct MI300X", "device_memory_bytes": 192 << 30, "compiled": True}


def make_config(**changes: Any) -> RunConfig:
    return resolve({"preset": "micro", "task": "benchmark", **changes})


def record(step: int, rate: float, seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "samples": 64 * step,
        "samples_per_second": rate,
        "seconds": seconds,
        "tflops_per_gpu": rate,
        "mfu": rate / 1000,
        "mfu_peak": "a peak",
        "memory_allocated_bytes": 100 << 30,
        "memory_reserved_bytes": 110 << 30,
        "data_wait_seconds": 1.0,
    }


def outcome(rates: list[float]) -> Outcome:
    records = [record(4 * n, rate, 10.0 * n) for n, rate in enumerate(rates, 1)]
    return Outcome(Status.DONE, "", records, FACTS)


def trial(batch: int, is_measured: bool = True) -> Trial:
    return Trial(SETTING, batch, 8, 8 * batch, is_measured)


def measured(batch: int = 8) -> Result:
    found = Measurement.of(outcome([1.0, 1.0, 36.0, 40.0, 44.0, 32.0, 40.0]), 8)
    return Result(trial(batch), Status.DONE, "", found)


def test_a_measurement_is_the_median_of_the_parts_after_the_warm_up() -> None:
    found = measured().measurement
    assert found is not None
    assert (found.images_per_second_per_gpu, found.slowest, found.fastest) == (5.0, 4.0, 5.5)
    assert found.step_seconds == pytest.approx(64 / 40)
    assert (found.tflops_per_gpu, found.mfu) == (40.0, 0.04)
    assert found.data_wait_fraction == pytest.approx(5.0 / 50.0)
    assert (found.device, found.compiled) == ("AMD Instinct MI300X", True)


def test_without_a_warm_up_the_first_part_counts() -> None:
    found = Measurement.of(outcome([8.0] * 5), 8)
    assert (found.slowest, found.data_wait_fraction) == (1.0, 0.1)


def test_a_stopped_benchmark_knows_what_it_measured(tmp_path: Path) -> None:
    results = Results(tmp_path, make_config())
    out = Result(trial(9, is_measured=False), Status.OUT_OF_MEMORY, "no room", None)
    results.add(out)
    results.add(measured())
    again = Results(tmp_path, make_config(benchmark={"steps": 7}, logging={"metrics_port": 0}))
    assert again.get(trial(9, is_measured=False)) == out
    assert again.get(trial(8)) == measured()
    assert again.get(trial(9)) is None
    assert (again.num_trials, again.measured) == (2, [measured()])


@pytest.mark.parametrize(
    ("status", "memory", "is_known"),
    [
        (Status.DONE, 2.0, True),
        (Status.OUT_OF_MEMORY, 1.0, True),
        (Status.OUT_OF_MEMORY, 2.0, False),
        (Status.FAILED, 1.0, False),
    ],
)
def test_another_start_repeats_what_may_end_otherwise(
    tmp_path: Path, status: Status, memory: float, is_known: bool
) -> None:
    tried = trial(9, is_measured=False)
    first = Results(tmp_path, make_config(benchmark={"memory_gib": 1.0}))
    first.add(Result(tried, status, "", None))
    again = Results(tmp_path, make_config(benchmark={"memory_gib": memory}))
    assert (again.get(tried) is not None) == is_known


def test_results_of_another_config_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, make_config()).add(measured())
    with pytest.raises(ConfigError, match="of another run; use another folder"):
        Results(tmp_path, make_config(model={"depth": 2}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": {}}'])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / JSON_FILE).write_text(text)
    with pytest.raises((DataError, ConfigError), match=JSON_FILE):
        Results(tmp_path, make_config())


def test_the_csv_has_a_row_for_each_measurement(tmp_path: Path) -> None:
    results = Results(tmp_path, make_config())
    results.add(Result(trial(4, is_measured=False), Status.DONE, "", None))
    results.add(measured())
    results.add(Result(trial(16), Status.OUT_OF_MEMORY, "no room", None))
    with (tmp_path / CSV_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["micro_batch_size"], row["status"]) for row in rows] == [
        ("8", "done"),
        ("16", "out of memory"),
    ]
    assert float(rows[0]["images_per_second_per_gpu"]) == 5.0
    assert rows[1]["images_per_second_per_gpu"] == ""
    assert json.loads((tmp_path / JSON_FILE).read_text())["run"]["preset"] == "micro"


def test_the_table_tells_speed_memory_and_what_failed() -> None:
    out = Result(trial(16), Status.OUT_OF_MEMORY, "no room", None)
    failed = Result(trial(32), Status.FAILED, "ValueError: x (trials/0003/rank_0.log)", None)
    lines = render([result.row() for result in (measured(), out, failed)]).splitlines()
    assert len({len(line) for line in lines[:2]}) == 1, "columns are aligned"
    assert "512 px   512   bfloat16         25%       yes      8      8" in lines[1]
    for part in ("5", "4-5.5", "40", "4.0%", "100.0", "110.0", "10%"):
        assert part in lines[1].split(), part
    assert lines[2].endswith("out of memory")
    assert lines[4:] == [
        "on AMD Instinct MI300X; peak of MFU: a peak",
        "failed at batch 32: ValueError: x (trials/0003/rank_0.log)",
    ]
