"""Whole files with one value changed to another kind: a valid job, or an error; nothing else."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trainer.imports import ai_toolkit_files
from tests.trainer.imports.simpletuner import simpletuner_files

from fluxtrain.contract.resource.document import parse_yaml
from fluxtrain.errors import ConfigError
from fluxtrain.imports.files import file_text, import_file, report

pytestmark = pytest.mark.slow

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.5, 10**30, float("inf"), "", "x", "true", "1e-3", "#", " --w 1"),
    *([], [1], [None], ["a"], [["a"]], [{}], {}, {"a": 1}, {"a": {"b": []}}),
]  # fmt: skip
CHANGES = 60
FILES = {
    "a.yaml": yaml.safe_load(ai_toolkit_files.PAGE),
    "b.yaml": yaml.safe_load(ai_toolkit_files.DEV),
    "config.json": json.loads(simpletuner_files.LOKR),
    "multidatabackend.json": json.loads(simpletuner_files.BACKENDS),
    "lycoris_config.json": json.loads(simpletuner_files.LYCORIS),
}


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all mappings and lists of ``document`` with each of their keys."""
    for key in document if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("prompts", [None, "prompts.txt"])
def test_a_changed_file_gives_a_job_or_an_error(
    name: str, prompts: str | None, tmp_path: Path
) -> None:
    draws, lines = random.Random(f"{name} {prompts}"), list[str]()
    for other in FILES:
        (tmp_path / other).write_text(json.dumps(FILES[other]))
    start = tmp_path / (name if name.endswith(".yaml") else "config.json")
    for _ in range(CHANGES):
        document = copy.deepcopy(FILES[name])
        parent, key = draws.choice(list(places(document)))
        parent[key] = draws.choice(VALUES)
        (tmp_path / name).write_text(json.dumps(document))
        try:
            found = import_file(start, {"data": {"images": "toys"}}, prompt_file=prompts)
        except ConfigError as error:
            lines += str(error).splitlines()
        else:
            assert all("\n" not in line for line in report(found))
            assert file_text(found, "a", start.name, 1)
    assert 0 < len(lines) < CHANGES
    assert max(map(len, lines)) < 700
    assert all(line.startswith(str(tmp_path)) for line in lines)


@pytest.mark.parametrize("word", ["1e-3", "0x10", "1:30", "true", "2024-01-01", "~", "# a", "é"])
def test_text_that_looks_like_another_kind_stays_text(tmp_path: Path, word: str) -> None:
    document = copy.deepcopy(FILES["b.yaml"])
    document["config"]["process"][0]["trigger_word"] = word
    file = tmp_path / "a.yaml"
    file.write_text(json.dumps(document))
    text = file_text(import_file(file, {}), "a", "a.yaml", 1)
    run = parse_yaml(text, "file")["spec"]["run"]
    assert run["data"]["caption_prefix"] == word
    assert run["optim"]["learning_rate"] == 2e-4
