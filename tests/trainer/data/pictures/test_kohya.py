"""kohya's data set config and folders: read as they mean, or refused with the option and what to use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from fluxtrain.contract.run.data import BucketsConfig, DataConfig, VariantsConfig
from fluxtrain.data.pictures.kohya_config import own_sizes, repeats_note
from fluxtrain.data.pictures.picture import placements
from fluxtrain.data.pictures.subset import (
    batch_size_note,
    list_subsets,
    notes,
    subsets,
    training_pictures,
)
from fluxtrain.errors import FluxtrainError

TOML = """
[general]
caption_extension = ".txt"
keep_tokens = 2
shuffle_caption = false

[[datasets]]
resolution = 512
batch_size = 4

  [[datasets.subsets]]
  image_dir = "toy"
  num_repeats = 5
  class_tokens = "a toy"
  caption_prefix = "ohwx,"

  [[datasets.subsets]]
  image_dir = "/reg"
  is_reg = true

[[datasets]]
resolution = [512, 512]
caption_suffix = "in the wild"

  [[datasets.subsets]]
  image_dir = "other/below"
"""


def config(**fields: Any) -> DataConfig:
    return DataConfig(image_size=512, latent_size=64, **fields)


EASY_TRAINING = """
[[subsets]]
name = "subset 1"
image_dir = "toy"
num_repeats = 5
caption_extension = ".txt"

[[subsets]]
image_dir = "reg"
is_reg = true
num_repeats = 0

[general_args.args]
seed = 3
[general_args.dataset_args]
resolution = 512
batch_size = 4
keep_tokens = 0
"""


def test_the_toml_of_easy_training_is_a_data_set_config(tmp_path: Path) -> None:
    (tmp_path / "easy.toml").write_text(EASY_TRAINING)
    found = subsets(config(images="easy.toml"), tmp_path)
    assert [(it.label, it.repeats, it.is_reg) for it in found] == [
        ("toy/", 5, False),
        ("reg/", 1, True),
    ]
    assert own_sizes(tmp_path / "easy.toml") == {"image_size": 512}


def test_toml_and_json_are_read_with_the_lower_levels_first(tmp_path: Path) -> None:
    import tomllib

    (tmp_path / "dataset.toml").write_text(TOML)
    (tmp_path / "dataset.json").write_text(json.dumps(tomllib.loads(TOML)))
    read = [subsets(config(images=f"dataset.{kind}"), tmp_path) for kind in ("toml", "json")]
    assert read[0] == read[1]
    first, reg, last = read[0]
    assert (first.folder, first.repeats, first.is_reg) == (tmp_path / "toy", 5, False)
    assert (first.class_tokens, first.caption_prefix) == ("a toy", "ohwx,")
    assert (reg.folder, reg.repeats, reg.is_reg) == (Path("/reg"), 1, True)
    assert (last.folder, last.caption_suffix) == (tmp_path / "other/below", "in the wild")


@pytest.mark.parametrize(
    ("trained", "regs", "expected"),
    [(2, 3, [2, 2, 2]), (2, 4, [2, 2, 1, 1]), (1, 5, [1, 1, 1]), (3, 1, [9])],
)
def test_regularisation_images_are_as_many_as_the_others(
    tmp_path: Path, trained: int, regs: int, expected: list[int]
) -> None:
    for folder, count in (("toy", trained), ("reg", regs)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number}.png").touch()
    listed = [{"image_dir": "reg", "is_reg": True}, {"image_dir": "toy", "num_repeats": 3}]
    (tmp_path / "d.json").write_text(json.dumps({"datasets": [{"subsets": listed}]}))
    pictures = training_pictures(list_subsets(config(images="d.json"), tmp_path))
    assert [picture.repeats for picture in pictures] == [3] * trained + expected
    assert [picture.label for picture in pictures][-1] == f"reg/{len(expected) - 1}.png"


AT = "datasets[0].subsets[0]"
GOOD = {"image_dir": "toy"}
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"shuffle_caption": True}, f"{AT}.shuffle_caption: got true; copies are encoded before training: set "
     "spec.run.data.variants.captions to how many, such as 8"),
    ({"shuffle_caption": 1}, f"{AT}.shuffle_caption: got 1; "),
    ({"keep_tokens": -1}, f"{AT}.keep_tokens: got -1; must be a whole number from 0 to 1000"),
    ({"keep_tokens_separator": "|"}, f"{AT}.keep_tokens_separator: got '|'; set keep_tokens to"),
    ({"enable_wildcard": True}, f"{AT}.enable_wildcard: got true; captions are encoded once"),
    ({"caption_dropout_rate": 0.1}, "got 0.1; set it to 0 and use spec.run.flow.prompt_dropout"),
    ({"caption_dropout_every_n_epochs": 2}, "use spec.run.flow.prompt_dropout"),
    ({"caption_tag_dropout_rate": 0.5}, f"{AT}.caption_tag_dropout_rate: got 0.5; copies are"),
    ({"caption_tag_dropout_rate": 5}, f"{AT}.caption_tag_dropout_rate: got 5; "),
    ({"token_warmup_step": 3}, f"{AT}.token_warmup_step: got 3; captions are encoded once"),
    ({"flip_aug": "yes"}, f"{AT}.flip_aug: got 'yes'; must be true or false"),
    ({"color_aug": True}, f"{AT}.color_aug: got true; pictures are encoded once"),
    ({"random_crop": True}, f"{AT}.random_crop: got true; copies are encoded before training: set "
     "spec.run.data.variants.crops to how many, such as 4"),
    ({"random_crop": 3}, f"{AT}.random_crop: got 3; must be true or false"),
    ({"face_crop_aug_range": [1, 2]}, f"{AT}.face_crop_aug_range: got [1, 2]; pictures"),
    ({"alpha_mask": "yes"}, f"{AT}.alpha_mask: got 'yes'; must be true or false"),
    (
        {"enable_bucket": True},
        f"{AT}.enable_bucket: got true; set spec.run.data.buckets to {{step: 64, ",
    ),
    ({"validation_split": 0.1}, "set it to 0 and use spec.run.data.validation_split"),
    ({"metadata_file": "m.json"}, f"{AT}.metadata_file: got 'm.json'; put captions into metadata"),
    ({"conditioning_data_dir": 3}, f"{AT}.conditioning_data_dir: got 3; must be a text"),
    ({"resolution": 768}, f"{AT}.resolution: got 768; must be 512, the spec.run.data.image_size"),
    ({"resolution": [512, 768]}, f"{AT}.resolution: got [512, 768]; must be 512"),
    ({"caption_extension": ".cap"}, f"{AT}.caption_extension: got '.cap'; must be one of .txt, .c"),
    ({"image_dir": ""}, f"{AT}.image_dir: got ''; must name a folder of pictures"),
    ({"image_dir": 3}, f"{AT}.image_dir: got 3; must be a text"),
    ({"num_repeats": "5"}, f"{AT}.num_repeats: got '5'; must be a whole number"),
    ({"num_repeats": 0}, f"{AT}.num_repeats: got 0; must be from 1 to 100000"),
    ({"is_reg": 1}, f"{AT}.is_reg: got 1; must be true or false"),
    ({"is_reg": True}, "datasets: got 'is_reg in all subsets'; one must be trained"),
    ({"num_repeat": 5}, f"{AT}.num_repeat: got 5; no option that is read here"),
]  # fmt: skip


def test_options_that_change_copies_are_those_of_the_folder_and_then_of_the_run(
    tmp_path: Path,
) -> None:
    given = [
        {"image_dir": "a", "flip_aug": True, "shuffle_caption": True, "keep_tokens": 2},
        {"image_dir": "b", "random_crop": True, "caption_tag_dropout_rate": 0.25},
        {"image_dir": "c", "random_crop": False, "caption_separator": ";"},
    ]
    (tmp_path / "d.json").write_text(json.dumps({"datasets": [{"subsets": given}]}))
    run = VariantsConfig(crops=3, captions=5)
    found = [each.variants for each in subsets(config(images="d.json", variants=run), tmp_path)]
    assert found == [
        VariantsConfig(flip=True, crops=3, captions=5, shuffle_caption=True, keep_tokens=2),
        VariantsConfig(crops=3, captions=5, tag_dropout=0.25),
        VariantsConfig(crops=1, captions=5, separator=";"),
    ]


def test_masks_and_the_weight_of_regularisation_images(tmp_path: Path) -> None:
    given = [
        {"image_dir": "a", "conditioning_data_dir": "a-masks", "alpha_mask": True},
        {"image_dir": "b", "alpha_mask": True},
        {"image_dir": "c", "is_reg": True, "alpha_mask": False},
        {"image_dir": "d"},
    ]
    (tmp_path / "d.json").write_text(json.dumps({"datasets": [{"subsets": given}]}))
    found = subsets(config(images="d.json", masks="m", prior_loss_weight=0.5), tmp_path)
    assert [each.masks for each in found] == [
        tmp_path / "a-masks",
        None,
        tmp_path / "m",
        tmp_path / "m",
    ]
    assert [each.has_alpha_masks for each in found] == [False, True, False, False]
    assert [each.weight for each in found] == [1.0, 1.0, 0.5, 1.0]
    alpha = subsets(config(images="d.json", masks="alpha"), tmp_path)
    assert [each.has_alpha_masks for each in alpha] == [False, True, False, True]


@pytest.mark.parametrize(
    ("options", "message"), BAD_OPTIONS, ids=[json.dumps(options) for options, _ in BAD_OPTIONS]
)
def test_an_option_that_is_not_done_is_refused_with_what_to_use(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({"datasets": [{"subsets": [{**GOOD, **options}]}]}))
    with pytest.raises(FluxtrainError) as caught:
        subsets(config(images=path.name), tmp_path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


BUCKETS: dict[str, Any] = {"step": 64, "max_side": 1024, "resolutions": [512, 768]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_bucket": False}, "enable_bucket: got false; must be true, as spec.run.data"),
        ({"bucket_reso_steps": 32}, "bucket_reso_steps: got 32; must be 64, by the spec.run.data"),
        (
            {"max_bucket_reso": 2048},
            "got 2048; must be 1024, by the spec.run.data.buckets.max_side",
        ),
        ({"min_bucket_reso": 128}, "must be 384, by the spec.run.data.buckets.min_side of the run"),
        ({"bucket_no_upscale": True}, "must be false, by the spec.run.data.buckets.upscale of the"),
        ({"resolution": 640}, "got 640; must be 512 or 768, the spec.run.data.buckets.resolutions"),
        ({"resolution": [512, 768]}, f"{AT}.resolution: got [512, 768]; must be 512 or 768"),
    ],
)
def test_buckets_that_are_not_those_of_the_run_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    given = {"image_dir": "toy", "enable_bucket": True, **options}
    (tmp_path / "d.json").write_text(json.dumps({"datasets": [{"subsets": [given]}]}))
    with pytest.raises(FluxtrainError) as caught:
        subsets(config(images="d.json", buckets=BUCKETS), tmp_path)
    assert message in str(caught.value)


def test_a_data_set_of_one_resolution_is_trained_at_this_one(tmp_path: Path) -> None:
    sets = [{"resolution": side, "subsets": [{"image_dir": "toy"}]} for side in (512, 768)]
    general = {"enable_bucket": True, "bucket_reso_steps": 64, "max_bucket_reso": 1024}
    (tmp_path / "d.json").write_text(json.dumps({"general": general, "datasets": sets}))
    data = config(images="d.json", buckets=BUCKETS)
    small, large = subsets(data, tmp_path)
    assert (small.label, large.label) == ("toy/", "toy#2/")
    (found,) = placements(1500, 1000, data, large.resolution)
    assert found.size in BucketsConfig(**BUCKETS).sizes(768)
    assert len(placements(1500, 1000, data)) == 2


BAD_FILES = {
    "no JSON": ("d.json", "{", "is not JSON ("),
    "no TOML": ("d.toml", "[[datasets", "is not TOML ("),
    "a path of Windows": ("d.toml", 'image_dir = "E:\\DaVinci"', "string (at line 1, column 18)"),
    "a list": ("d.json", "[]", "the file: got []; must be a table of options"),
    "empty": ("d.toml", "", "datasets: got null; must be a list of at least one table"),
    "no subsets": ("d.json", '{"datasets": [{}]}', "datasets[0].subsets: got null; must be a list"),
    "a text": ("d.json", '{"datasets": ["a"]}', "datasets[0]: got 'a'; must be a table"),
    "other": ("d.json", '{"dataset": []}', "dataset: got []; no option that is read here"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, name: str) -> None:
    file, text, message = BAD_FILES[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(FluxtrainError) as caught:
        subsets(config(images=file), tmp_path)
    assert message in str(caught.value)


def test_a_missing_config_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FluxtrainError, match=r"d\.toml: cannot be read \(No such file"):
        subsets(config(images="d.toml"), tmp_path)
    (tmp_path / "d.json").write_text(json.dumps({"datasets": [{"subsets": [GOOD]}]}))
    with pytest.raises(FluxtrainError, match="toy: missing; it should hold pictures"):
        list_subsets(config(images="d.json"), tmp_path)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((None, None), ""),
        ((16, None), ""),
        ((4, None), "its batch_size of 4 is not read: a step has 16 samples"),
        ((4, 2), "its batch_size of 2 and 4 is not read: a step has 16 samples"),
        ((16, 2), "its batch_size of 2 is not read: a step has 16 samples"),
    ],
)
def test_another_batch_size_than_the_runs_is_told(
    tmp_path: Path, sizes: tuple[int | None, int | None], expected: str
) -> None:
    general, own = ({} if size is None else {"batch_size": size} for size in sizes)
    datasets = [{"subsets": [{"image_dir": "a", **own}]}]
    (tmp_path / "set.json").write_text(json.dumps({"general": general, "datasets": datasets}))
    note = batch_size_note(config(images="set.json"), tmp_path, 16)
    assert expected in note
    assert bool(expected) == bool(note)
    assert batch_size_note(config(images="folder"), tmp_path, 16) == ""


@pytest.mark.parametrize("resolution", [[[1, 2]], {"a": 1}, "512", 0.5, [], True, None])
@pytest.mark.parametrize("subsets", [7, None, "a", [1, None], {"a": 1}])
def test_own_sizes_of_malformed_tables_are_none(
    tmp_path: Path, resolution: object, subsets: object
) -> None:
    datasets = [{"resolution": resolution, "subsets": subsets}]
    (tmp_path / "set.json").write_text(json.dumps({"datasets": datasets}))
    assert own_sizes(tmp_path / "set.json") == {}


def pictures(root: Path, *names: str) -> None:
    """Make ``folder`` in ``root``, with folders of a picture each, and a file that looks like one."""
    (root / "folder").mkdir()
    (root / "folder" / "5_file.png").touch()
    for name in names:
        (root / "folder" / name).mkdir()
        Image.new("RGB", (32, 32)).save(root / "folder" / name / "a.png")


def data_config(**values: object) -> DataConfig:
    return DataConfig.model_validate({"images": "folder", "image_size": 32, **values})


def trained(config: DataConfig, root: Path) -> list[tuple[str, int, str]]:
    """Return folder, repeats and caption of each picture."""
    found = training_pictures(list_subsets(config, root))
    return [(each.path.parent.name, each.repeats, each.caption) for each in found]


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("toys", "a10_toy", "10"), {}),
        ((), {}),
        (("10_ohwx toy",), {"repeats": 10}),
        (("10_toy",), {"images": "https://host/10_a.tar"}),
        (("10_toy",), {"images": "absent"}),
    ],
)
def test_other_folders_are_as_they_are(
    tmp_path: Path, names: tuple[str, ...], values: dict[str, object]
) -> None:
    pictures(tmp_path, *names)
    assert repeats_note(data_config(**values), tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("10_ohwx toy", (10, "ohwx toy")),
        ("3_", (3, "")),
        ('07_a: "b"\u2028#', (7, 'a: "b"\u2028#')),
    ],
)
def test_one_folder_is_a_few_fields(tmp_path: Path, name: str, expected: tuple[int, str]) -> None:
    pictures(tmp_path, name, "0_ignored", "others")
    [note] = notes(data_config(), tmp_path, 16)
    assert note.isprintable()
    advice = note.partition(" are no repeats here; set spec.run.data to ")[2]
    assert trained(data_config(**yaml.safe_load(advice)), tmp_path) == [(name, *expected)]


def test_several_folders_are_a_data_set_config(tmp_path: Path) -> None:
    pictures(tmp_path, "10_ohwx toy", "1_reg", "others", "2_é")
    [note] = notes(data_config(images="folder/"), tmp_path, 16)
    assert note.isprintable()
    image, _, content = note.partition(" to ")[2].partition(", a file with ")
    (tmp_path / json.loads(image)).write_text(content)
    found = trained(data_config(images=json.loads(image)), tmp_path)
    assert found == [("10_ohwx toy", 10, "ohwx toy"), ("1_reg", 1, "reg"), ("2_é", 2, "é")]


def test_very_many_folders_are_written_in_part(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for number in range(60):
        (tmp_path / "folder" / f"1_{number:02d}").mkdir()
    note = repeats_note(data_config(), tmp_path)
    assert note.endswith('"num_repeats": 1, "class_tokens": "49"}]}]}, and the same for 10 more')
