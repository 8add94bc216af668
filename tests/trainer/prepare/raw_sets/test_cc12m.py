"""CC12M: cleaned as by the reference, with the same bytes for any number of workers and interruptions."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps
from tests.trainer.prepare.cli_process import (
    command,
    is_killed_after,
    kill_before_each,
    require_success,
)
from tests.trainer.prepare.raw_sets.raw_cc12m import (
    UNUSABLE,
    USABLE,
    parts,
    write_raw_cc12m,
    write_tar,
)
from tests.trainer.ranks import made_in

from fluxtrain.cli import main
from fluxtrain.data.images import TarImages
from fluxtrain.errors import ConfigError, DataError, StorageError
from fluxtrain.prepare.cc12m import RejectedError, clean, prepare_cc12m, read_problematic
from fluxtrain.prepare.download import FolderSource, open_source
from fluxtrain.runtime.files import exclusive_lock

pytestmark = pytest.mark.slow


def reference_pixels(content: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels after datasets' decoding, torchvision's resizing and the conversion to RGB."""
    image: Image.Image = Image.open(io.BytesIO(content))
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation) is not None:
        image = ImageOps.exif_transpose(image)
    width, height = image.size
    if width <= height:
        width, height = 256, int(256 * height / width)
    else:
        width, height = int(256 * width / height), 256
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    top, left = round((height - 256) / 2.0), round((width - 256) / 2.0)
    return np.array(image.crop((left, top, left + 256, top + 256)).convert("RGB"))


@pytest.mark.parametrize("kind", USABLE)
def test_a_cleaned_image_is_bit_identical_to_the_references(kind: str) -> None:
    with Image.open(io.BytesIO(clean(USABLE[kind]))) as cleaned:
        assert (cleaned.format, cleaned.mode, cleaned.size) == ("PNG", "RGB", (256, 256))
        assert np.array_equal(np.array(cleaned), reference_pixels(USABLE[kind]))


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_image_is_rejected_with_its_reason(kind: str) -> None:
    content, reason = UNUSABLE[kind]
    with pytest.raises(RejectedError) as raised:
        clean(content)
    assert raised.value.reason == reason
    assert len(raised.value.detail) < 250


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    write_raw_cc12m(folder)
    return folder


def prepare(
    raw: Path, output: Path, num_samples: int | None = None, **options: Any
) -> dict[str, Any]:
    return prepare_cc12m(FolderSource(raw), output, num_samples, stream=io.StringIO(), **options)


def dropped(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "dropped.jsonl").read_text().splitlines()]


def test_the_usable_samples_become_a_data_set(tmp_path: Path) -> None:
    samples = write_raw_cc12m(tmp_path / "raw")
    report = prepare(tmp_path / "raw", tmp_path / "set", num_workers=2)
    kept = [sample for sample, reason in samples if reason is None]
    dataset = TarImages(tmp_path / "set")
    assert [dataset.key(i) for i in range(len(dataset))] == [key for key, _ in kept]
    for i, (_, files) in enumerate(kept):
        assert dataset.caption(i) == files["txt"].decode()
        pixels = dataset.image(i).permute(1, 2, 0).numpy()
        assert np.array_equal(pixels, reference_pixels(files["jpg"]))
    rejected = [(i, key, why) for i, ((key, _), why) in enumerate(samples) if why is not None]
    rows = dropped(tmp_path / "set")
    assert [(row["index"], row["key"], row["reason"]) for row in rows] == rejected
    assert (report["read"], report["kept"]) == (len(samples), len(kept))
    assert sum(report["dropped"].values()) == len(rejected)
    assert report["dropped"]["unreadable image"] == 7
    assert not (tmp_path / "set.partial").exists()
    tars = [f"cc12m-train-{i:04d}.tar{end}" for i in range(4) for end in ("", ".index.json")]
    names = [*tars, "dropped.jsonl", "problematic_indices.txt", "report.json"]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == names


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    raw: Path, tmp_path: Path, num_workers: int, expected: dict[str, bytes]
) -> None:
    prepare(raw, tmp_path / "set", 14, num_workers=num_workers)
    assert made_in(tmp_path / "set") == expected


@pytest.fixture(scope="module")
def expected(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("expected") / "set"
    prepare(raw, output, 14, num_workers=2)
    return made_in(output)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 6, 12, 17])
def test_the_first_usable_samples_are_selected_in_order(
    raw: Path, tmp_path: Path, num_samples: int
) -> None:
    report = prepare(raw, tmp_path / "all")
    selected = prepare(raw, tmp_path / "set", num_samples)
    all_samples, dataset = TarImages(tmp_path / "all"), TarImages(tmp_path / "set")
    keys = [all_samples.key(i) for i in range(num_samples)]
    assert [dataset.key(i) for i in range(len(dataset))] == keys
    last = int(keys[-1])  # a key is the sample's index in the raw set
    assert (selected["kept"], selected["read"], report["kept"]) == (num_samples, last + 1, 17)
    rows = dropped(tmp_path / "all")
    assert dropped(tmp_path / "set") == [row for row in rows if row["index"] < last]


def test_listed_indices_are_always_dropped(raw: Path, tmp_path: Path) -> None:
    prepare(raw, tmp_path / "all")
    keys = [TarImages(tmp_path / "all").key(i) for i in range(17)]
    unreadable = next(row for row in dropped(tmp_path / "all") if "unread" in row["reason"])
    listed = [unreadable["index"], int(keys[0]), int(keys[9]), 10**7]
    (tmp_path / "listed.txt").write_text("\n".join(map(str, listed)) + "\n")
    problematic = read_problematic(tmp_path / "listed.txt")
    report = prepare(raw, tmp_path / "set", 12, problematic=problematic)
    dataset = TarImages(tmp_path / "set")
    remaining = [key for i, key in enumerate(keys) if i not in (0, 9)][:12]
    assert [dataset.key(i) for i in range(len(dataset))] == remaining
    assert report["dropped"]["listed as problematic"] == 3
    rows = dropped(tmp_path / "all")
    reasons = ("unreadable image", "caption not UTF-8")
    found = [row["index"] for row in rows if row["reason"] in reasons]
    assert (tmp_path / "all/problematic_indices.txt").read_text().split() == list(map(str, found))
    seen = [index for index in found if index < report["read"]]
    assert (tmp_path / "set/problematic_indices.txt").read_text().split() == list(map(str, seen))
    assert report["problematic_indices"] == {
        "only_found": [index for index in seen if index != unreadable["index"]],
        "only_listed": [int(keys[0]), int(keys[9])],
    }
    assert report["unreadable_but_not_listed"] == len(seen) - 1
    assert report["listed_but_readable"] == 2
    again = read_problematic(tmp_path / "set/problematic_indices.txt")
    report = prepare(raw, tmp_path / "again", 12, problematic=again)
    assert report["problematic_indices"] == {"only_found": [], "only_listed": []}


def test_too_few_samples_are_an_error_and_the_cleaned_tars_are_kept(
    raw: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"only 17 of 30 samples are usable, 18 are needed"):
        prepare(raw, tmp_path / "set", 18)
    assert not (tmp_path / "set").exists()
    cleaned = {path.name: path.stat().st_ino for path in tmp_path.glob("set.partial/*.tar")}
    prepare(raw, tmp_path / "set")
    assert {path.name: path.stat().st_ino for path in tmp_path.glob("set/*.tar")} == cleaned


def test_a_changed_raw_tar_is_cleaned_again(tmp_path: Path) -> None:
    sample = ("0", parts(USABLE["tall"]))
    write_tar(tmp_path / "raw" / "a.tar", [sample])
    write_tar(tmp_path / "raw" / "b.tar", [("1", parts(b""))])
    with pytest.raises(DataError, match="only 1 of 2"):
        prepare(tmp_path / "raw", tmp_path / "set", 2)
    write_tar(tmp_path / "raw" / "b.tar", [("1", parts(USABLE["wide"]))])
    assert prepare(tmp_path / "raw", tmp_path / "set", 2)["kept"] == 2


def test_a_complete_output_is_kept_and_another_is_replaced_only_with_force(
    raw: Path, tmp_path: Path
) -> None:
    prepare(raw, tmp_path / "set", 3)
    inode = (tmp_path / "set" / "report.json").stat().st_ino
    prepare(tmp_path / "missing", tmp_path / "set", 3)
    assert (tmp_path / "set" / "report.json").stat().st_ino == inode
    with pytest.raises(DataError, match="--force"):
        prepare(raw, tmp_path / "set", 4)
    assert prepare(raw, tmp_path / "set", 4, force=True)["kept"] == 4


@pytest.mark.parametrize("length", [0, 300, 512, 20_000, 71_000])
def test_a_truncated_raw_tar_is_an_error(tmp_path: Path, length: int) -> None:
    write_raw_cc12m(tmp_path / "raw")
    broken = tmp_path / "raw" / "cc12m-train-0001.tar"
    broken.write_bytes(broken.read_bytes()[:length])
    with pytest.raises(DataError, match=r"0001\.tar: not a whole tar"):
        prepare(tmp_path / "raw", tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_a_repeated_key_is_kept_once(tmp_path: Path) -> None:
    samples = [(key, parts(USABLE["exact"])) for key in ("a", "b", "a")]
    write_tar(tmp_path / "raw" / "0.tar", samples)
    report = prepare(tmp_path / "raw", tmp_path / "set")
    assert report["kept"] == 2
    assert report["dropped"] == {"key or caption that a tar cannot hold": 1}


@pytest.mark.parametrize("given", ["missing", "empty"])
def test_an_input_without_tars_is_an_error(tmp_path: Path, given: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"--input.*{given}"):
        open_source(str(tmp_path / given)).names()


@pytest.mark.parametrize("text", ["x", "1.5", "-1", "9" * 40])
def test_a_malformed_list_of_indices_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "list").write_text(f"7\n{text}\n")
    with pytest.raises(ConfigError, match="--problematic"):
        read_problematic(tmp_path / "list")


def test_two_processes_cannot_write_the_same_output(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "set.partial").mkdir()
    with (
        exclusive_lock(tmp_path / "set.partial"),
        pytest.raises(StorageError, match="another process"),
    ):
        prepare(raw, tmp_path / "set")


@pytest.mark.parametrize("mount", ["/", "/proc"])
def test_an_output_that_is_a_mount_point_is_an_error(raw: Path, mount: str) -> None:
    with pytest.raises(DataError, match="name a folder in it"):
        prepare(raw, Path(mount))


STEPS = [
    ("os.rename", "settings.partial"),
    ("os.rename", "dropped.partial"),
    ("os.remove", "0003.tar.json"),
    ("os.rename", "0003.tar"),
    ("os.rename", "0003.tar.index"),
    ("os.rename", "report.partial"),
    ("os.rename", "set.partial"),
    ("shutil.rmtree", "set/work"),
    ("os.remove", "set/settings.json"),
]
"""The last steps of the parent process, as audit events; it is killed before each."""


def arguments(raw: Path, output: Path) -> list[object]:
    options = ["--samples", 14, "--workers", 2]
    return ["prepare", "cc12m", "--input", raw, "--output", output, *options]


@pytest.mark.proof
@pytest.mark.slow
def test_the_bytes_are_the_same_after_being_killed_at_any_final_step(
    raw: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    kill_before_each(STEPS, *arguments(raw, tmp_path / "set"))
    require_success(*arguments(raw, tmp_path / "set"))
    assert made_in(tmp_path / "set") == expected


@pytest.mark.proof
@pytest.mark.slow
def test_the_bytes_are_the_same_after_being_killed_at_random_times(
    raw: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    begin = time.monotonic()
    require_success(*arguments(raw, tmp_path / "set0"))
    duration, rng, kills, finished = time.monotonic() - begin, random.Random(0), 0, 1
    for _ in range(8):
        seconds = rng.uniform(0.2, 0.9) * duration
        if is_killed_after(seconds, *arguments(raw, tmp_path / f"set{finished}")):
            kills += 1
        else:
            finished += 1
    require_success(*arguments(raw, tmp_path / f"set{finished}"))
    print(f"\nkilled {kills} times, finished {finished + 1} times")
    assert all(made_in(tmp_path / f"set{i}") == expected for i in range(finished + 1))
    wait_for_no_process_with(str(tmp_path))


def wait_for_no_process_with(argument: str) -> None:
    """Wait until no process has ``argument`` on its command line."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        if argument not in lines:
            return
        time.sleep(0.05)
    raise AssertionError(lines)


@pytest.mark.slow
def test_ctrl_c_ends_it_with_one_line_and_the_same_command_resumes(
    raw: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    program = command(*arguments(raw, tmp_path / "set"))
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(tmp_path.glob("set.partial/work/*")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert errors == "fluxtrain: error: stopped; the same command resumes\n"
    subprocess.run(program, check=True)
    assert made_in(tmp_path / "set") == expected


def test_a_users_mistake_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(map(str, arguments(tmp_path / "missing", tmp_path / "set")))) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("fluxtrain: error: --input: got")
    assert errors.count("\n") == 1
