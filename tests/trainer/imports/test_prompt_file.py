"""--prompt-file: prompts with sizes, seeds and negative prompts, which the trainer reads from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.trainer.imports import ai_toolkit_files
from tests.trainer.imports.kohya import kohya_files
from tests.trainer.imports.simpletuner import simpletuner_files

from fluxtrain.cli import main
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.sample.prompts import read_prompts

Sample = tuple[str, int, int, int, int, str]


def written(folder: Path, name: str, text: str) -> list[Sample]:
    """Import ``text`` with a file of prompts, and return what the trainer reads from that."""
    file, output, prompts = folder / name, folder / "job.yaml", folder / "prompts.txt"
    file.write_text(text)
    command = ["import-config", str(file), "--output", str(output), "--prompt-file", str(prompts)]
    command.append("--data.images=toys")  # of all, without the regularisation pictures of some
    assert main(command) == EXIT_OK
    config = resolve(load_job(output).spec.run)
    assert (config.sampling.prompt_file, config.sampling.prompts) == ("prompts.txt", [])
    assert main(["plan", str(output), "--schedule.epochs=null"]) == EXIT_OK
    return [
        (it.text, it.width, it.height, it.seed, it.num_steps, it.negative)
        for it in read_prompts(prompts, config)
    ]


def test_samples_of_ai_toolkit_have_their_sizes_and_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(tmp_path, "a.yaml", ai_toolkit_files.PAGE) == [
        ("enpn, a red heart", 1024, 768, 42, 25, ""),
        ("a green leaf", 512, 768, 7, 25, ""),
    ]
    text = (tmp_path / "job.yaml").read_text()
    assert not [name for name in ("sample.height", "sample.seed", "sample.samples") if name in text]
    assert "sample.seed=42: is in the lines of sampling.prompt_file" in capsys.readouterr().err


@pytest.mark.parametrize(("walks", "seeds"), [(True, [3, 4]), (False, [3, 3])])
def test_a_seed_walks_if_it_is_said_to(tmp_path: Path, walks: bool, seeds: list[int]) -> None:
    document = yaml.safe_load(ai_toolkit_files.DEV)
    document["config"]["process"][0]["sample"]["walk_seed"] = walks
    found = written(tmp_path, "a.yaml", yaml.safe_dump(document))
    assert [seed for _, _, _, seed, _, _ in found] == seeds


def test_a_seed_that_is_drawn_there_is_drawn_here(tmp_path: Path) -> None:
    document = yaml.safe_load(ai_toolkit_files.DEV)
    document["config"]["process"][0]["sample"]["seed"] = -1
    written(tmp_path, "a.yaml", yaml.safe_dump(document))
    assert "--d" not in (tmp_path / "prompts.txt").read_text()


def test_images_of_simpletuner_have_all_sizes(tmp_path: Path) -> None:
    (tmp_path / "lycoris_config.json").write_text(simpletuner_files.LYCORIS)
    assert written(tmp_path, "c.json", simpletuner_files.LOKR) == [
        ("ohwx, a red heart", 1024, 1024, 7, 28, "blurry"),
        ("ohwx, a red heart", 1280, 768, 7, 28, "blurry"),
    ]


def test_no_file_is_written_without_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, prompts = tmp_path / "k.toml", tmp_path / "prompts.txt"
    file.write_text(kohya_files.FINE_TUNING)
    assert main(["import-config", str(file), "--prompt-file", str(prompts)]) == EXIT_OK
    assert not prompts.exists()
    assert "prompts.txt: not written: there are no prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--prompt-file=p.toml"], "--prompt-file: got 'p.toml'; must end in .txt"),
        (["--prompt-file=/etc/hosts"], "--prompt-file: got '/etc/hosts'; exists already"),
        (["--from-env", "--prompt-file=p.txt"], "--prompt-file: got 'p.txt'; is for FILE"),
        (["--prompt-file=/no/such/p.txt"], "/no/such/p.txt: cannot be written (No such file"),
    ],
)
def test_a_wrong_file_of_prompts_is_refused_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(ai_toolkit_files.DEV)
    given = [] if "--from-env" in arguments else [str(file)]
    assert main(["import-config", *given, *arguments]) != EXIT_OK
    assert line in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        ({"prompts": ["a"], "width": "wide"}, "sample.width: got 'wide'; must be a number"),
        ({"prompts": ["#1 of all"]}, "sample.prompts: got ['#1 of all']; must begin with text, without #"),
        ({"samples": [{"prompt": "a", "seed": 0.5}]}, "sample.samples.seed: got 0.5; must be a whole"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_a_sample_is_refused(
    sample: dict[str, object], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = {"type": "sd_trainer", "sample": sample}
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"job": "extension", "config": {"process": [process]}}))
    command = ["import-config", str(file), "--prompt-file", str(tmp_path / "p.txt")]
    assert main(command) == EXIT_USAGE
    assert line in capsys.readouterr().err
