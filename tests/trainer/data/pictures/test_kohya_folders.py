"""Folders with repeats in their names: the message has what to write, and that is what kohya reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.pictures.kohya_config import repeats_note
from fluxtrain.data.pictures.subset import list_subsets, notes, training_pictures


def pictures(root: Path, *names: str) -> None:
    """Make ``folder`` in ``root``, with folders of a picture each, and a file that looks like one."""
    (root / "folder").mkdir()
    (root / "folder" / "5_file.png").touch()
    for name in names:
        (root / "folder" / name).mkdir()
        Image.new("RGB", (32, 32)).save(root / "folder" / name / "a.png")


def config(**values: object) -> DataConfig:
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
    assert repeats_note(config(**values), tmp_path) == ""


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
    [note] = notes(config(), tmp_path, 16)
    assert note.isprintable()
    advice = note.partition(" are no repeats here; set spec.run.data to ")[2]
    assert trained(config(**yaml.safe_load(advice)), tmp_path) == [(name, *expected)]


def test_several_folders_are_a_data_set_config(tmp_path: Path) -> None:
    pictures(tmp_path, "10_ohwx toy", "1_reg", "others", "2_é")
    [note] = notes(config(images="folder/"), tmp_path, 16)
    assert note.isprintable()
    image, _, content = note.partition(" to ")[2].partition(", a file with ")
    (tmp_path / json.loads(image)).write_text(content)
    found = trained(config(images=json.loads(image)), tmp_path)
    assert found == [("10_ohwx toy", 10, "ohwx toy"), ("1_reg", 1, "reg"), ("2_é", 2, "é")]


def test_very_many_folders_are_written_in_part(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for number in range(60):
        (tmp_path / "folder" / f"1_{number:02d}").mkdir()
    note = repeats_note(config(), tmp_path)
    assert note.endswith('"num_repeats": 1, "class_tokens": "49"}]}]}, and the same for 10 more')
