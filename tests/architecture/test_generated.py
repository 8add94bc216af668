"""Generated files are up to date, text files are plain, and no file grows beyond what one can read."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from tests.paths import ROOT

from fluxtrain.contract import process
from fluxtrain_operator.generate.__main__ import generated


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the project that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = listed.splitlines() or [
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.rglob(pattern)
    ]
    return [ROOT / name for name in found if (ROOT / name).exists()]


def test_the_generated_files_are_up_to_date() -> None:
    for name, text in generated().items():
        assert (ROOT / name).read_text() == text, f"{name}: run make generate"


def test_every_module_says_what_it_is() -> None:
    for path in tracked("*.py"):
        assert path.read_text().startswith('"""'), path


def test_no_output_of_a_run_is_in_the_repository() -> None:
    outputs = {
        process.CONFIG_FILE,
        process.METRICS_FILE,
        process.MLPERF_FILE,
        process.LOSS_FILE,
        ".lock",
    }
    assert outputs.isdisjoint(path.name for path in tracked("*"))


def test_every_link_in_the_documents_leads_somewhere() -> None:
    for page in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    names = {re.split(r"[<>=\[]", name)[0].lower().replace("_", "-") for name in wanted}
    assert names <= pinned


def test_every_folder_of_tests_is_run() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    paths = options["ini_options"]["testpaths"]
    folders = {str(path.parent.relative_to(ROOT)) for path in tracked("tests/**/test_*.py")}
    assert {
        f for f in folders if not any(f"{f}/".startswith(f"{path}/") for path in paths)
    } == set()
    assert {p for p in paths if not any(f"{f}/".startswith(f"{p}/") for f in folders)} == set()


def test_the_tests_that_the_page_of_proofs_names_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)::(test_\w+)`", (ROOT / "docs/proof.md").read_text())
    assert len(named) > 80
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in _text_of(path)]
    assert not missing


def _text_of(path: str) -> str:
    return (ROOT / "tests" / path).read_text()
