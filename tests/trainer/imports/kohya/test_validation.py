"""kohya's options of the validation: the interval in samples, and why the others have no counterpart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.imports.kohya.kohya_files import imported

from fluxtrain.errors import ConfigError
from fluxtrain.imports.table import Disposition, Imported

FILE = """
network_module = "networks.lora_flux"
train_data_dir = "pictures"
train_batch_size = 2
gradient_accumulation_steps = 3
seed = 5
"""
SPLIT = "validation_split = 0.1\n"


def every(found: Imported) -> int:
    return found.config.evaluation.every_samples


def note(found: Imported, disposition: Disposition, option: str) -> str:
    [line] = [line for line in found.lines[disposition] if line.option == option]
    return line.note


@pytest.mark.parametrize(
    ("options", "samples", "expected"),
    [
        ("validate_every_n_steps = 50", None, 50 * 12),
        ("validate_every_n_steps = 50", 100, 50 * 12),
        ("validate_every_n_steps = 50\nvalidate_every_n_epochs = 3", 100, 50 * 12),
        ("validate_every_n_epochs = 3", 100, 3 * 8 * 12),  # 45 batches on two GPUs, three each
        ("validate_every_n_epochs = 3", None, 0),
        ("", 100, 8 * 12),  # each epoch, by default
        ("", None, 0),
    ],
)
def test_the_interval_is_in_samples(
    tmp_path: Path, options: str, samples: int | None, expected: int
) -> None:
    found = imported(tmp_path, FILE + SPLIT + options, processes=2, samples=samples)
    assert (every(found), found.config.evaluation.at_end) == (expected, True)
    assert found.config.evaluation_steps == expected // 12


@pytest.mark.parametrize(
    ("split", "steps"),
    [
        ("", 40),
        ("validation_split = 0", 40),
        ("validation_split = 0.2", 32),
        ("validation_split = 0.02", 40),
    ],
)
def test_pictures_that_are_held_out_do_not_count_in_epochs(
    tmp_path: Path, split: str, steps: int
) -> None:
    epochs = "max_train_epochs = 8\nsave_every_n_epochs = 4\n"
    found = imported(tmp_path, FILE + epochs + split, samples=30)  # five steps of six in an epoch
    assert found.config.schedule.steps == steps
    assert found.config.adapter_file.every_steps == steps // 2


def test_an_interval_that_is_not_known_is_told(tmp_path: Path) -> None:
    found = imported(tmp_path, FILE + SPLIT)
    text = note(found, Disposition.MISSING, "validate_every_n_epochs")
    assert "give --epoch-samples" in text
    assert "--evaluation.every_samples" in text
    both = FILE + SPLIT + "validate_every_n_steps = 50\nvalidate_every_n_epochs = 3"
    text = note(imported(tmp_path, both), Disposition.MISSING, "validate_every_n_epochs")
    assert text.startswith("evaluations have one interval: validate_every_n_steps")


@pytest.mark.parametrize("split", ["", "validation_split = 0\n", "validation_split = 0.0\n"])
def test_without_a_split_the_options_do_nothing_there_either(tmp_path: Path, split: str) -> None:
    options = (
        "validate_every_n_steps = 50\nvalidate_every_n_epochs = 3\nvalidation_seed = 7\n"
        "max_validation_steps = 2\n"
    )
    found = imported(tmp_path, FILE + split + options, samples=100)
    assert every(found) == 0
    inert = {line.option for line in found.lines[Disposition.IGNORED]}
    assert inert >= {line.partition(" ")[0] for line in options.splitlines()}
    quiet = imported(tmp_path, FILE + split, samples=100)
    named = [line.option for lines in quiet.lines.values() for line in lines]
    assert "validate_every_n_epochs" not in named


def test_a_seed_of_its_own_and_a_part_of_the_pictures_have_no_counterpart(tmp_path: Path) -> None:
    found = imported(tmp_path, FILE + SPLIT + "validation_seed = 7\nmax_validation_steps = 2\n")
    assert "the seed of the run" in note(found, Disposition.MISSING, "validation_seed")
    assert "a smaller validation_split" in note(found, Disposition.MISSING, "max_validation_steps")
    same = imported(tmp_path, FILE + SPLIT + "validation_seed = 5\n")
    assert note(same, Disposition.AUTOMATIC, "validation_seed") == "is the seed of the run"


@pytest.mark.parametrize(
    "option", ["validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps"]
)
def test_zero_asks_for_none_and_other_values_are_refused(tmp_path: Path, option: str) -> None:
    zero = imported(tmp_path, f"{FILE}{SPLIT}{option} = 0\n", samples=100)
    assert note(zero, Disposition.IGNORED, option) == "0 asks for none"
    for value in ("-1", "1.5", "true", '"often"', "[2]"):
        with pytest.raises(ConfigError, match=rf"{option}: got .*must be a (whole )?number"):
            imported(tmp_path, f"{FILE}{SPLIT}{option} = {value}\n")


@pytest.mark.parametrize(
    ("loss", "disposition"),
    [
        ("huber", Disposition.MISSING),
        ("smooth_l1", Disposition.MISSING),
        ("l1", Disposition.IGNORED),
    ],
)
def test_a_threshold_is_lost_with_the_loss_that_uses_it(
    loss: str, disposition: Disposition, tmp_path: Path
) -> None:
    text = f'{FILE}loss_type = "{loss}"\nhuber_c = 0.1\n'
    lines = imported(tmp_path, text).lines[disposition]
    assert "huber_c" in [line.option for line in lines]
