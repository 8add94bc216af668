"""CC12M: cleaned as the reference cleans, the same bytes however often it is killed and by however many."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.trainer.prepare.raw_cc12m import FIT, UNFIT, parts, write_raw_cc12m, write_tar
from tests.trainer.ranks import made_in

from fluxtrain.data.tar.dataset import TarImages
from fluxtrain.errors import ConfigError, DataError, StorageError
from fluxtrain.prepare.cc12m.build import prepare_cc12m, read_problematic
from fluxtrain.prepare.cc12m.image import RejectedError, clean
from fluxtrain.prepare.cc12m.source import FolderSource, open_source
from fluxtrain.prepare.staging_dir import exclusive_lock


def as_the_reference_sees_it(content: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels after datasets' decoding, torchvision's arithmetic, and RGB in training."""
    image: Image.Image = Image.open(io.BytesIO(content))
    image.load()
    if image.getexif().get(0x0112) is not None:
        image = ImageOps.exif_transpose(image)
    width, height = image.size
    if width <= height:
        width, height = 256, int(256 * height / width)
    else:
        width, height = int(256 * width / height), 256
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    top, left = round((height - 256) / 2.0), round((width - 256) / 2.0)
    return np.array(image.crop((left, top, left + 256, top + 256)).convert("RGB"))


@pytest.mark.parametrize("kind", FIT)
def test_a_picture_is_cleaned_to_the_last_bit_as_the_reference_cleans_it(kind: str) -> None:
    with Image.open(io.BytesIO(clean(FIT[kind]))) as cleaned:
        assert (cleaned.format, cleaned.mode, cleaned.size) == ("PNG", "RGB", (256, 256))
        assert np.array_equal(np.array(cleaned), as_the_reference_sees_it(FIT[kind]))


@pytest.mark.parametrize("kind", UNFIT)
def test_a_picture_that_cannot_be_used_says_why(kind: str) -> None:
    content, reason = UNFIT[kind]
    with pytest.raises(RejectedError) as raised:
        clean(content)
    assert raised.value.reason == reason
    assert len(raised.value.detail) < 250


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    write_raw_cc12m(folder)
    return folder


def prepare(raw: Path, output: Path, num_samples: int | None = None, **more: Any) -> dict[str, Any]:
    return prepare_cc12m(FolderSource(raw), output, num_samples, stream=io.StringIO(), **more)


def dropped(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "dropped.jsonl").read_text().splitlines()]


def test_a_raw_set_becomes_a_data_set_that_training_opens(tmp_path: Path) -> None:
    named = write_raw_cc12m(tmp_path / "raw")
    report = prepare(tmp_path / "raw", tmp_path / "set", num_workers=2)
    kept = [sample for sample, reason in named if reason is None]
    dataset = TarImages(tmp_path / "set")
    assert [dataset.key(i) for i in range(len(dataset))] == [key for key, _ in kept]
    for i, (_, files) in enumerate(kept):
        assert dataset.caption(i) == files["txt"].decode()
        pixels = dataset.image(i).permute(1, 2, 0).numpy()
        assert np.array_equal(pixels, as_the_reference_sees_it(files["jpg"]))
    left_out = [(i, key, why) for i, ((key, _), why) in enumerate(named) if why is not None]
    rows = dropped(tmp_path / "set")
    assert [(row["index"], row["key"], row["reason"]) for row in rows] == left_out
    assert (report["read"], report["kept"]) == (len(named), len(kept))
    assert sum(report["dropped"].values()) == len(left_out)
    assert report["dropped"]["unreadable image"] == 7
    assert not (tmp_path / "set.partial").exists()
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == sorted(
        [*(f"cc12m-train-{i:04d}.tar" for i in range(4)), "dropped.jsonl", "report.json"]
        + [f"cc12m-train-{i:04d}.tar.index.json" for i in range(4)]
    )


@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_workers_makes_the_same_bytes(
    raw: Path, tmp_path: Path, num_workers: int, whole: dict[str, bytes]
) -> None:
    prepare(raw, tmp_path / "set", 14, num_workers=num_workers)
    assert made_in(tmp_path / "set") == whole


@pytest.fixture(scope="module")
def whole(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("whole") / "set"
    prepare(raw, output, 14, num_workers=2)
    return made_in(output)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 6, 12, 17])
def test_the_first_fit_samples_are_taken_in_their_order(
    raw: Path, tmp_path: Path, num_samples: int
) -> None:
    report = prepare(raw, tmp_path / "all")
    some = prepare(raw, tmp_path / "set", num_samples)
    everything, dataset = TarImages(tmp_path / "all"), TarImages(tmp_path / "set")
    keys = [everything.key(i) for i in range(num_samples)]
    assert [dataset.key(i) for i in range(len(dataset))] == keys
    last = int(keys[-1])  # a key is the sample's index in the raw set
    assert (some["kept"], some["read"], report["kept"]) == (num_samples, last + 1, 17)
    rows = dropped(tmp_path / "all")
    assert dropped(tmp_path / "set") == [row for row in rows if row["index"] < last]


def test_listed_indices_are_left_out_whatever_they_hold(raw: Path, tmp_path: Path) -> None:
    prepare(raw, tmp_path / "all")
    keys = [TarImages(tmp_path / "all").key(i) for i in range(17)]
    unreadable = next(row for row in dropped(tmp_path / "all") if "unread" in row["reason"])
    listed = [unreadable["index"], int(keys[0]), int(keys[9]), 10**7]
    (tmp_path / "listed.txt").write_text("\n".join(map(str, listed)) + "\n")
    problematic = read_problematic(tmp_path / "listed.txt")
    report = prepare(raw, tmp_path / "set", 12, problematic=problematic)
    dataset = TarImages(tmp_path / "set")
    expected = [key for i, key in enumerate(keys) if i not in (0, 9)][:12]
    assert [dataset.key(i) for i in range(len(dataset))] == expected
    assert report["dropped"]["listed as problematic"] == 3
    assert report["unreadable_but_not_listed"] == report["dropped"]["unreadable image"] > 0


def test_too_few_samples_are_an_error_and_what_is_cleaned_is_kept(
    raw: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"only 17 of 30 samples are fit and 18 are wanted"):
        prepare(raw, tmp_path / "set", 18)
    assert not (tmp_path / "set").exists()
    cleaned = {path.name: path.stat().st_ino for path in tmp_path.glob("set.partial/*.tar")}
    prepare(raw, tmp_path / "set")
    assert {path.name: path.stat().st_ino for path in tmp_path.glob("set/*.tar")} == cleaned


def test_a_changed_raw_tar_is_cleaned_again(tmp_path: Path) -> None:
    sample = ("0", parts(FIT["tall"]))
    write_tar(tmp_path / "raw" / "a.tar", [sample])
    write_tar(tmp_path / "raw" / "b.tar", [("1", parts(b""))])
    with pytest.raises(DataError, match="only 1 of 2"):
        prepare(tmp_path / "raw", tmp_path / "set", 2)
    write_tar(tmp_path / "raw" / "b.tar", [("1", parts(FIT["wide"]))])
    assert prepare(tmp_path / "raw", tmp_path / "set", 2)["kept"] == 2


def test_a_set_that_is_whole_is_left_alone_and_others_only_replaced_by_force(
    raw: Path, tmp_path: Path
) -> None:
    prepare(raw, tmp_path / "set", 3)
    made = (tmp_path / "set" / "report.json").stat().st_ino
    prepare(tmp_path / "nowhere", tmp_path / "set", 3)
    assert (tmp_path / "set" / "report.json").stat().st_ino == made
    with pytest.raises(DataError, match="--force"):
        prepare(raw, tmp_path / "set", 4)
    assert prepare(raw, tmp_path / "set", 4, force=True)["kept"] == 4


@pytest.mark.parametrize("length", [0, 300, 512, 20_000, 71_000])
def test_a_raw_tar_that_is_cut_off_is_named_and_nothing_is_made(
    tmp_path: Path, length: int
) -> None:
    write_raw_cc12m(tmp_path / "raw")
    broken = tmp_path / "raw" / "cc12m-train-0001.tar"
    broken.write_bytes(broken.read_bytes()[:length])
    with pytest.raises(DataError, match=r"0001\.tar: not a whole tar"):
        prepare(tmp_path / "raw", tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_one_key_twice_in_a_tar_is_kept_once(tmp_path: Path) -> None:
    samples = [(key, parts(FIT["exact"])) for key in ("a", "b", "a")]
    write_tar(tmp_path / "raw" / "0.tar", samples)
    report = prepare(tmp_path / "raw", tmp_path / "set")
    assert (report["kept"], report["dropped"]) == (
        2,
        {"key or caption that a tar cannot hold": 1},
    )


@pytest.mark.parametrize("given", ["nowhere", "empty"])
def test_an_input_without_tars_is_named(tmp_path: Path, given: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"--input.*{given}"):
        open_source(str(tmp_path / given)).names()


@pytest.mark.parametrize("text", ["x", "1.5", "-1", "9" * 40])
def test_a_list_that_is_none_of_indices_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "list").write_text(f"7\n{text}\n")
    with pytest.raises(ConfigError, match="--problematic"):
        read_problematic(tmp_path / "list")


def test_two_processes_do_not_write_the_same_set(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "set.partial").mkdir()
    with (
        exclusive_lock(tmp_path / "set.partial"),
        pytest.raises(StorageError, match="another process"),
    ):
        prepare(raw, tmp_path / "set")


@pytest.mark.parametrize("mount", ["/", "/proc"])
def test_an_output_that_cannot_be_renamed_is_refused_at_once(raw: Path, mount: str) -> None:
    with pytest.raises(DataError, match="name a folder in it"):
        prepare(raw, Path(mount))


KILLER = Path(__file__).with_name("kill_before.py")
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
"""What the parent does last, each by its audit event: it is killed just before."""


def command(raw: Path, output: Path) -> list[str]:
    options = ["--samples", "14", "--workers", "2"]
    return ["prepare", "cc12m", "--input", str(raw), "--output", str(output), *options]


def test_killed_at_any_step_of_its_end_it_makes_the_same_bytes(
    raw: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    arguments = command(raw, tmp_path / "set")
    for event, fragment in STEPS:
        started = [sys.executable, str(KILLER), event, fragment, *arguments]
        ended = subprocess.run(started, capture_output=True)
        assert ended.returncode == -signal.SIGKILL, (event, fragment, ended.stderr)
    subprocess.run([sys.executable, "-m", "fluxtrain.cli", *arguments], check=True)
    assert made_in(tmp_path / "set") == whole


def test_killed_at_random_moments_it_makes_the_same_bytes(
    raw: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    begin = time.monotonic()
    assert killed_after(60, raw, tmp_path / "set0") is False
    duration, rng, kills, finished = time.monotonic() - begin, random.Random(0), 0, 1
    for _ in range(14):
        if killed_after(rng.uniform(0.2, 0.9) * duration, raw, tmp_path / f"set{finished}"):
            kills += 1
        else:
            finished += 1
    assert killed_after(60, raw, tmp_path / f"set{finished}") is False
    print(f"\nkilled {kills} times, finished {finished + 1} times")
    assert all(made_in(tmp_path / f"set{i}") == whole for i in range(finished + 1))
    wait_for_end_of(str(tmp_path))


def killed_after(seconds: float, raw: Path, output: Path) -> bool:
    """Prepare; return whether it was killed because it took longer."""
    program = [sys.executable, "-m", "fluxtrain.cli", *command(raw, output)]
    run = subprocess.Popen(program, stderr=subprocess.PIPE)
    try:
        _, errors = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()  # until the workers have gone too: they hold the same pipe
        return True
    assert run.returncode == 0, errors
    return False


def wait_for_end_of(word: str) -> None:
    """Wait until no process has ``word`` on its command line."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        if word not in lines:
            return
        time.sleep(0.05)
    raise AssertionError(lines)


def test_ctrl_c_ends_it_in_one_line_and_it_goes_on(
    raw: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    program = [sys.executable, "-m", "fluxtrain.cli", *command(raw, tmp_path / "set")]
    run = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(tmp_path.glob("set.partial/work/*")):
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert (run.returncode, said) == (
        75,
        "fluxtrain: error: stopped; the same command goes on from here\n",
    )
    subprocess.run(program, check=True)
    assert made_in(tmp_path / "set") == whole


def test_a_persons_mistake_is_told_in_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    wrong = command(tmp_path / "nowhere", tmp_path / "set")
    started = [sys.executable, "-m", "fluxtrain.cli", *wrong]
    ended = subprocess.run(started, capture_output=True, text=True, env=environment)
    assert ended.returncode == 2
    assert ended.stderr.startswith("fluxtrain: error: --input: got")
    assert "Traceback" not in ended.stderr
