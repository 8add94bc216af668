"""The walls of size.toml hold: rooms, lengths, the product's size; subjects of commits are imperative."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.architecture import subjects
from tests.architecture.size import PARTS, PRODUCT, SIZES, modules
from tests.paths import ROOT

SHRINK = "it may only shrink; correct size.toml"


def lengths(*parts: str) -> dict[str, int]:
    """Return the lines of each module of ``parts`` by its path."""
    paths = [path for part in parts for path in modules(ROOT / part)]
    return {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in paths}


def without_packages(lines: dict[str, int]) -> dict[str, int]:
    return {path: number for path, number in lines.items() if Path(path).name != "__init__.py"}


def test_a_room_has_no_more_modules_than_a_reader_keeps_in_mind() -> None:
    rooms = Counter(str(Path(path).parent) for path in without_packages(lengths(*PARTS)))
    full = {room: number for room, number in rooms.items() if number > SIZES["room"]}
    assert full == SIZES["rooms"], SHRINK


def test_a_module_is_no_longer_than_a_person_reads() -> None:
    lines = lengths(*PRODUCT)
    long = {path: number for path, number in lines.items() if number > SIZES["longest"]}
    assert long == SIZES["long"], SHRINK


def test_a_module_is_long_enough_to_hide_something() -> None:
    lines = without_packages(lengths(*PRODUCT))
    short = {path for path, number in lines.items() if number < SIZES["shortest"]}
    assert short == SIZES["short"].keys(), "merge it with its reader, or give a reason in size.toml"


def test_the_product_does_not_grow_unseen() -> None:
    lines = lengths(*PRODUCT)
    grown = "remove something, or raise size.toml in a commit of its own that says why"
    assert len(lines) <= SIZES["product_modules"], grown
    assert sum(lines.values()) <= SIZES["product_lines"], grown


@pytest.mark.parametrize(
    ("subject", "clue"),
    [
        ("Merge 681 modules into 280", None),
        ("Pass the device to the pinning thread", None),
        ("Embed the schema", None),
        ("x" * 73, "73 characters"),
        ("The page counts prompts", "'The'"),
        ("Fixed the loader", "'Fixed'"),
        ("Adding a rule", "'Adding'"),
        ("Counts prompts", "'Counts'"),
        ("mend the loader", "'mend'"),
        ("", "''"),
    ],
)
def test_subjects_are_imperative(subject: str, clue: str | None) -> None:
    found = subjects.fault(subject)
    assert found is None if clue is None else found is not None and clue in found


@pytest.mark.parametrize(("subject", "code"), [("Add a wall", 0), ("Added a wall", 1)])
def test_the_hook_refuses_a_subject(subject: str, code: int, tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text(f"{subject}\n\nThe body says why.\n")
    hook = [ROOT / ".githooks" / "commit-msg", message]
    done = subprocess.run(hook, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, subject in done.stderr) == (code, bool(code))


def test_subjects_of_a_clone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    commit = ["commit", "--quiet", "--allow-empty", "--no-verify", "-m"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for subject in ("The first", "Added later", "Add more"):
        subprocess.run([*git, *commit, subject], check=True)
    monkeypatch.setattr(subjects, "_SIZES", tmp_path / "size.toml")
    assert subjects.since("HEAD~2") == ["Add more", "Added later"]
    assert subjects.since("0123abc") == []
