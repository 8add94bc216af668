"""The termination message: the trainer's progress and the agent's message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fluxtrain.contract.process import ENV_TERMINATION_MESSAGE
from fluxtrain.report.progress import MAX_BYTES, write_progress, write_termination_log
from fluxtrain.runtime.progress import Progress


def write_file(folder: Path, **progress: object) -> None:
    """Write ``progress`` as a trainer does."""
    values = Progress()
    values.update(**progress)
    write_progress(values, {ENV_TERMINATION_MESSAGE: str(folder / "progress.json")})


def forwarded(folder: Path, message: str) -> dict[str, object]:
    """Return the content of the termination log."""
    log = folder / "termination-log"
    log.touch()
    write_termination_log(folder / "progress.json", message, 3, log)
    content: dict[str, object] = json.loads(log.read_bytes())
    return content


def test_progress_and_message_are_forwarded(tmp_path: Path) -> None:
    write_file(tmp_path, rank=0, step=300, trainLoss=0.5)
    progress = {"phase": "import", "rank": 0, "step": 300, "trainLoss": 0.5}
    content = forwarded(tmp_path, "the loss is nan")
    assert content.items() >= {**progress, "message": "the loss is nan"}.items()
    assert "message" not in forwarded(tmp_path, "")


def test_nothing_is_written_without_a_file_to_write_to(tmp_path: Path) -> None:
    write_progress(Progress(), {})
    write_progress(Progress(), {ENV_TERMINATION_MESSAGE: str(tmp_path / "no" / "such" / "folder")})
    write_termination_log(tmp_path / "progress.json", "a message", 3, tmp_path / "termination-log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "", '{"step": 3', "[1]", "\x00"])
def test_the_message_is_forwarded_without_valid_progress(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "progress.json").write_text(content)
    assert forwarded(tmp_path, "killed") == {"message": "killed", "processRestarts": 3}


@pytest.mark.parametrize("character", ["x", "é", "\n", '"', "\udc80", "火"])
def test_the_end_of_a_long_message_is_kept(tmp_path: Path, character: str) -> None:
    write_file(tmp_path, rank=0, step=2**31)
    content = forwarded(tmp_path, character * 9000 + "\nRuntimeError: why")
    assert (tmp_path / "termination-log").stat().st_size <= MAX_BYTES
    assert str(content["message"]).endswith("\nRuntimeError: why")
    assert content["step"] == 2**31
