"""What a trainer leaves as it ends, and what of it Kubernetes gets to read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fluxtrain.contract.launch import ENV_TERMINATION_MESSAGE
from fluxtrain.report.metrics import Progress
from fluxtrain.report.termination_message import LONGEST_BYTES, forward_termination_message, leave


def handed_on(folder: Path, message: str) -> dict[str, object]:
    log = folder / "termination-log"
    log.touch()
    forward_termination_message(folder / "words.json", message, log)
    found: dict[str, object] = json.loads(log.read_bytes())
    return found


def test_progress_and_message_are_handed_on(tmp_path: Path) -> None:
    progress = Progress()
    progress.update(rank=0, step=300, trainLoss=0.5)
    leave(progress, {ENV_TERMINATION_MESSAGE: str(tmp_path / "words.json")})
    assert handed_on(tmp_path, "the loss is nan") == {
        "phase": "loading",
        "rank": 0,
        "step": 300,
        "trainLoss": 0.5,
        "message": "the loss is nan",
    }
    assert "message" not in handed_on(tmp_path, "")


def test_nobody_is_told_where_nobody_asked(tmp_path: Path) -> None:
    leave(Progress(), {})
    leave(Progress(), {ENV_TERMINATION_MESSAGE: str(tmp_path / "no" / "such" / "folder")})
    forward_termination_message(tmp_path / "words.json", "a message", tmp_path / "termination-log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [None, "", '{"step": 3', "[1]", "\x00"])
def test_a_trainer_that_left_nothing_whole_hides_no_message(
    tmp_path: Path, words: str | None
) -> None:
    if words is not None:
        (tmp_path / "words.json").write_text(words)
    assert handed_on(tmp_path, "killed") == {"message": "killed"}


@pytest.mark.parametrize("character", ["x", "é", "\n", '"', "\udc80", "火"])
def test_of_a_long_message_the_end_is_kept(tmp_path: Path, character: str) -> None:
    progress = Progress()
    progress.update(rank=0, step=2**31)
    leave(progress, {ENV_TERMINATION_MESSAGE: str(tmp_path / "words.json")})
    found = handed_on(tmp_path, character * 9000 + "\nRuntimeError: why")
    assert (tmp_path / "termination-log").stat().st_size <= LONGEST_BYTES
    assert str(found["message"]).endswith("\nRuntimeError: why")
    assert found["step"] == 2**31
