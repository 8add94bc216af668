"""What modules import and name: no test is imported; an optimizer or a data set is known to its own table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

from fluxtrain.contract.run.optim import OPTIMIZER_KINDS

PRODUCT = sorted((ROOT / "trainer").rglob("*.py")) + sorted((ROOT / "operator").rglob("*.py"))
KNOW_OPTIMIZERS = (
    "trainer/fluxtrain/optim/",
    "trainer/fluxtrain/imports/",
    "trainer/fluxtrain/contract/run/optim.py",
    "trainer/fluxtrain/contract/run/presets.py",
    "trainer/fluxtrain/contract/run/closed_division.py",
)
"""The optimizers, their table, other trainers' names of them, the presets and MLPerf's rule."""


def imported(folder: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield every module below ``folder`` and the parts of each full name that it imports."""
    for path in (ROOT / folder).rglob("*.py"):
        if ".peers" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.split(".")) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                module = node.module.split(".")
                yield from ((path, [*module, alias.name]) for alias in node.names)


def test_no_module_imports_a_test_module() -> None:
    for path, (package, *parts) in imported("tests"):
        assert package != "tests" or not any(part.startswith("test_") for part in parts), path


def test_no_benchmark_imports_tests() -> None:
    for path, (package, *_) in imported("benchmarks"):
        assert package != "tests", path


def named(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Yield the lines of strings that are one of ``names``, or that compare one in an expression of CEL."""
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    for node in strings:
        text = str(node.value)
        if text in names or any(f"'{name}'" in text for name in names):
            yield node.lineno


def test_only_its_table_names_an_optimizer() -> None:
    lines = [
        f"{name}:{line}"
        for path in PRODUCT
        if not (name := str(path.relative_to(ROOT))).startswith(KNOW_OPTIMIZERS)
        for line in named(ast.parse(path.read_text(encoding="utf-8")), {*OPTIMIZER_KINDS})
    ]
    assert lines == [], "ask a field of OptimizerKind, or of the optimizer's class, in its place"


def test_only_the_optimizers_import_their_classes() -> None:
    outside = (path for path in PRODUCT if path.parent.name != "optim")
    importers = {
        str(path.relative_to(ROOT))
        for path in outside
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fluxtrain.optim.")
        if node.module != "fluxtrain.optim.optimizer"
    }
    assert importers == set()


def test_strings_are_found() -> None:
    text = "a = {'lion': 1}\nb = name == 'lion'\nc = name in ('lion',)\n'self.name != \\'lion\\''\n'of lion'"
    assert sorted(named(ast.parse(text), {"lion"})) == [1, 2, 3, 4]


def test_a_data_set_is_not_asked_which_one_it_is() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if re.search(r"[A-Z]\w*Dataset\b", ast.unparse(node.args[1]))
    ]
    assert lines == [], "ask a method of data.dataset.Source in its place"
