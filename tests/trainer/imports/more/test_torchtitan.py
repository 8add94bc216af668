"""What torchtitan's options mean for FLUX.1, alone and in commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from fluxtrain.contract.run.config import value_at
from fluxtrain.errors import ConfigError
from fluxtrain.imports.files import import_file, refuse_lost
from fluxtrain.imports.table import Disposition

FLUX = 'name = "flux"\nflavor = "flux-schnell"\n'
EIGHT = "[training]\nlocal_batch_size = 4\nsteps = 100\n"


def imported(path: Path, text: str, gpus: int = 8) -> Mapping[str, object]:
    path.write_text(text)
    return import_file(path, {}, gpus).config.model_dump()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {"schedule.decay": "linear", "schedule.decay_fraction": 1.0}),
        ("[lr_scheduler]\ndecay_ratio = 0.0\ndecay_type = 'cosine'", {"schedule.decay": "constant"}),
        (
            "[lr_scheduler]\ndecay_ratio = 0.25\ndecay_type = 'cosine'\nmin_lr_factor = 0.1\n"
            "[optimizer]\nlr = 0.5",
            {
                "schedule.decay": "cosine",
                "schedule.decay_fraction": 0.25,
                "schedule.min_learning_rate": 0.05,
            },
        ),
        ("[lr_scheduler]\nwarmup_steps = 300", {"schedule.warmup_steps": 100}),
        ("[activation_checkpoint]\nmode = 'none'", {"parallel.activation_checkpointing": 0.0}),
        ("[activation_checkpoint]\nmode = 'selective'", {"parallel.activation_checkpointing": 1.0}),
        ("", {"schedule.global_batch_size": 32, "parallel.micro_batch_size": 4}),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 8",
            {"schedule.global_batch_size": 64, "parallel.dp_replicate": 2},
        ),
        ("[parallelism]\ncontext_parallel_degree = 2", {"schedule.global_batch_size": 16}),
        ("[checkpoint]\nenable = true\nkeep_latest_k = 0",
         {"checkpoint.every_steps": 500, "checkpoint.keep": 10_000}),
        ("[checkpoint]\ninterval = 9\nasync_mode = 'async'",
         {"checkpoint.every_steps": 0, "checkpoint.asynchronous": True}),
        (
            "[validation]\nenable = true\nfreq = 10\nsteps = -1\nsave_img_count = 0\n"
            "dataset = 'coco-validation'",
            {
                "evaluation.every_samples": 320,
                "sampling.every_steps": 0,
                "data.validation": "coco-validation",
            },
        ),
        ("[validation]\nfreq = 10\nsteps = 3", {"evaluation.every_samples": 0, "data.validation": None}),
    ],
)  # fmt: skip
def test_an_option_means_what_it_means_there(
    text: str, values: Mapping[str, object], tmp_path: Path
) -> None:
    found = imported(tmp_path / "a.toml", f"[model]\n{FLUX}{EIGHT}{text}")
    assert {path: value_at(found, path) for path in values} == values


@pytest.mark.parametrize(
    ("key", "rate", "is_lost"), [("batch_size", 0.1, False), ("local_batch_size", 0.01, True)]
)
def test_prompts_are_dropped_together_or_each_by_itself(
    key: str, rate: float, is_lost: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"[model]\n{FLUX}[training]\n{key} = 4\nclassifer_free_guidance_prob = 0.1")
    found = import_file(path, {})
    assert found.config.flow.prompt_dropout == pytest.approx(rate)
    assert bool(found.lines[Disposition.MISSING]) == is_lost
    if is_lost:
        with pytest.raises(ConfigError, match="each encoder's prompt is dropped by itself"):
            refuse_lost(found, "a.toml")


def test_a_command_wins_over_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "flux.toml").write_text(f"[model]\n{FLUX}{EIGHT}[compile]\nenable = true\n")
    text = (
        "cd torchtitan\nNODES=2\nexport CONFIG_FILE=train_configs/flux.toml\n"
        "NGPU=8 ./run_train.sh --training.steps=7 --compile.no-enable "
        '--parallelism.data-parallel-replicate-degree ${NODES} "$@"\n'
    )
    found = imported(tmp_path / "t.sh", text)
    values = {"schedule.steps": 7, "parallel.compile": False, "parallel.dp_replicate": 2}
    assert {path: value_at(found, path) for path in values} == values
    with pytest.raises(ConfigError, match=r"num_processes: got '8'.*: give --gpus 8"):
        imported(tmp_path / "t.sh", text, gpus=4)


def test_a_checkpoint_of_its_own_is_named_as_lost_and_safetensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    text = f"[model]\n{FLUX}[checkpoint]\nenable = true\ninitial_load_path = 'w'\n"
    path.write_text(text)
    lost = import_file(path, {}).lines[Disposition.MISSING]
    assert [line.option for line in lost] == ["checkpoint.initial_load_path"]
    assert imported(path, f"{text}initial_load_in_hf = true")["initial_weights"] == "w"
