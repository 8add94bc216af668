"""The files that SimpleTuner's config names: backends of pictures, and LyCORIS' options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.trainer.imports.simpletuner import simpletuner_files

from fluxtrain.cli import main
from fluxtrain.contract.run.adapter import LokrConfig
from fluxtrain.contract.run.config import value_at
from fluxtrain.contract.run.data import VariantsConfig
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, ConfigError
from fluxtrain.imports.files import import_file
from fluxtrain.imports.table import Disposition, Imported

BASE = {"model_family": "flux", "data_backend_config": "backends.json"}


def imported(
    folder: Path, backends: object = None, lycoris: object = None, **options: object
) -> Imported:
    """Return what is imported for a config with these options and files beside it."""
    for name, content in (("backends.json", backends), ("lycoris.json", lycoris)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    file = folder / "config.json"
    file.write_text(json.dumps({**BASE, **options}))
    return import_file(file, {})


def lokr_config(folder: Path) -> Path:
    """Write the three files of a LoKr as SimpleTuner finds them, and return the config."""
    config = folder / "config"
    config.mkdir()
    (config / "multidatabackend.json").write_text(simpletuner_files.BACKENDS)
    (config / "lycoris_config.json").write_text(simpletuner_files.LYCORIS)
    (config / "config.json").write_text(simpletuner_files.LOKR)
    return config / "config.json"


def test_a_lokr_of_pictures_with_masks_has_the_values_of_its_files(tmp_path: Path) -> None:
    found = import_file(lokr_config(tmp_path), {"data": {"images": "datasets/toys"}})
    config, data = found.config, found.config.data
    assert config.adapter is not None
    assert (config.adapter.kind, config.adapter.base_dtype) == ("lokr", "fp8")
    assert config.adapter.lokr.model_dump() == {
        "factor": 16,
        "decompose_both": False,
        "full_matrix": True,
    }
    assert (config.adapter.ranks.img_mod, config.adapter.ranks.img_mlp) == (0, None)
    assert (config.adapter.split_qkv, config.adapter_file.layout) == (False, "kohya")
    assert (data.images, data.masks) == ("datasets/toys", "datasets/toy-masks")
    assert (data.repeats, data.caption_prefix, data.class_tokens) == (10, "ohwx,", "")
    assert data.variants == VariantsConfig(
        captions=4, shuffle_caption=True, keep_tokens=1, separator="."
    )
    assert data.buckets is not None
    assert (data.buckets.resolutions, data.buckets.step) == ([512, 1024], 32)
    assert (data.image_size, config.schedule.epochs) == (1024, 20)
    missing = {line.option for line in found.lines[Disposition.MISSING]}
    assert missing == {
        *("lr_scheduler", "backends", "backend.is_regularisation_data"),
        *("validation_resolution", "validation_seed", "validation_negative_prompt"),
    }
    inert = {line.option for line in found.lines[Disposition.IGNORED]}
    assert inert >= {"resolution", "lora_rank", "lycoris.linear_alpha", "masked_loss_probability"}
    assert not found.lines[Disposition.UNKNOWN]


def test_the_written_file_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lokr.yaml"
    arguments = ["import-config", str(lokr_config(tmp_path)), "--data.images=datasets/toys"]
    assert main([*arguments, "--output", str(output)]) == EXIT_OK
    command = ["plan", str(output), "--schedule.epochs=null", "--schedule.steps=9"]
    assert main(command) == EXIT_OK
    assert "memory" in capsys.readouterr().out


OTHERS = {"linear_dim": 16, "linear_alpha": 8, "factor": 16, "full_matrix": True}


@pytest.mark.parametrize(("algo", "kind"), [("loha", "loha"), ("locon", "lora"), ("lora", "lora")])
def test_other_adapters_have_a_rank_and_no_options_of_a_lokr(
    tmp_path: Path, algo: str, kind: str
) -> None:
    file = lokr_config(tmp_path)
    (file.parent / "lycoris_config.json").write_text(json.dumps({"algo": algo, **OTHERS}))
    found = import_file(file, {"data": {"images": "datasets/toys"}})
    adapter = found.config.adapter
    assert adapter is not None
    assert (adapter.kind, adapter.rank, adapter.alpha) == (kind, 16, 8.0)
    assert adapter.split_qkv == (kind == "lora")
    assert adapter.lokr == LokrConfig()
    missing = {line.option for line in found.lines[Disposition.MISSING]}
    assert {"lycoris.factor", "lycoris.full_matrix"} <= missing


LOCAL = {"id": "a", "type": "local", "instance_data_dir": "toys", "resolution": 512}
BUCKETS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({}, {"data.buckets.step": 64, "data.image_size": 512, "data.variants": None}),
    ({"crop": True, "crop_style": "center"}, {"data.buckets": None, "data.variants": None}),
    ({"crop": True}, {"data.buckets": None, "data.variants.crops": 4}),
    ({"crop": True, "crop_aspect": "preserve"}, {"data.buckets.step": 64, "data.variants.crops": 4}),
    ({"resolution": 1.0, "resolution_type": "area"}, {"data.image_size": 1024}),
    ({"resolution": 768, "resolution_type": "pixel", "crop": True}, {"data.image_size": 768}),
    ({"instance_prompt": "a toy", "only_instance_prompt": True}, {"data.class_tokens": "a toy"}),
    ({"instance_prompt": "a toy", "caption_strategy": "instanceprompt"}, {"data.class_tokens": "a toy"}),
    ({"instance_prompt": "a toy"}, {"data.class_tokens": "", "data.caption_prefix": ""}),
    ({"repeats": 0}, {"data.repeats": 1}),
    ({"type": "aws", "aws_bucket_name": "b", "aws_data_prefix": "toys/"}, {"data.images": "s3://b/toys"}),
    ({"type": "huggingface", "dataset_name": "o/n", "revision": "v1", "split": "test",
      "caption_column": ["text"], "huggingface": {"image_column": "picture"}},
     {"data.images": "hf://datasets/o/n@v1", "data.table.split": "test",
      "data.table.caption_column": "text", "data.table.image_column": "picture"}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), BUCKETS, ids=range(len(BUCKETS)))
def test_an_option_of_a_backend_is_that_field(
    tmp_path: Path, options: dict[str, object], expected: dict[str, object]
) -> None:
    run = imported(tmp_path, [{**LOCAL, **options}]).config.model_dump()
    assert {path: value_at(run, path) for path in expected} == expected


NO_COUNTERPARTS: list[tuple[dict[str, object], str]] = [
    ({"type": "csv"}, "backend.type"),
    ({"caption_strategy": "filename"}, "backend.caption_strategy"),
    ({"caption_strategy": "parquet", "parquet": {"path": "a.parquet"}}, "backend.parquet.path"),
    ({"crop": True, "crop_style": "face"}, "backend.crop_style"),
    ({"crop": True, "crop_aspect": "closest"}, "backend.crop_aspect"),
    ({"minimum_image_size": 512}, "backend.minimum_image_size"),
    ({"caption_column": ["a", "b"]}, "backend.caption_column"),
    ({"probability": 0.5}, "backend.probability"),
]


@pytest.mark.parametrize(
    ("options", "name"), NO_COUNTERPARTS, ids=[name for _, name in NO_COUNTERPARTS]
)
def test_an_option_of_a_backend_without_a_counterpart_is_named(
    tmp_path: Path, options: dict[str, object], name: str
) -> None:
    found = imported(tmp_path, [{**LOCAL, **options}])
    assert name in {line.option for line in found.lines[Disposition.MISSING]}


LYCORIS = {"lora_type": "lycoris", "lycoris_config": "lycoris.json"}
LOKRS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"linear_dim": 8, "linear_alpha": 4}, {"adapter.rank": 8, "adapter.alpha": 4.0}),
    ({"linear_dim": 8, "linear_alpha": 0}, {"adapter.alpha": 8.0}),
    ({"full_matrix": True, "linear_dim": 8}, {"adapter.lokr.full_matrix": True, "adapter.rank": 16}),
    ({"apply_preset": {"target_module": ["Attention"]}},
     {"adapter.ranks.img_mlp": 0, "adapter.ranks.single": None}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), LOKRS, ids=range(len(LOKRS)))
def test_an_option_of_lycoris_is_that_field(
    tmp_path: Path, options: dict[str, object], expected: dict[str, object]
) -> None:
    run = imported(tmp_path, [LOCAL], {"algo": "lokr", **options}, **LYCORIS).config.model_dump()
    assert value_at(run, "adapter.kind") == "lokr"
    assert {path: value_at(run, path) for path in expected} == expected


def test_files_that_are_not_found_are_named(tmp_path: Path) -> None:
    missing = {line.option: line.note for line in imported(tmp_path).lines[Disposition.MISSING]}
    assert "data.images" in missing["data_backend_config"]
    with pytest.raises(ConfigError, match=r"lycoris_config: got 'lycoris.json'; .* was not found"):
        imported(tmp_path, **LYCORIS)


def test_keys_of_a_backend_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"aws_access_key_id": "hidden-1", "aws_secret_access_key": "hidden-2"}
    imported(tmp_path, [{"id": "a", "type": "aws", "aws_bucket_name": "b", **keys}])
    assert main(["import-config", str(tmp_path / "config.json")]) == EXIT_OK
    shown = "".join(capsys.readouterr())
    assert "aws_secret_access_key" in shown
    assert "hidden" not in shown


DEEP = "[" * 10_000 + "]" * 10_000
BAD_FILES: list[tuple[str, str, str]] = [
    ("backends.json", "{", "backends.json: invalid JSON: Expecting property name"),
    ("backends.json", '{"id": "a"}', "backends.json: got {'id': 'a'}; must be a list of mappings"),
    ("backends.json", "[3]", "backends.json: got [3]; must be a list of mappings"),
    ("backends.json", DEEP, "backends.json: "),
    ("backends.json", "[" * 40 + "]" * 40, "backends.json: is nested more than 32 levels deep"),
    ("backends.json", " " * (1 << 20) + "[]", "backends.json: got '1048578 bytes'; at most"),
    ("backends.json", '[{"repeats": "x"}]', "config.json: backend.repeats: got 'x'; must be a number"),
    ("backends.json", '[{"repeats": -1}]', "backend.repeats: got -1; must be a whole number, 0 or more"),
    ("backends.json", '[{"type": "ftp"}]', "backend.type: got 'ftp'; must be one of local, aws"),
    ("backends.json", '[{"type": ["local"]}]', "backend.type: got ['local']; must be text"),
    ("backends.json", '[{"resolution": []}]', "backend.resolution: got []; must be a number"),
    ("backends.json", '[{"resolution": {"a": 1}}]', "backend.resolution: got {'a': 1}; must not be"),
    ("backends.json", '[{"crop": 3}]', "backend.crop: got 3; must be true or false"),
    ("backends.json", '[{"crop": "False"}]', "backends.json: crop: got 'False'; is a text, which SimpleT"),
    ("backends.json", '[{"caption_strategy": "poem"}]', "got 'poem'; must be one of textfile"),
    ("backends.json", '[{"crop": true, "crop_style": "left"}]', "got 'left'; must be one of random"),
    ("lycoris.json", "[]", "lycoris.json: got []; must be a mapping of options"),
    ("lycoris.json", '{"algo": "lokr", "factor": 0}', "lycoris.factor: got 0; adapter.lokr.factor must"),
    ("lycoris.json", '{"algo": "lokr", "apply_preset": {"target_module": 3}}', "must be a list of texts"),
    ("lycoris.json", '{"algo": "lokr", "apply_preset": {"module_algo_map": [1]}}', "must be a mapping of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "line"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_refused_in_one_line(
    name: str, text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lycoris.json").write_text('{"algo": "lokr"}')
    (tmp_path / name).write_text(text)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BASE, **LYCORIS}))
    assert main(["import-config", str(file)]) == EXIT_USAGE
    out, error = capsys.readouterr()
    assert line in error
    assert error.count("\n") == 1
    assert len(error) < 600
    assert not out
