"""Whole files of each trainer: what is written for them is a valid job, which plan takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.trainer.imports import ai_toolkit_files
from tests.trainer.imports.kohya import kohya_files
from tests.trainer.imports.simpletuner import simpletuner_files

from fluxtrain.cli import main
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK
from fluxtrain.imports.files import import_file

FILES = {
    "kohya-lora.toml": kohya_files.LORA,
    "kohya-full.toml": kohya_files.FINE_TUNING,
    "ai-toolkit-lora.yaml": ai_toolkit_files.DEV,
    "ai-toolkit-schnell.yaml": ai_toolkit_files.SCHNELL,
    "ai-toolkit-page.yaml": ai_toolkit_files.PAGE,
    "simpletuner-lora.json": simpletuner_files.LORA,
    "simpletuner-full.json": simpletuner_files.FULL,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_written_file_resolves_to_the_same_and_can_be_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / name, tmp_path / "job.yaml"
    source.write_text(FILES[name])
    command = ["import-config", str(source), "--epoch-samples", "400", "--output", str(output)]
    assert main([*command, "--data.images=toys"]) == EXIT_OK
    found = import_file(source, {"data": {"images": "toys"}}, epoch_samples=400)
    assert resolve(load_job(output).spec.run) == found.config
    assert main(["plan", str(output)]) == EXIT_OK
    assert "memory" in capsys.readouterr().out


def test_no_credential_reaches_the_file_or_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        **json.loads(simpletuner_files.LORA),
        "resume_from_checkpoint": "s3://key:hidden-1@bucket/state?X-Amz-Signature=hidden-2",
        "webhook_config": "https://hooks.example.org/hidden-3",
        "hub_token": "hidden-4",
        "some_api_key": "hidden-5",
        "tracker_project_name": "shown",
    }
    source = tmp_path / "config.json"
    source.write_text(json.dumps(options))
    assert main(["import-config", str(source), "--epoch-samples", "400"]) == EXIT_OK
    printed = capsys.readouterr()
    assert "hidden" not in printed.out + printed.err
    assert "some_api_key" in printed.err
    assert "shown" in printed.out


@pytest.mark.parametrize("path", ["C:/pics", "d:\\\\pics", "\\\\\\\\nas\\\\pics"])
def test_a_path_of_windows_leads_to_the_one_of_this_machine(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "lora.toml"
    source.write_text(f'network_module = "networks.lora_flux"\ntrain_data_dir = "{path}"\n')
    assert main(["import-config", str(source)]) == EXIT_OK
    assert "a path of Windows; --data.images=PATH names the one of" in capsys.readouterr().err
    assert main(["import-config", str(source), "--data.images=toys"]) == EXIT_OK
    assert "of Windows" not in capsys.readouterr().err
    with source.open("a") as file:
        file.write(f'network_weights = "{path}"\n')
    assert main(["import-config", str(source)]) == EXIT_OK
    both = "a relative path is below --models; a path of Windows; --adapter.initial=PATH names"
    assert both in capsys.readouterr().err
