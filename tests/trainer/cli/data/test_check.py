"""``fluxtrain data check``: what is used, changed and left out; its exit codes; its contact sheet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.trainer.picture_cache.folders import file_of, noise

from fluxtrain.cli import main
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.pictures.folder import list_pictures
from fluxtrain.data.pictures.inspection import (
    MAX_PICTURES,
    THUMBNAIL,
    Inspection,
    inspect,
    save_contact_sheet,
)
from fluxtrain.data.pictures.kohya_config import Subset, source_of
from fluxtrain.data.pictures.subset import training_pictures

SIZE = 64
ANY = "--data.max_skipped=1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of which everything can be said."""
    folder = tmp_path / "my-pictures"
    folder.mkdir()
    flat = Image.new("RGB", (SIZE, SIZE), (200, 30, 40))
    for name, image, kind in (
        ("a.png", flat, "PNG"),
        ("b.jpg", noise(300, 200), "JPEG"),
        ("c.webp", noise(40, 40, seed=1), "WEBP"),
        ("d.png", noise(900, 100, seed=2), "PNG"),
        ("e.png", flat, "PNG"),
        ("f.jpg", noise(80, 80, "CMYK"), "JPEG"),
    ):
        (folder / name).write_bytes(file_of(image, kind))
        (folder / name).with_suffix(".txt").write_text(f"the picture {name}")
    (folder / "c.txt").unlink()
    (folder / "g.png").write_bytes((folder / "b.jpg").read_bytes()[:500])
    (folder / "h.png").write_bytes(file_of(noise(4, 4), "PNG"))
    (folder / "i.heic").write_bytes(b"")
    return folder


def check(folder: Path, *options: str) -> int:
    usual = {"--contact-sheet": str(folder.parent / "sheet.png"), "--image-size": str(SIZE)}
    added = [text for pair in usual.items() if pair[0] not in options for text in pair]
    return main(["data", "check", str(folder), *added, ANY, *options])


def looked_at(folder: Path, size: int) -> Inspection:
    listing, data = list_pictures(folder), DataConfig(image_size=size, latent_size=size // 8)
    pictures = training_pictures([(Subset(folder), listing)])
    return inspect(pictures, listing.skipped, data, seed=0, threads=2)


def test_it_says_what_is_used_changed_and_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        f"{folder}: 6 pictures can be used (3 png, 2 jpg, 1 webp)",
        "sizes: 40 x 40 to 900 x 100 pixels; trained at 64 x 64",
        "an epoch: 60 samples, 15 steps of 4; the run: 300 steps, 20 epochs",
        "to encode: 5 latents and 6 captions, the empty one too; 24.0 MiB",
    ]
    assert lines[4:-4] == [
        "1 picture without a caption (data.class_tokens, else the empty prompt):",
        "  c.webp",
        "1 picture enlarged:",
        "  c.webp: 40 x 40, 1.6 times",
        "1 picture cropped to less than 60 %:",
        "  d.png: 900 x 100, 11% is seen",
        "1 group of exact duplicates:",
        "  a.png = e.png",
        "3 files that cannot be used:",
    ]
    assert lines[-4].startswith("  g.png: corrupt or cut off (")
    assert lines[-3:] == [
        "  h.png: 4 x 4 pixels would be enlarged 16 times; at most 8 times is allowed",
        "  i.heic: .heic is not read; convert it to PNG, JPEG or WebP",
        f"contact sheet: {folder.parent / 'sheet.png'}",
    ]
    assert check(folder, "--schedule.epochs=1") == 0
    assert "; the run: 15 steps, 1 epoch\n" in capsys.readouterr().out


def test_captions_that_are_cut_or_not_read_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.TXT").write_text("word " * 600)
    (folder / "d.caption").write_text("other")
    (folder / "d.txt").write_text("one")
    check(folder)
    text = capsys.readouterr().out
    assert "without a caption" not in text
    title = "1 picture with captions of more words than the 512 tokens that T5 reads"
    assert f"{title} (data.text_length):\n  c.webp\n" in text
    title = "1 picture with several text files, of which one is used"
    assert f"{title}:\n  d.png: d.txt, d.caption\n" in text


def test_a_placeholder_for_a_trigger_word_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "b.txt").write_text("a photo of [trigger] at sea")
    check(folder)
    assert (
        "1 picture with [trigger], which is trained as it stands:\n  b.jpg\n"
        in capsys.readouterr().out
    )


def test_exit_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, "--strict") == 1
    for name in ("g.png", "h.png", "i.heic"):
        (folder / name).unlink()
    assert check(folder, "--strict") == 0
    for path in folder.glob("*.*"):
        path.unlink()
    (folder / "g.png").write_bytes(b"no picture")
    assert check(folder) == 1
    text = "none of the 1 pictures can be used; g.png: no picture in a format that is read"
    assert text in capsys.readouterr().err
    (folder / "g.png").unlink()
    assert check(folder) == 1
    assert "holds no pictures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--image-size", "100"], 2, "--image-size: got 100; must be a multiple of 16"),
        (["-f", "job.yaml"], 2, "SOURCE: give either SOURCE or -f FILE"),
        (["--data.maks=alpha"], 2, "--data.maks: no such field; did you mean masks?"),
        (["--data.masks=masks"], 1, "it should hold pictures; it should have a mask for each picture"),
        (["--data.repeats=0"], 2, "spec.run.data.repeats: got 0; must be"),
        (["--contact-sheet", "/proc/sheet.png"], 74, "--contact-sheet /proc/sheet.png: cannot be written"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    assert check(folder, *options) == code
    assert message in capsys.readouterr().err


def test_of_many_files_the_first_are_named_unless_all_are_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(9):
        (folder / f"x{number}.mp4").touch()
    check(folder)
    text = capsys.readouterr().out
    assert "12 files that cannot be used:" in text
    assert "  … and 7 more (--all names them)" in text
    check(folder, "--all")
    text = capsys.readouterr().out
    assert "  x8.mp4: .mp4 is not read" in text


def test_the_contact_sheet_shows_the_part_that_is_trained(folder: Path, tmp_path: Path) -> None:
    found = looked_at(folder, SIZE)
    assert save_contact_sheet(tmp_path / "sheet.png", found).pictures == 8
    with Image.open(tmp_path / "sheet.png") as image:
        sheet = np.asarray(image)
    assert sheet.shape[1] == 8 * (THUMBNAIL + 8) + 8
    middle = 8 + THUMBNAIL // 2
    assert sheet[middle, middle].tolist() == [200, 30, 40]  # a.png
    fault = 8 + 6 * (THUMBNAIL + 8)  # g.png has a frame only
    assert sheet[8, fault + 5].tolist() == [0xB0, 0, 0x20]
    assert sheet[8 + 20, fault + 100].tolist() == [255, 255, 255]


def test_a_large_folder_has_a_sheet_of_its_first_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    content = file_of(Image.new("RGB", (16, 16)), "PNG")
    for number in range(MAX_PICTURES + 3):
        (folder / f"{number:04d}.png").write_bytes(content)
    found = looked_at(folder, 16)
    assert len(found.used) == MAX_PICTURES + 3
    assert save_contact_sheet(tmp_path / "sheet.png", found).pictures == MAX_PICTURES


def test_another_file_is_not_replaced_by_a_contact_sheet(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(folder) == check(folder) == 0  # a contact sheet is
    monkeypatch.setattr("fluxtrain.cli.data.check_pictures", None)  # nothing is read before
    for path in (folder / "a.png", folder / "a.txt", folder):
        before = path.is_file() and path.read_bytes()
        assert check(folder, "--contact-sheet", str(path)) == 2
        error = capsys.readouterr().err
        assert "error: --contact-sheet: got '/" in error
        assert "; exists and is no contact sheet of fluxtrain; remove it or name another" in error
        assert (path.is_file() and path.read_bytes()) == before


def test_a_contact_sheet_does_not_become_a_picture(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    names = [picture.name for picture in list_pictures(folder).pictures]
    for _ in range(2):
        assert main(["data", "check", ".", "--image-size", str(SIZE), ANY]) == 0
        assert "6 pictures can be used" in capsys.readouterr().out
        assert (folder / "contact-sheet.png").is_file()
        assert [picture.name for picture in list_pictures(folder).pictures] == names
    for options in (["."], ["my-pictures", "--data", ".."]):
        given = ["data", "check", *options, "--contact-sheet", "sub/sheet.png"]
        assert main(given) == 2
        text = "--contact-sheet: got 'sub/sheet.png'; is in "
        assert text in capsys.readouterr().err
    assert not (folder / "sub").exists()
    (folder / "contact-sheet.png").write_bytes((folder / "b.jpg").read_bytes())  # one of the user's
    assert len(list_pictures(folder).pictures) == len(names) + 1


@pytest.mark.parametrize("root", ["data", "other"])
def test_the_folder_is_the_one_that_a_run_would_find(
    folder: Path, root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the root of runs first; what is in the current folder only is found too, with a note."""
    monkeypatch.chdir(folder.parent)
    if root != "data":
        monkeypatch.setenv("FLUXTRAIN_DATA", root)
    usual = ["--image-size", str(SIZE), ANY, "--contact-sheet=sheet.png"]
    note = f"my-pictures is looked for here; fluxtrain run looks in {root}, or in --data"
    assert main(["data", "check", "my-pictures", *usual]) == 0
    printed = capsys.readouterr()
    assert "6 pictures can be used" in printed.out
    assert note in printed.err
    (folder.parent / root / "my-pictures").mkdir(parents=True)
    (folder.parent / root / "my-pictures" / "b.jpg").write_bytes((folder / "b.jpg").read_bytes())
    assert main(["data", "check", "my-pictures", *usual]) == 0
    printed = capsys.readouterr()
    assert "1 picture can be used" in printed.out
    assert "looked for" not in printed.err
    assert main(["data", "check", "./my-pictures", *usual]) == 0
    printed = capsys.readouterr()
    assert "6 pictures can be used" in printed.out
    assert "looked for" not in printed.err
    assert main(["data", "check", "nowhere", *usual]) == 1
    assert note.replace("my-pictures", "nowhere") in capsys.readouterr().err


def test_a_contact_sheet_beside_shards_leaves_them_shards(folder: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "s-0.tar").touch()
    save_contact_sheet(shards / "contact-sheet.png", looked_at(folder, SIZE))
    assert source_of("shards", shards) == str(shards)


def test_a_contact_sheet_that_nobody_asked_for_may_be_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")  # a folder in which nothing can be written
    assert main(["data", "check", str(folder), f"--image-size={SIZE}", ANY]) == 0
    printed = capsys.readouterr()
    assert "6 pictures can be used" in printed.out
    assert "--contact-sheet contact-sheet.png: cannot be written" in printed.err
