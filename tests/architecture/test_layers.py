"""docs/architecture.md shows the layers that .importlinter enforces, row by row."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator

import pytest
from tests.architecture.size import SIZES, modules
from tests.paths import ROOT


def layers() -> dict[str, list[set[str]]]:
    """Return the rows of every layered package, by its folder."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    rows = {}
    for name in parser.sections():
        contract = parser[name]
        if contract.get("type") == "layers":
            package = contract["containers"].strip()
            side = "operator" if package.startswith("fluxtrain_operator") else "trainer"
            lines = contract["layers"].strip().splitlines()
            rows[f"{side}/{package.replace('.', '/')}"] = [
                set(re.split(r"[|\s]+", line.strip())) for line in lines
            ]
    return rows


def documented() -> dict[str, list[set[str]]]:
    """Return the rows of the page's tables, by their headings."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.findall(r"^### (\S+)\n\n\| row \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    return {
        heading: [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in rows.splitlines()]
        for heading, rows in tables
    }


def test_the_page_shows_every_row_of_every_layered_package() -> None:
    assert documented() == layers()


def test_the_page_shows_core_and_wings_with_their_lines() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    [figure] = re.findall(r"^```\n(commands .*?)^```", page, re.MULTILINE | re.DOTALL)
    [commands, wings, core] = (
        {name: int(lines.replace(",", "")) for name, lines in re.findall(r"(\w+) ([\d,]+)\b", part)}
        for part in re.split(r"^(?:wings|core) ", figure, flags=re.MULTILINE)
    )
    rows = layers()
    assert wings.keys() == rows["trainer/fluxtrain"][1] | {"kubectl"}
    shown = commands | wings | core
    for package in ("trainer/fluxtrain", "operator/fluxtrain_operator"):
        for name in set().union(*rows[package]) & shown.keys():
            paths = modules(ROOT / package / name) or [ROOT / package / f"{name}.py"]
            lines = sum(len(path.read_text().splitlines()) for path in paths)
            is_small = lines < min(SIZES["shortest"], shown[name])
            assert is_small or shown[name] == pytest.approx(lines, rel=0.1, abs=100), (
                package,
                name,
            )
    assert set().union(*rows["trainer/fluxtrain"]) <= shown.keys()


def test_one_module_of_the_core_knows_the_family_by_name() -> None:
    """Others ask ``model.takes``; the importers have words of their own."""
    trainer = ROOT / "trainer" / "fluxtrain"
    paths = {
        path.relative_to(trainer) for path in modules(trainer) if '"kontext"' in path.read_text()
    }
    named = {str(path) for path in paths if path.parts[0] != "imports"}
    assert named == {"contract/run/model.py", "cli/sample.py"}


def entries() -> Iterator[tuple[str, str, str]]:
    """Yield each ``module:name`` by which a module of the trainer finds a function, and that module."""
    for path in modules(ROOT / "trainer"):
        for module, name in re.findall(r'"(fluxtrain[\w.]+):(\w+)"', path.read_text()):
            yield str(path.relative_to(ROOT / "trainer" / "fluxtrain")), module, name


def test_what_is_found_by_its_name_exists() -> None:
    for path, module, name in entries():
        source = (ROOT / "trainer" / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), (path, module, name)


def test_wings_are_found_by_name_in_few_places() -> None:
    wings = layers()["trainer/fluxtrain"][1]
    places = {path for path, module, _ in entries() if module.split(".")[1] in wings}
    assert places == {"launch/rank.py", "report/records.py", "train/sources.py"}
