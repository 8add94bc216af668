"""Generated files are up to date; documents have links that lead somewhere, few words, no bad phrase."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from tests.paths import ROOT

from fluxtrain.contract import process
from fluxtrain_operator.generate.__main__ import generated

BETTER = {
    r"\b(is|are) told\b": "is reported",
    r"\ba line (that )?(tells|says|names|reports)\b": "a message says",
    r"\bin a line\b": "reported",
    r"\bgo(es|ing)? on\b": "continues, resumes",
    r"\bwhat becomes of\b": "what happens to",
    r"\bwhat (it|they) likes?\b": "any field",
    r"\bby heart\b": "overfitting",
    r"\bgets nothing more\b": "is no longer updated",
    r"\bequal to the (bit|byte)\b": "bit-equal, identical",
    r"\b(that|which) none has\b": "that no … covers",
    r"\bfinds itself\b": "automatic",
    r"\bbegins? anew\b": "starts again",
    r"\bno (program|command) was started\b": "was not run",
    r"^(- |\| |\*\*)?[Oo]f [\w ]+: ": "a sentence with its subject first",
}
"""A pattern of words, and what to write instead."""
WRITTEN = {"docs/faults.md", "docs/sizing.md", "charts/fluxtrain-operator/README.md"}
"""Pages that other commands than make generate write."""


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


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)) for title in titles)
    return frozenset(each.strip().lower().replace(" ", "-") for each in kept)


@pytest.mark.slow
def test_every_link_in_the_documents_leads_somewhere() -> None:
    for page in tracked("*.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" not in target:
                name, _, anchor = target.partition("#")
                other = (page.parent / name).resolve() if name else page
                assert other.exists(), f"{page}: {target}"
                assert not anchor or anchor in anchors(other), f"{page}: {target}"


def narrowest(rows: list[str]) -> int:
    """Return the columns of a table that breaks after every blank, hyphen and slash, as browsers do."""
    texts = [re.sub(r"\[(.*?)\]\(.*?\)|[`*]", r"\1", row.replace("\\|", "")) for row in rows]
    cells = [text.strip().strip("|").split("|") for text in texts if re.search(r"\w", text)]
    words = [[re.split(r"(?<=[-/])|\s", cell) for cell in row] for row in cells]
    widths = [
        max(len(word) for cell in column for word in cell) for column in zip(*words, strict=True)
    ]
    return sum(widths) + 3 * len(widths) + 1


def test_tables_fit_a_hundred_columns() -> None:
    for page in documents():
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
            rows = table.splitlines()
            assert narrowest(rows) <= 100, f"{page}: {rows[0]}"


def test_documents_are_short() -> None:
    """Words have a letter or a digit; pages that a command writes do not count."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in documents()}
    words = {
        name: sum(bool(re.search(r"\w", each)) for each in text.split())
        for name, text in texts.items()
        if name.endswith(".md") and name not in WRITTEN
    }
    assert words["README.md"] <= 900
    assert texts["README.md"].count("\n") <= 120
    assert sum(words.values()) <= 36_000, words


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


@pytest.mark.slow
def test_the_tests_that_the_page_of_proofs_names_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)::(test_\w+)`", (ROOT / "docs/proof.md").read_text())
    assert len(named) > 80
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in _text_of(path)]
    assert not missing


def _text_of(path: str) -> str:
    return (ROOT / "tests" / path).read_text()


def found(text: str) -> list[str]:
    """Return the phrases in ``text`` with what to write instead."""
    return [
        f"{match[0]!r}: {better}"
        for pattern, better in BETTER.items()
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]


def documents() -> list[Path]:
    """Return the pages that people write."""
    made = generated()
    pages = tracked("*.md", "*.template")
    return [path for path in pages if str(path.relative_to(ROOT)) not in made]


def messages(path: Path) -> list[str]:
    """Return the texts of a module that are neither docstrings nor notes below a value."""
    tree = ast.parse(path.read_text())
    notes = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes
    ]


def test_the_documents_have_no_phrase_to_strike() -> None:
    faults = {str(path.relative_to(ROOT)): found(path.read_text()) for path in documents()}
    assert not {name: phrases for name, phrases in faults.items() if phrases}


@pytest.mark.parametrize("product", ["operator", "trainer"])
def test_the_messages_have_no_phrase_to_strike(product: str) -> None:
    paths = tracked(f"{product}/*.py")
    faults = {str(path.relative_to(ROOT)): found("\n".join(messages(path))) for path in paths}
    assert not {name: phrases for name, phrases in faults.items() if phrases}
