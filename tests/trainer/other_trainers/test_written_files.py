"""Whole files of each trainer: what is written for them is a valid job, which plan takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.other_trainers import ai_toolkit_files, kohya_files, simpletuner_files

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK

FILES = {
    "kohya-lora.toml": kohya_files.LORA,
    "kohya-full.toml": kohya_files.FINE_TUNING,
    "ai-toolkit-lora.yaml": ai_toolkit_files.DEV,
    "ai-toolkit-schnell.yaml": ai_toolkit_files.SCHNELL,
    "ai-toolkit-page.yaml": ai_toolkit_files.PAGE,
    "simpletuner-lora.json": simpletuner_files.LORA,
    "simpletuner-full.json": simpletuner_files.FULL,
}


@pytest.mark.parametrize("name", FILES)
def test_the_written_file_can_be_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / name, tmp_path / "job.yaml"
    source.write_text(FILES[name])
    command = ["import-config", str(source), "--epoch-samples", "400", "--output", str(output)]
    assert main(command) == EXIT_OK
    assert main(["plan", str(output)]) == EXIT_OK
    assert "memory" in capsys.readouterr().out
