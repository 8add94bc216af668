"""kohya's TOML: the fields have its values, or its defaults, and no option is dropped silently."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml
from tests.trainer.imports.kohya import kohya_files
from tests.trainer.imports.kohya.kohya_files import imported

from fluxtrain.cli import main
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.config import value_at
from fluxtrain.contract.run.data import VariantsConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition


def test_a_lora_has_the_values_of_its_file(tmp_path: Path) -> None:
    found = imported(tmp_path, kohya_files.LORA, processes=2, samples=400)
    config = found.config
    assert config.adapter is not None
    assert config.initial_weights == "/models/flux1-dev.safetensors"
    assert (config.encoders.clip, config.encoders.t5) == (
        "/models/clip_l.safetensors",
        "/models/t5xxl_fp16.safetensors",
    )
    assert (config.adapter.rank, config.adapter.alpha) == (16, 8.0)
    assert (config.adapter.double_blocks, config.adapter.ranks.img_mod) == ("0-9", 0)
    assert config.adapter.split_qkv
    assert (config.adapter.dropout, config.adapter.rank_dropout) == (0.2, 0.1)
    assert (config.optim.name, config.optim.learning_rate) == ("adamw_8bit", 4e-4)
    assert (config.optim.weight_decay, config.optim.beta2) == (0.05, 0.99)
    assert config.optim.max_grad_norm == 1e12, "0 clips nothing"
    assert config.schedule.global_batch_size == 16, "4 images, 2 batches, 2 processes"
    assert config.parallel.micro_batch_size == 4
    assert config.schedule.steps == 500, "400 images are 25 updates of an epoch"
    assert (config.schedule.decay, config.schedule.warmup_steps) == ("cosine", 25)
    assert (config.flow.timestep_sampling, config.flow.shift) == ("shift", 3.1582)
    assert (config.flow.sigmoid_scale, config.flow.prompt_dropout) == (1.1, 0.05)
    assert config.flow.guidance == 1.0
    assert (config.data.image_size, config.data.latent_size) == (768, 96)
    assert (config.adapter_file.name, config.adapter_file.dtype) == ("my-cat", "float16")
    assert config.adapter_file.every_steps == 50
    assert config.parallel.activation_checkpointing == 1.0
    assert (config.sampling.every_steps, config.sampling.prompt_file) == (250, "prompts.txt")
    assert config.logging.wandb is not None
    assert config.logging.wandb.project == "cats"


def test_a_fine_tuning_has_the_values_of_its_file(tmp_path: Path) -> None:
    config = imported(tmp_path, kohya_files.FINE_TUNING).config
    assert config.adapter is None
    assert (config.data.images, config.data.repeats) == ("pictures", 5)
    assert config.data.caption_prefix == "pin, "
    assert not config.model.guidance_embed
    assert config.data.text_length == 256
    assert (config.schedule.steps, config.schedule.warmup_steps) == (3000, 50)
    assert (config.schedule.decay, config.schedule.global_batch_size) == ("constant", 2)
    assert (config.optim.learning_rate, config.optim.beta2) == (5e-6, 0.999)
    assert config.flow.timestep_sampling == "flux_shift"
    assert config.checkpoint.every_steps == 500
    assert config.parallel.activation_checkpointing == 0.0


def test_files_of_all_weights_are_checkpoints_every_so_many_epochs_too(tmp_path: Path) -> None:
    each = kohya_files.FINE_TUNING.replace("save_every_n_steps = 500", "save_every_n_epochs = 2")
    assert imported(tmp_path, each, samples=400).config.checkpoint.every_steps == 400


def test_what_is_not_given_has_the_values_of_sd_scripts(tmp_path: Path) -> None:
    config = imported(
        tmp_path, 'network_module = "networks.lora_flux"\ntimestep_sampling = "sigmoid"\n'
    ).config
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha) == (4, 1.0)
    assert (config.optim.learning_rate, config.optim.weight_decay) == (2e-6, 0.01)
    assert (config.optim.beta1, config.optim.beta2) == (0.9, 0.999)
    assert (config.schedule.steps, config.schedule.warmup_steps) == (1600, 0)
    assert config.schedule.global_batch_size == 1
    assert (config.seed, config.flow.prompt_dropout) == ("random", 0.0)
    assert (config.flow.guidance, config.precision.compute) == (3.5, "float32")


@pytest.mark.parametrize("text", [kohya_files.LORA, kohya_files.FINE_TUNING])
def test_every_option_is_named_once(tmp_path: Path, text: str) -> None:
    found = imported(tmp_path, text, samples=400)
    named = [line.option for lines in found.lines.values() for line in lines if line.is_given]
    given: set[str] = set()
    for key, value in tomllib.loads(text).items():
        given |= set(value) if isinstance(value, dict) else {key}
    entries = {name.partition(".")[0] for name in named if "." in name}
    assert sorted({*named} - {n for n in named if "." in n}) == sorted(given - entries)
    assert len(named) == len(set(named))
    assert all(line.values for line in found.lines[Disposition.WRITTEN])
    assert all(
        line.note
        for disposition in Disposition
        if disposition is not Disposition.WRITTEN
        for line in found.lines[disposition]
    )


def test_options_that_do_nothing_or_are_unknown_are_told_apart(tmp_path: Path) -> None:
    lines = imported(tmp_path, kohya_files.LORA, samples=400).lines
    inert = {line.option for line in lines[Disposition.IGNORED]}
    assert inert >= {"noise_offset", "min_snr_gamma", "lr_scheduler_num_cycles"}
    assert "fp8_base" in {line.option for line in lines[Disposition.WRITTEN]}
    assert [line.option for line in lines[Disposition.UNKNOWN]] == ["flux_magic"]


def test_the_file_resolves_to_the_same_and_hides_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = imported(tmp_path, kohya_files.LORA, samples=400)
    source, output = tmp_path / "kohya.toml", tmp_path / "lora.yaml"
    arguments = ["import-config", str(source), "--epoch-samples", "400", "--output", str(output)]
    assert main(arguments) == EXIT_OK
    report, text = capsys.readouterr().err, output.read_text()
    assert resolve(load_job(output).spec.run) == found.config
    assert yaml.safe_load(text)["metadata"]["name"] == "kohya"
    assert found.config.adapter is not None
    assert found.config.adapter.base_dtype == "fp8"
    for name in ("noise_offset", "flux_magic", "wandb_api_key"):
        assert name in report
        assert name in text
    assert "not-to-be-shown" not in report + text
    assert main(arguments) == EXIT_USAGE, "a file is never replaced"


def test_fields_of_the_command_line_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kohya.toml"
    file.write_text(kohya_files.LORA)
    assert main(["import-config", str(file), "--schedule.steps=9", "--adapter.rank", "2"]) == 0
    run = yaml.safe_load(capsys.readouterr().out)["spec"]["run"]
    assert (run["schedule"]["steps"], run["adapter"]["rank"]) == (9, 2)


def test_intervals_in_epochs_need_the_number_of_samples(tmp_path: Path) -> None:
    found = imported(tmp_path, kohya_files.LORA)
    assert found.config.schedule.epochs == 20
    notes = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    for name in ("save_every_n_epochs", "lr_warmup_steps"):
        assert "--epoch-samples" in notes[name]


def test_an_optimizer_that_is_not_here_keeps_its_learning_rate_to_itself(tmp_path: Path) -> None:
    text = 'network_module = "networks.lora_flux"\noptimizer_type = "DAdaptAdam"\nlearning_rate = 1.0\n'
    found = imported(tmp_path, text)
    missing = {line.option for line in found.lines[Disposition.MISSING]}
    assert {"optimizer_type", "learning_rate"} <= missing
    assert found.config.optim.learning_rate == 1e-4, "the preset's"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ('lr_scheduler = "cosine_with_restarts"\nlr_scheduler_num_cycles = 3', {"cycles": 3}),
        (
            'lr_scheduler = "polynomial"\nlr_scheduler_power = 2',
            {"power": 2, "min_learning_rate": 1e-7},
        ),
        ('lr_scheduler = "linear"\nlr_warmup_steps = 10', {"decay": "linear", "warmup_steps": 10}),
        ('lr_scheduler = "constant"\nlr_warmup_steps = 10', {"warmup_steps": 0}),
        (
            'lr_scheduler = "cosine_with_min_lr"\nlr_scheduler_min_lr_ratio = 0.1\nlearning_rate = 1e-3',
            {"decay": "cosine", "min_learning_rate": 1e-4},
        ),
    ],
)
def test_a_schedule_has_its_numbers(
    tmp_path: Path, options: str, expected: dict[str, object]
) -> None:
    schedule = imported(tmp_path, f"full_bf16 = false\n{options}").config.schedule.model_dump()
    assert {key: schedule[key] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ('weighting_scheme = "logit_normal"\nlogit_mean = 0.5\nlogit_std = 2',
         {"timestep_sampling": "logit_normal", "logit_mean": -0.5, "logit_std": 2.0}),
        ('weighting_scheme = "mode"\nmode_scale = 1.0', {"timestep_sampling": "mode", "mode_scale": 1}),
        ('weighting_scheme = "cosmap"', {"timestep_sampling": "uniform"}),
    ],
)  # fmt: skip
def test_sigma_without_a_shift_is_the_draw_of_the_weighting_scheme(
    tmp_path: Path, options: str, expected: dict[str, object]
) -> None:
    flow = imported(tmp_path, f"discrete_flow_shift = 1.0\n{options}").config.flow.model_dump()
    assert {key: flow[key] for key in expected} == expected


def test_sigma_with_a_shift_has_no_counterpart(tmp_path: Path) -> None:
    missing = imported(tmp_path, "full_bf16 = false").lines[Disposition.MISSING]
    assert ("timestep_sampling", "sigma") in {(line.option, str(line.value)) for line in missing}


@pytest.mark.parametrize("prompts", ["", 'sample_prompts = "prompts.toml"\n'])
def test_images_need_a_text_file_of_prompts(tmp_path: Path, prompts: str) -> None:
    found = imported(tmp_path, f"{prompts}sample_every_n_steps = 5")
    assert "sample_every_n_steps" in {line.option for line in found.lines[Disposition.MISSING]}
    assert found.config.sampling.every_steps == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ('optimizer_type = "Lion8bit"\nlearning_rate = 3e-5',
         {"name": "lion", "beta2": 0.99, "weight_decay": 0.0, "learning_rate": 3e-5}),
        ('optimizer_type = "prodigy"\nlearning_rate = 1\noptimizer_args = ["d_coef=2", "decouple=True"]',
         {"name": "prodigy", "weight_decay": 0.0, "learning_rate": 1.0, "beta2": 0.999}),
        ('optimizer_type = "AdaFactor"\noptimizer_args = ["relative_step=False", "scale_parameter=False"]',
         {"name": "adafactor", "weight_decay": 0.0, "learning_rate": 2e-6}),
        ('optimizer_type = "AdamWScheduleFree"\nlearning_rate = 1e-3',
         {"name": "schedule_free_adamw", "weight_decay": 0.0, "beta1": 0.9}),
    ],
)  # fmt: skip
def test_an_optimizer_has_the_settings_of_its_package(
    tmp_path: Path, options: str, expected: dict[str, object]
) -> None:
    optim = imported(tmp_path, options).config.optim.model_dump()
    assert {key: optim[key] for key in expected} == expected


@pytest.mark.parametrize(
    "options",
    [
        'optimizer_type = "AdaFactor"',
        'optimizer_type = "Prodigy"\nlearning_rate = 1\noptimizer_args = ["decouple=False"]',
    ],
)
def test_an_optimizer_with_other_settings_has_no_counterpart(tmp_path: Path, options: str) -> None:
    found = imported(tmp_path, options)
    assert found.config.optim.name == "adamw"
    notes = {line.option: line.note for line in found.lines[Disposition.MISSING]}
    assert "only with optimizer_args" in notes["optimizer_type"]
    assert "learning_rate" in notes


def test_an_adapter_begins_with_a_file_and_its_up_matrices_learn_faster(tmp_path: Path) -> None:
    text = 'network_weights = "a.safetensors"\nnetwork_args = ["loraplus_lr_ratio=4"]\n'
    config = imported(tmp_path, 'network_module = "networks.lora_flux"\n' + text).config
    assert config.adapter is not None
    assert (config.adapter.initial, config.adapter.rates.up) == ("a.safetensors", 4.0)


def test_buckets_are_kohya_s(tmp_path: Path) -> None:
    text = (
        "resolution = 1024\nenable_bucket = true\nbucket_reso_steps = 128\nmax_bucket_reso = 2048\n"
    )
    buckets = imported(tmp_path, f"{text}bucket_no_upscale = true").config.data.buckets
    assert buckets is not None
    assert (buckets.step, buckets.min_side, buckets.max_side) == (128, 256, 2048)
    assert not buckets.upscale
    assert (1280, 768) in buckets.sizes(1024)
    assert imported(tmp_path, "max_bucket_reso = 2048").config.data.buckets is None
    wide = "resolution = [512, 768]\nenable_bucket = true\nbucket_reso_steps = 256\n"
    buckets = imported(tmp_path, wide).config.data.buckets
    assert buckets is not None
    assert (buckets.step, buckets.max_side) == (256, 1024)


def test_a_data_set_config_is_a_name_of_images(tmp_path: Path) -> None:
    found = imported(tmp_path, 'dataset_config = "dataset.toml"\nmax_train_epochs = 3')
    assert (found.config.data.images, found.config.schedule.epochs) == ("dataset.toml", 3)


SETS = """
[general]
enable_bucket = true
bucket_reso_steps = 128
[[datasets]]
resolution = 512
batch_size = 32
max_bucket_reso = 768
[[datasets]]
resolution = 512
batch_size = 32
max_bucket_reso = 1024
"""


@pytest.mark.parametrize("name", ["sets.toml", "/gone/sets.toml", r"C:\gone\sets.toml"])
def test_what_a_data_set_config_states_in_all_sets_wins(tmp_path: Path, name: str) -> None:
    (tmp_path / "sets.toml").write_text(SETS)
    file = tmp_path / "train.sh"
    file.write_text(f"python flux_train.py --train_batch_size 4 --dataset_config '{name}' --ae a")
    config = import_file(file, {}).config
    assert (config.schedule.global_batch_size, config.data.image_size) == (32, 512)
    assert config.data.buckets is not None
    assert (config.data.buckets.step, config.data.buckets.max_side) == (128, 1024)


@pytest.mark.parametrize("sizes", [(32, 8), (8, 32), (32, '"many"')], ids=str)
def test_of_different_batches_of_data_sets_the_largest_counts(
    tmp_path: Path, sizes: tuple[object, object]
) -> None:
    start, middle, end = SETS.split("batch_size = 32")
    first, last = (f"batch_size = {size}" for size in sizes)
    (tmp_path / "sets.toml").write_text(start + first + middle + last + end)
    file = tmp_path / "train.sh"
    file.write_text("python flux_train.py --train_batch_size 4 --dataset_config sets.toml --ae a")
    assert import_file(file, {}).config.schedule.global_batch_size == 32


def test_options_that_change_images_and_captions_ask_for_copies(tmp_path: Path) -> None:
    text = (
        "flip_aug = true\nrandom_crop = true\nshuffle_caption = true\nkeep_tokens = 1\n"
        "caption_tag_dropout_rate = 0.1\ncaption_separator = ';'\n"
    )
    data = imported(tmp_path, f"train_data_dir = 'toy'\n{text}").config.data
    assert data.variants == VariantsConfig(
        flip=True,
        crops=4,
        captions=8,
        shuffle_caption=True,
        keep_tokens=1,
        tag_dropout=0.1,
        separator=";",
    )
    missing = imported(tmp_path, text).lines[Disposition.MISSING]
    assert {"flip_aug", "random_crop", "shuffle_caption"} <= {line.option for line in missing}
    masks = "alpha_mask = true\nprior_loss_weight = 0.5\n"
    data = imported(tmp_path, f"dataset_config = 'd.toml'\n{masks}").config.data
    assert (data.masks, data.prior_loss_weight) == ("alpha", 0.5)
    off = "train_data_dir = 'toy'\nflip_aug = false\nkeep_tokens = 0\n"
    assert imported(tmp_path, off).config.data.variants is None


def test_repeats_of_no_images_have_no_counterpart(tmp_path: Path) -> None:
    missing = imported(tmp_path, "dataset_repeats = 3").lines[Disposition.MISSING]
    assert "dataset_repeats" in {line.option for line in missing}


def test_lokr_of_lycoris_has_its_options(tmp_path: Path) -> None:
    arguments = '["algo=lokr", "factor=8", "full_matrix=False", "decompose_both=True"]'
    text = f'network_module = "lycoris.kohya"\nnetwork_dim = 8\nnetwork_args = {arguments}\n'
    config = imported(tmp_path, text).config
    assert config.adapter is not None
    assert (config.adapter.kind, config.adapter.rank, config.adapter.alpha) == ("lokr", 8, 1.0)
    assert config.adapter.lokr.model_dump() == {
        "factor": 8,
        "decompose_both": True,
        "full_matrix": False,
    }


@pytest.mark.parametrize(
    ("module", "preset", "disposition", "layers"),
    [
        ("lycoris.kohya", "full", Disposition.AUTOMATIC, []),
        ("lycoris.kohya", "attn-mlp", Disposition.AUTOMATIC, []),
        ("lycoris.kohya", "unet-only", Disposition.AUTOMATIC, []),
        ("lycoris.kohya", "attn-only", Disposition.WRITTEN,
         ["img_attn.qkv", "img_attn.proj", "txt_attn.qkv", "txt_attn.proj"]),
        ("lycoris.kohya", "ia3", Disposition.MISSING, []),
        ("lycoris.kohya", "presets/flux.toml", Disposition.MISSING, []),
        ("networks.lora_flux", "attn-only", Disposition.IGNORED, []),
    ],
)  # fmt: skip
def test_a_preset_of_lycoris_chooses_the_layers(
    module: str, preset: str, disposition: Disposition, layers: list[str], tmp_path: Path
) -> None:
    text = f'ae = "a"\nnetwork_module = "{module}"\nnetwork_args = ["algo=lokr", "preset={preset}"]'
    found = imported(tmp_path, text)
    assert "network_args.preset" in {line.option for line in found.lines[disposition]}
    assert found.config.adapter is not None
    assert found.config.adapter.layers == layers
    lost = {line.option for line in found.lines[Disposition.MISSING]}
    assert ("network_train_unet_only" in lost) != (preset == "unet-only")


@pytest.mark.parametrize(
    "options",
    ['network_module = "lycoris.kohya"\nnetwork_args = ["algo=locon", "factor=8"]',
     'network_module = "lycoris.kohya"\nnetwork_args = ["algo=loha", "factor=8"]',
     'network_module = "networks.lora_flux"\nnetwork_args = ["factor=8"]'],
)  # fmt: skip
def test_options_of_a_lokr_are_named_beside_others(tmp_path: Path, options: str) -> None:
    missing = {line.option for line in imported(tmp_path, options).lines[Disposition.MISSING]}
    assert {it for it in missing if it.startswith("network_")} - {"network_train_unet_only"} == {
        "network_args.factor"
    }


@pytest.mark.parametrize(
    ("options", "name"),
    [("use_8bit_adam = true", "adamw_8bit"), ("use_lion_optimizer = true", "lion"),
     ("use_8bit_adam = false", "adamw"), ('use_8bit_adam = true\noptimizer_type = "Lion"', "lion")],
)  # fmt: skip
def test_older_options_choose_an_optimizer(tmp_path: Path, options: str, name: str) -> None:
    assert imported(tmp_path, options).config.optim.name == name


def test_options_of_a_lora_are_named_beside_lokr(tmp_path: Path) -> None:
    arguments = '["algo=lokr", "rank_dropout=0.1", "split_qkv=True", "loraplus_lr_ratio=4"]'
    text = f'network_module = "lycoris.kohya"\nnetwork_args = {arguments}\nnetwork_dropout = 0.1\n'
    missing = {line.option for line in imported(tmp_path, text).lines[Disposition.MISSING]}
    names = ("rank_dropout", "split_qkv", "loraplus_lr_ratio")
    assert {"network_dropout", *(f"network_args.{name}" for name in names)} <= missing


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 4), (8, 14), (35, 55)])
def test_swapped_blocks_are_offloaded(tmp_path: Path, count: int, expected: int) -> None:
    text = f"blocks_to_swap = {count}\n{kohya_files.LORA}"
    assert imported(tmp_path, text).config.parallel.offload_blocks == expected


def test_blocks_that_are_trained_are_not_offloaded(tmp_path: Path) -> None:
    found = imported(tmp_path, kohya_files.FINE_TUNING)
    assert found.config.parallel.offload_blocks == 0
    assert "blocks_to_swap" in {line.option for line in found.lines[Disposition.MISSING]}


EASY = kohya_files.EASY_TRAINING


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (("", ""), {"adapter.rank": 8, "adapter.alpha": 4.0, "adapter.double_blocks": "none"}),
        (("", ""), {"data.images": "pictures/cat", "data.repeats": 4, "data.image_size": 768}),
        (("", ""), {"data.buckets.step": 64, "data.variants.keep_tokens": 1}),
        (("", ""), {"schedule.global_batch_size": 2, "schedule.steps": 750, "seed": "random"}),
        (("", ""), {"schedule.decay": "cosine", "schedule.warmup_steps": 38}),  # 37.5, rounded
        (("", ""), {"optim.name": "prodigy", "optim.prodigy.d_coef": 2.0, "optim.beta2": 0.99}),
        (("", ""), {"optim.prodigy.bias_correction": True, "optim.max_grad_norm": 1.0}),
        (("", ""), {"flow.timestep_sampling": "shift", "flow.shift": 3.1, "flow.guidance": 1.0}),
        (("", ""), {"adapter.clip.rank": 8, "adapter_file.name": "cat_v1"}),
        (('lr_scheduler = "cosine"', 'lr_scheduler = "constant"'), {"schedule.warmup_steps": 0}),
        (('train_blocks = "single"', 'algo = "lokr"\nfactor = 8'),
         {"adapter.kind": "lokr", "adapter.lokr.factor": 8}),
        (('keep_tokens = 1', 'is_reg = true'), {"data.images": "kohya.toml"}),
        (('[train_mode]', '[[subsets]]\nimage_dir = "b"\n[train_mode]'), {"data.images": "kohya.toml"}),
        (("[[subsets]]", "[other]"), {"data.images": None}),
    ],
)  # fmt: skip
def test_the_toml_of_easy_training_is_what_its_backend_makes_of_it(
    change: tuple[str, str], values: dict[str, object], tmp_path: Path
) -> None:
    found = imported(tmp_path, EASY.replace(*change))
    given = found.config.model_dump()
    assert {path: value_at(given, path) for path in values} == values
    assert not found.lines[Disposition.UNKNOWN]
    notes = {line.option: line.note for line in found.lines[Disposition.AUTOMATIC]}
    assert "LoRA_Easy_Training_Scripts" in notes["save_toml"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('train_mode = "lora"', 'train_mode = "textual_inversion"'), "asks for textual inversion"),
        (("[flux_args.args]", "[sd_args.args]"), "it has no flux_args"),
        (("guidance_scale = 1.0", "guidance_scale = 0.0"), "must be networks.lora_flux"),
        (("network_dim = 8", "network_dim = 8\nfa = true"), "asks for adapters of another kind"),
        (('train_blocks = "single"', "unit = 4"), "asks for adapters of another kind"),
        (("[noise_args]", "[noise_args]\nargs = 3"), "must be tables"),
        (("[[subsets]]", "[subsets]"), "must be tables"),
        (("[extra_args.args]", "[extra_args.args]\nnetwork_args = 3"), "must be a table"),
    ],
)
def test_the_toml_of_easy_training_for_something_else_is_refused(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        imported(tmp_path, EASY.replace(*change))


def test_a_ratio_of_the_warm_up_is_of_easy_training_alone(tmp_path: Path) -> None:
    text = 'network_module = "networks.lora_flux"\nlr_scheduler = "cosine"\nwarmup_ratio = 0.1'
    found = imported(tmp_path, text)
    assert found.config.schedule.warmup_steps == 0
    assert [line.option for line in found.lines[Disposition.IGNORED]] == ["warmup_ratio"]
