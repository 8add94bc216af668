"""Which trials a benchmark runs, its search for the largest micro batch; the machine is a formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.benchmark.fake_machine import FakeMachine

from fluxtrain.benchmark.report import PLOT_FILE, write_report
from fluxtrain.benchmark.results import NUM_PARTS, Results, Trial, settings
from fluxtrain.benchmark.task import Study, largest_that_fits, powers_up_to, rank_counts
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.contract.run.setting import Setting
from fluxtrain.errors import ConfigError
from fluxtrain.parallel.distributed import World

pytestmark = pytest.mark.slow

ALONE = World.alone()


def make_config(first: int = 8, most: int = 256, **benchmark: Any) -> RunConfig:
    return resolve(
        {
            "preset": "benchmark",
            "parallel": {"micro_batch_size": first},
            "schedule": {"global_batch_size": 48},
            "benchmark": {"largest_micro_batch": most, **benchmark},
        }
    )


def nodes(count: int, local_size: int) -> World:
    return World(0, 0, count * local_size, ALONE.device, local_size, count)


def study(folder: Path, machine: FakeMachine, config: RunConfig, world: World = ALONE) -> Results:
    results = Results(folder, config)
    Study(config, world, machine.run, results).run()
    return results


def measured(machine: FakeMachine) -> list[int]:
    return [trial.micro_batch_size for trial in machine.trials if trial.is_measured]


def test_the_largest_batch_and_the_powers_below_it_are_measured(tmp_path: Path) -> None:
    machine = FakeMachine()
    study(tmp_path, machine, make_config())
    tries = [trial.micro_batch_size for trial in machine.trials if not trial.is_measured]
    assert tries == [8, 16, 32, 24, 20, 22, 21]
    assert measured(machine) == [1, 2, 4, 8, 16, 21]


def test_a_batch_that_fits_for_a_few_steps_only_is_followed_by_smaller_ones(tmp_path: Path) -> None:
    machine = FakeMachine(largest=40, steady=33)
    study(tmp_path, machine, make_config())
    assert measured(machine) == [1, 2, 4, 8, 16, 32, 40, 35, 31]


def test_given_batches_are_measured_without_a_search(tmp_path: Path) -> None:
    machine = FakeMachine()
    results = study(tmp_path, machine, make_config(micro_batch_sizes=[4, 64, 2, 4]))
    assert [trial.micro_batch_size for trial in machine.trials] == [2, 4, 64]
    assert [result.fits for result in results.measured] == [True, True, False]


def test_nothing_fits(tmp_path: Path) -> None:
    machine = FakeMachine(largest=0)
    results = study(tmp_path, machine, make_config(scaling=["weak"]))
    assert [trial.micro_batch_size for trial in machine.trials] == [8, 4, 2, 1]
    assert results.measured == []
    assert results.last is not None
    assert results.last.trial.micro_batch_size == 1
    assert results.last.ending == "out of memory"
    assert "images/s" in write_report(make_config(), tmp_path, 1, results.measured)


def test_a_second_run_measures_only_what_is_new(tmp_path: Path) -> None:
    study(tmp_path, FakeMachine(), make_config(micro_batch_sizes=[4]))
    machine = FakeMachine()
    study(tmp_path, machine, make_config(micro_batch_sizes=[4, 8]))
    assert measured(machine) == [8]


@pytest.mark.parametrize(
    ("num_nodes", "local_size", "counts"),
    [(1, 1, [1]), (1, 2, [1, 2]), (1, 8, [1, 2, 4, 8]), (6, 8, [8, 16, 32, 48]), (2, 1, [1, 2])],
)
def test_studies_double_whole_nodes_or_the_ranks_of_one(
    num_nodes: int, local_size: int, counts: list[int]
) -> None:
    assert rank_counts(num_nodes, local_size) == counts


def test_weak_scaling_keeps_the_batch_of_a_rank(tmp_path: Path) -> None:
    machine = FakeMachine()
    config = make_config(micro_batch_sizes=[4, 8], scaling=["weak"])
    results = study(tmp_path, machine, config, nodes(4, 8))
    shapes = [(t.num_ranks, t.micro_batch_size, t.global_batch_size) for t in machine.trials]
    assert shapes == [(32, 4, 128), (32, 8, 256), (8, 8, 64), (16, 8, 128)], "8 is the fastest"
    text = write_report(config, tmp_path, 32, results.measured)
    *_, headings, one, two, four, files = text.splitlines()
    assert "weak scaling: 512 px" in text
    assert headings.split() == [
        "ranks",
        "batch",
        "of",
        "all",
        "images/s",
        "images/s/rank",
        "efficiency",
    ]
    assert [line.split()[0] for line in (one, two, four)] == ["8", "16", "32"]
    assert one.endswith(" 100.0%")
    assert four.endswith(f" {(1 + 0.02 * 7) / (1 + 0.02 * 31):.1%}")
    assert files.endswith("benchmark.csv, benchmark.json, benchmark.png")


def test_strong_scaling_divides_the_global_batch(tmp_path: Path) -> None:
    machine = FakeMachine()
    config = make_config(micro_batch_sizes=[16], scaling=["strong"])
    results = study(tmp_path, machine, config, nodes(1, 4))
    shapes = [(t.num_ranks, t.micro_batch_size, t.global_batch_size) for t in machine.trials]
    assert shapes == [(4, 16, 64), (1, 16, 48), (2, 16, 48), (4, 12, 48)]
    assert "strong scaling" in write_report(config, tmp_path, 4, results.measured)


def test_published_figures_of_the_same_setting_are_shown_with_the_ratio(
    tmp_path: Path,
) -> None:
    config = make_config(micro_batch_sizes=[1, 8], image_sizes=[512, 1024])
    machine = FakeMachine()
    results = study(tmp_path, machine, config)
    text = write_report(config, tmp_path, 1, results.measured)
    ours = machine.rate(machine.trials[0])
    assert (
        f"published: 2.03 images/s per GPU at batch 1 on MI300X (AMD FluxBenchmark, its README); "
        f"here {ours / 2.03:.2f} times as many\n"
    ) in text
    assert "4.51 images/s per GPU at batch 10 on MI300X" in text, "without a ratio: other batches"
    assert text.count("published: ") == 3


def test_results_of_gpus_have_the_variables_of_recipes_beside_those_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "2")
    monkeypatch.delenv("ROCBLAS_USE_HIPBLASLT", raising=False)
    config = make_config(micro_batch_sizes=[1], image_sizes=[1024])
    results = study(tmp_path, FakeMachine(), config)
    text = write_report(config, tmp_path, 1, results.measured)
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert rows["environment"][1:5] == ["here", "ours", "MLPerf", "v6.0"]
    assert rows["GPU_MAX_HW_QUEUES"][1:6] == ["2", "-", "-", "2", "8"]
    assert rows["ROCBLAS_USE_HIPBLASLT"][1:6] == ["-", "-", "-", "-", "1"]
    assert rows["NCCL_PXN_DISABLE"][2:5] == ["0", "0", "1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"depth": 8}},
        {"parallel": {"activation_checkpointing": 1.0}},
        {"precision": {"fp8": "tensorwise"}},
        {"data": {"text_length": 256}},
    ],
)
def test_figures_of_other_settings_are_not_shown(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = resolve({"preset": "benchmark", "benchmark": {"micro_batch_sizes": [1]}, **changes})
    results = study(tmp_path, FakeMachine(), config)
    assert "published" not in write_report(config, tmp_path, 1, results.measured)


def test_the_plot_is_a_png_whatever_was_measured(tmp_path: Path) -> None:
    for name, batches in (("all", [1, 4, 64]), ("none", [64])):
        folder = tmp_path / name
        folder.mkdir()
        config = make_config(micro_batch_sizes=batches, scaling=["weak", "strong"])
        results = study(folder, FakeMachine(), config, nodes(2, 1))
        write_report(config, folder, 2, results.measured)
        assert (folder / PLOT_FILE).read_bytes().startswith(b"\x89PNG")


SETTING = Setting(64, 8, "bfloat16", "tensorwise", 0.5, True)


def make_sweep_config(**benchmark: object) -> RunConfig:
    return resolve({"preset": "micro", "task": "benchmark", "benchmark": benchmark})


def test_the_product_of_all_lists_is_measured() -> None:
    config = make_sweep_config(
        image_sizes=[32, 64],
        text_lengths=[4, 8],
        compute=["bfloat16", "float32"],
        fp8=["none", "rowwise"],
        activation_checkpointing=[0.0, 1.0],
        compile=[True, False],
    )
    found = list(settings(config))
    assert len(found) == len(set(found)) == 64
    assert Setting(64, 4, "float32", "rowwise", 1.0, False) in found


def test_an_empty_list_has_the_value_of_the_run() -> None:
    assert list(settings(make_sweep_config())) == [Setting(32, 4, "float32", "none", 0.0, False)]


def test_a_trial_is_a_training_of_its_setting_that_never_saves() -> None:
    config = make_sweep_config(steps=20, warmup_steps=6)
    trial = Trial(SETTING, 3, 4, 12, is_measured=True)
    run = trial.config(config)
    assert (run.task, run.data.image_size, run.data.latent_size) == ("train", 64, 8)
    assert (run.data.text_length, run.precision.compute) == (8, "bfloat16")
    assert run.precision.fp8 == "tensorwise"
    assert (run.parallel.activation_checkpointing, run.parallel.compile) == (0.5, True)
    assert run.schedule.global_batch_size == 12
    assert trial.num_steps(config) == 28, "two parts of 4 steps before five that are measured"
    assert run.logging.every_steps * NUM_PARTS == 20
    assert run.schedule.steps > trial.num_steps(config), "the last step would save"
    never = run.checkpoint.every_steps, run.checkpoint.memory_every_steps, run.evaluation_steps
    assert never == (0, 0, 0)


def test_a_trial_that_only_has_to_fit_is_short() -> None:
    trial = Trial(SETTING, 3, 4, 12, is_measured=False)
    assert trial.num_steps(make_sweep_config(steps=1000, warmup_steps=100)) == 3


@pytest.mark.parametrize(
    ("benchmark", "message"),
    [
        ({"image_sizes": [100]}, r"spec\.run\.benchmark\.image_sizes.*100"),
        ({"micro_batch_sizes": [0]}, r"spec\.run\.benchmark\.micro_batch_sizes.*0"),
        ({"compute": ["float8"]}, r"spec\.run\.benchmark\.compute.*float8"),
        ({"memory_gib": 0}, r"spec\.run\.benchmark\.memory_gib: got 0"),
        ({"steps": 0}, r"spec\.run\.benchmark\.steps: got 0"),
    ],
)
def test_bad_values_are_refused_with_their_field(
    benchmark: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sweep_config(**benchmark)


def test_the_preset_has_the_setting_of_fluxbenchmark() -> None:
    config = resolve({"preset": "benchmark"})
    (setting,) = settings(config)
    assert (setting.image_size, setting.text_length, setting.compute) == (512, 512, "bfloat16")
    assert setting.activation_checkpointing == 0
    assert config.model.guidance_embed
    assert config.image_tokens + config.data.text_length == 1536


@given(
    limit=st.integers(0, 300),
    first=st.integers(1, 300),
    most=st.integers(1, 300),
)
def test_the_largest_that_fits_is_found_in_few_tries(limit: int, first: int, most: int) -> None:
    tried = list[int]()

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert largest_that_fits(fits, first, most) == min(limit, most)
    assert len(tried) == len(set(tried)), "nothing is tried twice"
    assert all(1 <= batch <= most for batch in tried)
    assert len(tried) <= 2 * math.log2(300) + 3


def test_it_doubles_then_bisects() -> None:
    tried = list[int]()

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= 21

    assert largest_that_fits(fits, 4, 256) == 21
    assert tried == [4, 8, 16, 32, 24, 20, 22, 21]


@pytest.mark.parametrize(
    ("largest", "batches"),
    [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])],
)
def test_powers_of_two_and_the_largest_are_measured(largest: int, batches: list[int]) -> None:
    assert powers_up_to(largest) == batches
